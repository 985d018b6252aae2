// Asks again for a fragment of the page while it says that it is not finished: <div data-poll="url">…</div>.

import { tellInViewersZone } from "./times.js";

const EVERY_MS = 1000;
const oldNews = document.getElementById("old-news");

async function again(box) {
  if (!document.hidden) await ask(box);
  if (box.querySelector("[data-unfinished]")) setTimeout(() => again(box), EVERY_MS);
}

async function ask(box) {
  let isHeard = false;
  try {
    // a redirect leads to the log-in, which is no fragment
    const options = { headers: { "X-Fragment": "true" }, credentials: "same-origin", redirect: "manual" };
    const answer = await fetch(box.dataset.poll, options);
    isHeard = answer.ok;
    if (isHeard) show(box, await answer.text());
  } catch {
    // the network is away for a moment: the next turn asks again
  }
  oldNews?.toggleAttribute("hidden", isHeard);
}

// Whoever was on a button or link by keyboard stays there: those that matter have ids.
function show(box, html) {
  const focused = box.contains(document.activeElement) ? document.activeElement.id : "";
  box.innerHTML = html;
  tellInViewersZone(box);
  if (focused) document.getElementById(focused)?.focus();
}

for (const box of document.querySelectorAll("[data-poll]")) {
  if (box.querySelector("[data-unfinished]")) setTimeout(() => again(box), EVERY_MS);
}
