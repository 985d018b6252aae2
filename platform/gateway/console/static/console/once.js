// <form data-once> goes out once: a second press would take the place of the answer, which shows a secret once, or says
// what became of an edit.

const forms = document.querySelectorAll("form[data-once]");
for (const form of forms)
  form.addEventListener("submit", (event) => {
    if (form.dataset.once === "sent") event.preventDefault();
    form.dataset.once = "sent";
  });
addEventListener("pageshow", () => forms.forEach((form) => (form.dataset.once = "")));
