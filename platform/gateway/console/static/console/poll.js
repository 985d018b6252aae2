// Asks again for a fragment of the page while it says that it is not finished: <div data-poll="url">…</div>.

const EVERY_MS = 1000;

async function again(box) {
  try {
    const answer = await fetch(box.dataset.poll, { headers: { "X-Fragment": "true" }, credentials: "same-origin" });
    if (answer.ok) show(box, await answer.text());
  } catch {
    // the network is away for a moment: the next turn asks again
  }
  if (box.querySelector("[data-unfinished]")) setTimeout(() => again(box), EVERY_MS);
}

// Whoever was on a button or link by keyboard stays there: those that matter have ids.
function show(box, html) {
  const focused = box.contains(document.activeElement) ? document.activeElement.id : "";
  box.innerHTML = html;
  if (focused) document.getElementById(focused)?.focus();
}

for (const box of document.querySelectorAll("[data-poll]")) {
  if (box.querySelector("[data-unfinished]")) setTimeout(() => again(box), EVERY_MS);
}
