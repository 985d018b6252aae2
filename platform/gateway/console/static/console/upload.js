// A file dropped anywhere on the form is the chosen one. Without this module the form works all the same.

const form = document.getElementById("upload");
const state = document.getElementById("upload-state");
const input = form?.querySelector("input[type=file]");

function size(bytes) {
  return bytes < 1_048_576 ? `${Math.ceil(bytes / 1_024)} kB` : `${(bytes / 1_048_576).toFixed(1)} MB`;
}

function told() {
  const [file] = input.files;
  state.textContent = file ? `${file.name}, ${size(file.size)}` : "";
}

if (form) {
  for (const kind of ["dragenter", "dragover"]) {
    form.addEventListener(kind, (event) => {
      event.preventDefault();
      form.classList.add("is-over");
    });
  }
  form.addEventListener("dragleave", (event) => {
    if (!form.contains(event.relatedTarget)) form.classList.remove("is-over");
  });
  form.addEventListener("drop", (event) => {
    event.preventDefault();
    form.classList.remove("is-over");
    if (event.dataTransfer.files.length) input.files = event.dataTransfer.files;
    told();
  });
  input.addEventListener("change", told);
  form.addEventListener("submit", () => {
    form.querySelector("button").disabled = true;
    state.textContent = "Uploading …";
  });
}
