// What was typed into a form with data-unsaved is not lost in silence, nor what one that was refused has kept
// (data-unsaved="kept"): leaving the page asks first, and a form that cannot be sent (its sign-in has ended, the platform
// is away) stays as it is, says why, and can be sent once it is over.

const form = document.querySelector("form[data-unsaved]");
let isTyped = form?.dataset.unsaved === "kept";
let isBeingSent = false; // a second press would take the place of the answer to the first

function say(text, link) {
  const said = form.querySelector(".unsaved") ?? form.appendChild(document.createElement("p"));
  said.className = "unsaved notice bad";
  said.setAttribute("role", "alert");
  said.replaceChildren(text);
  if (link) said.append(" ", Object.assign(document.createElement("a"), { href: link, target: "_blank", textContent: "Sign in" }));
}

// Why the form cannot be sent just now; undefined once it has the token that a form of who asks now needs.
async function hindrance() {
  const answer = await fetch(location.href);
  if (answer.status === 403) return ["You may not edit this any more; what you typed is still here."];
  if (!answer.ok) return [`The platform answers with an error (${answer.status}); what you typed is still here. Try again.`];
  if (answer.redirected) return ["You are no longer signed in; what you typed is still here. Sign in in another tab and press again.", location.href];
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const token = page.querySelector("form[data-unsaved] input[name=csrfmiddlewaretoken]");
  if (!token) return ["There is nothing to edit here any more; what you typed is still here. Load the page again to see why."];
  form.querySelector("input[name=csrfmiddlewaretoken]").value = token.value;
}

if (form) {
  form.addEventListener("input", () => (isTyped = true));
  addEventListener("beforeunload", (event) => isTyped && event.preventDefault());
  addEventListener("pageshow", () => (isBeingSent = false));
  form.addEventListener("submit", async (event) => {
    if (event.submitter?.form !== form) return;
    event.preventDefault();
    if (isBeingSent) return;
    isBeingSent = true;
    let why;
    try {
      why = await hindrance();
    } catch {
      why = ["The platform does not answer; what you typed is still here. Try again."];
    }
    if (why) {
      isBeingSent = false;
      return say(...why);
    }
    isTyped = false;
    const { name, value } = event.submitter; // submit() by itself sends no button
    if (name) form.append(Object.assign(document.createElement("input"), { type: "hidden", name, value }));
    form.submit();
  });
}
