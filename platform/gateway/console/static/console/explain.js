// Why did this request wait: a dialog with the engine's own account, asked of the worker when somebody clicks.

import { plainHeading, row } from "./cells.js";

const dialog = document.getElementById("explain");
const fields = Object.fromEntries([...dialog.querySelectorAll("[data-explain]")].map((each) => [each.dataset.explain, each]));
let asked = 0;

const ms = (us) => `${(us / 1_000).toLocaleString("en", { maximumFractionDigits: us < 10_000 ? 1 : 0 })} ms`;

function show(account) {
  const rest = account.total_us - account.queue_us - account.paused_us;
  const first = account.ttft_us === null ? "no token yet" : `first token after ${ms(account.ttft_us)}`;
  fields.sentence.textContent = account.sentence;
  fields.sums.textContent = `${ms(account.total_us)} so far: queued ${ms(account.queue_us)}, paused ${ms(account.paused_us)}, running ${ms(rest)}; ${first}${account.outcome ? `; ended: ${account.outcome}` : ""}.`;
  fields.waits.replaceChildren(...account.waits.map(([phase, words, us]) => row([ms(us), words], plainHeading(phase))));
  fields.timeline.replaceChildren(...account.timeline.map(([us, words]) => row([words], plainHeading(`+${ms(us)}`))));
  fields.whole.hidden = account.is_whole;
  fields.account.hidden = false;
}

export async function explain(worker, response) {
  const mine = ++asked;
  fields.response.textContent = response;
  fields.account.hidden = true;
  fields.sentence.textContent = "Asking the worker …";
  if (!dialog.open) dialog.showModal();
  try {
    const answer = await fetch(`${dialog.dataset.url}?${new URLSearchParams({ worker, response })}`, { headers: { Accept: "application/json" } });
    const account = await answer.json();
    if (mine !== asked) return;
    if (answer.ok) show(account);
    else fields.sentence.textContent = account.error;
  } catch {
    if (mine === asked) fields.sentence.textContent = "The gateway did not answer.";
  }
}
