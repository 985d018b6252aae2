// One worker's section: its facts, gauges, lanes and tables. Knows a worker of a frame; writes text only, never markup.

import { Lanes, stateWord } from "./lanes.js";

const NONE = "–";
const whole = new Intl.NumberFormat("en");
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const LEVERS = ["hold", "swap", "recompute"];

export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms < 1_000) return `${whole.format(ms)} ms`;
  if (ms < 60_000) return `${tenth.format(ms / 1_000)} s`;
  return `${whole.format(Math.floor(ms / 60_000))} min ${whole.format(Math.floor((ms % 60_000) / 1_000))} s`;
}

function rate(value) {
  return value === null ? NONE : value < 100 ? tenth.format(value) : whole.format(Math.round(value));
}

function pair([p50, p95]) {
  return p50 === null ? NONE : `${duration(p50)} / ${duration(p95)}`;
}

const NOTHING = new Set([NONE, "0", "0.0", "0 · 0 · 0"]);

// A cell is a text, or [text, what it is made of].
function row(cells, heading) {
  const made = document.createElement("tr");
  if (heading) made.append(heading);
  for (const content of cells) {
    const [text, parts] = Array.isArray(content) ? content : [content, ""];
    const cell = document.createElement("td");
    cell.textContent = text;
    if (NOTHING.has(text)) cell.className = "none";
    if (parts) cell.append(Object.assign(document.createElement("small"), { textContent: parts }));
    made.append(cell);
  }
  return made;
}

// {slots: 5, step_time: 2} → "slots 5, step time 2"
function partsOf(counts) {
  return Object.entries(counts)
    .map(([word, count]) => `${word.replaceAll("_", " ")} ${whole.format(count)}`)
    .join(", ");
}

function classHeading(name) {
  const heading = document.createElement("th");
  heading.scope = "row";
  const swatch = document.createElement("i");
  swatch.className = `swatch ${name}`;
  swatch.textContent = name[0].toUpperCase();
  heading.append(swatch, name);
  return heading;
}

export class WorkerView {
  constructor(template, parent) {
    this.root = template.content.cloneNode(true).firstElementChild;
    parent.append(this.root);
    this.fields = Object.fromEntries([...this.root.querySelectorAll("[data-field]")].map((each) => [each.dataset.field, each]));
    this.meters = Object.fromEntries([...this.root.querySelectorAll("[data-meter]")].map((each) => [each.dataset.meter, each]));
    this.classRows = this.root.querySelector(".classes tbody");
    this.requests = this.root.querySelector(".requests");
    this.requestRows = this.requests.querySelector("tbody");
    this.requests.addEventListener("toggle", () => this.listRequests());
    this.epoch = null;
    this.heardAtMs = null;
  }

  hear(worker) {
    this.worker = worker;
    if (this.epoch !== worker.epoch || worker.heard_at_ms < this.heardAtMs) this.begin(worker);
    if (this.heardAtMs !== worker.heard_at_ms) {
      this.heardAtMs = worker.heard_at_ms;
      this.lanes.hear(worker.board, worker.heard_at_ms);
    }
    this.tell(worker);
    this.classRows.replaceChildren(...worker.classes.map((each) => this.classRow(each)));
    this.listRequests();
  }

  // A new epoch remembers nothing of the one before, and another gateway has another clock: the lanes begin anew.
  begin(worker) {
    this.epoch = worker.epoch;
    const old = this.root.querySelector(".lane-plot");
    const fresh = old.cloneNode(false);
    old.replaceWith(fresh);
    this.lanes = new Lanes(fresh, worker.classes.map((each) => each.class));
  }

  tell(worker) {
    this.write("id", worker.id);
    this.write("model", worker.model);
    this.write("state", worker.state === "silent" ? `silent for ${duration(worker.age_ms)}` : worker.state);
    this.fields.state.dataset.state = worker.state;
    this.write("step", whole.format(worker.step));
    this.write("policy", whole.format(worker.policy_version));
    this.write("output_per_s", rate(worker.output_per_s));
    this.write("prompt_per_s", `${rate(worker.prompt_per_s)} of prompts`);
    this.write("busy", worker.busy_percent === null ? NONE : `${worker.busy_percent} %`);
    this.meters.busy.value = worker.busy_percent ?? 0;
    for (const name of ["slots", "device", "host"]) this.gauge(name, worker[name]);
    this.write("num_requests", whole.format(worker.board.length));
    const isQuiet = this.lanes.isEmpty;
    this.fields.quiet.hidden = !isQuiet;
    this.lanes.svg.classList.toggle("visually-hidden", isQuiet);
    this.age(0);
  }

  gauge(name, { used, total }) {
    this.write(name, total ? `${whole.format(used)} / ${whole.format(total)}` : "none");
    this.meters[name].max = total || 1;
    this.meters[name].value = used;
  }

  write(name, text) {
    const field = this.fields[name];
    if (field.textContent !== text) field.textContent = text;
  }

  classRow(each) {
    const shed = Object.values(each.shed).reduce((sum, count) => sum + count, 0);
    const waiting = each.closed ? `${whole.format(each.waiting)} · closed` : whole.format(each.waiting);
    return row(
      [
        waiting,
        whole.format(each.running),
        whole.format(each.suspended),
        rate(each.output_per_s),
        pair(each.ttft_recent_ms),
        pair(each.ttft_ms),
        [LEVERS.map((lever) => whole.format(each.preemptions[lever] ?? 0)).join(" · "), partsOf(each.preempted_by)],
        [whole.format(shed), partsOf(each.shed)],
      ],
      classHeading(each.class),
    );
  }

  listRequests() {
    if (!this.requests.open || !this.worker) return;
    const rows = this.worker.board.map(([response, tenant, name, state, blocks, computed, output]) =>
      row([response, tenant, name, stateWord(state), whole.format(blocks), whole.format(computed), whole.format(output)]),
    );
    this.requestRows.replaceChildren(...rows);
  }

  // extraMs: how long ago the frame that said all this came; the ages in it have grown by as much.
  age(extraMs) {
    const isIdle = this.worker.board.length === 0;
    this.write("step_age", `${duration(this.worker.step_age_ms + Math.round(extraMs))} ago${isIdle ? ", idle" : ""}`);
    this.root.classList.toggle("is-old", this.worker.state === "silent" || extraMs > 2_500);
  }
}
