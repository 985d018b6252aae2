// What was typed into a form with data-unsaved is not lost in silence, nor what one that was refused has kept
// (data-unsaved="kept"): leaving the page asks first, and a form whose sign-in has ended meanwhile stays as it is until
// one has signed in again.

const form = document.querySelector("form[data-unsaved]");
let isTyped = form?.dataset.unsaved === "kept";

function say(text, link) {
  const said = form.querySelector(".unsaved") ?? form.appendChild(document.createElement("p"));
  said.className = "unsaved notice bad";
  said.setAttribute("role", "alert");
  said.replaceChildren(text);
  if (link) said.append(" ", Object.assign(document.createElement("a"), { href: link, target: "_blank", textContent: "Sign in" }));
}

// The page as it is for who asks now: it carries the token that a form of theirs needs.
async function renewed() {
  const answer = await fetch(location.href);
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const token = page.querySelector("form[data-unsaved] input[name=csrfmiddlewaretoken]");
  if (token) form.querySelector("input[name=csrfmiddlewaretoken]").value = token.value;
  return Boolean(token);
}

if (form) {
  form.addEventListener("input", () => (isTyped = true));
  addEventListener("beforeunload", (event) => isTyped && event.preventDefault());
  form.addEventListener("submit", async (event) => {
    if (event.submitter?.form !== form) return;
    event.preventDefault();
    try {
      if (!(await renewed())) return say("You are no longer signed in; what you typed is still here. Sign in in another tab and press again.", location.href);
    } catch {
      return say("The platform does not answer; what you typed is still here. Try again.");
    }
    isTyped = false;
    form.submit();
  });
}
