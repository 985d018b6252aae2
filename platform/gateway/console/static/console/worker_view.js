// One worker's section: its facts, gauges, lanes and tables. Knows a worker of a frame; writes text only, never markup.

import { duration, NONE, percent, rate, renew, row, timeOfDay, whole } from "./cells.js";
import { explain } from "./explain.js";
import { Lanes, stateWord } from "./lanes.js";
import { latencyRow, policyRow, tenantRow } from "./tables.js";

export class WorkerView {
  constructor(template, parent, tenantNames) {
    this.root = template.content.cloneNode(true).firstElementChild;
    this.tenantNames = tenantNames;
    parent.append(this.root);
    this.fields = this.named("field");
    this.meters = this.named("meter");
    this.rows = this.named("rows");
    this.requests = this.root.querySelector(".requests");
    this.requests.addEventListener("toggle", () => this.listRequests());
    this.root.addEventListener("click", (event) => this.clicked(event));
    this.epoch = null;
    this.heardAtMs = null;
  }

  named(kind) {
    return Object.fromEntries([...this.root.querySelectorAll(`[data-${kind}]`)].map((each) => [each.dataset[kind], each]));
  }

  hear(worker) {
    this.worker = worker;
    if (this.epoch !== worker.epoch || worker.heard_at_ms < this.heardAtMs) this.begin(worker);
    const isNews = this.heardAtMs !== worker.heard_at_ms;
    if (isNews) {
      this.heardAtMs = worker.heard_at_ms;
      this.lanes.hear(worker.board, worker.heard_at_ms);
    }
    this.tell(worker);
    if (!isNews) return;
    renew(this.rows.latency, worker.classes.map(latencyRow));
    renew(this.rows.policy, worker.classes.map(policyRow));
    renew(this.rows.tenants, worker.tenants.map((each) => tenantRow(each, this.tenantNames)));
    this.listRequests();
  }

  // A new epoch remembers nothing of the one before, and another gateway has another clock: the lanes begin anew.
  begin(worker) {
    this.epoch = worker.epoch;
    this.heardAtMs = null;
    this.sinceMs = undefined;
    this.lanes?.end();
    const old = this.root.querySelector(".lane-plot");
    const fresh = old.cloneNode(false);
    old.replaceWith(fresh);
    this.lanes = new Lanes(fresh, this.root.querySelector(".lane-canvas"), worker.classes.map((each) => each.class));
  }

  tell(worker) {
    this.write("id", worker.id);
    this.write("model", worker.model);
    this.write("version", worker.version || NONE);
    this.write("up", duration(worker.up_ms));
    this.write("state", worker.state === "silent" ? `silent for ${duration(worker.age_ms)}` : worker.state);
    this.fields.state.dataset.state = worker.state;
    this.write("step", whole(worker.step));
    this.write("policy", whole(worker.policy_version));
    this.write("output_per_s", rate(worker.output_per_s));
    this.write("prompt_per_s", `${rate(worker.prompt_per_s)} of prompts`);
    this.write("busy", worker.busy_percent === null ? NONE : `${worker.busy_percent} %`);
    this.meters.busy.value = worker.busy_percent ?? 0;
    for (const name of ["slots", "device", "host"]) this.gauge(name, worker[name]);
    this.tellPolicy(worker.policy);
    this.tellSpan(worker);
    this.write("num_requests", whole(worker.board.length));
    const isQuiet = this.lanes.isEmpty;
    this.fields.quiet.hidden = !isQuiet;
    this.lanes.svg.classList.toggle("visually-hidden", isQuiet);
    if (this.fields.drain) this.fields.drain.hidden = !["ready", "starting"].includes(worker.state);
    this.age(0);
  }

  tellPolicy(policy) {
    this.write("rung", policy.rung.replaceAll("_", " ") || NONE);
    this.fields.rung.classList.toggle("over", policy.rung !== "" && policy.rung !== "calm");
    this.write("paused", policy.batch_pauses ? `batch paused ${duration(policy.batch_paused_ms)}, ${whole(policy.batch_pauses)} times` : "batch never paused");
    this.write("switching", percent(policy.switching_percent));
    this.fields.switching.classList.toggle("over", policy.switching_percent > 5);
    this.write("cuts", policy.governor_cuts ? `governor cut ${whole(policy.governor_cuts)} times` : "governor never cut");
  }

  // Recent is the last minute, and until one has been seen what came since somebody began to look.
  tellSpan({ recent_ms: recentMs, heard_at_ms: heardAtMs, age_ms: ageMs }) {
    const sinceMs = recentMs < 60_000 ? heardAtMs - recentMs : null;
    if (sinceMs === this.sinceMs) return;
    this.sinceMs = sinceMs;
    const since = sinceMs === null ? null : `since ${timeOfDay(new Date(Date.now() - recentMs - ageMs))}`;
    this.write("recent_quantiles", since ?? "of the last minute");
    this.write("recent_time", since === null ? "Last minute" : since[0].toUpperCase() + since.slice(1));
  }

  gauge(name, { used, total }) {
    this.write(name, total ? `${whole(used)} / ${whole(total)}` : "none");
    this.meters[name].max = total || 1;
    this.meters[name].value = used;
  }

  write(name, text) {
    const field = this.fields[name];
    if (field.textContent !== text) field.textContent = text;
  }

  listRequests() {
    if (!this.requests.open || !this.worker) return;
    const focused = document.activeElement?.closest?.("button[data-response]")?.dataset.response;
    const rows = this.worker.board.map(([response, tenant, name, state, blocks, computed, output]) => {
      const button = Object.assign(document.createElement("button"), { type: "button", className: "link", textContent: response });
      button.dataset.response = response;
      return row([button, this.tenantNames[tenant] ?? tenant, name, stateWord(state), whole(blocks), whole(computed), whole(output)]);
    });
    this.rows.requests.replaceChildren(...rows);
    if (focused) this.rows.requests.querySelector(`button[data-response="${CSS.escape(focused)}"]`)?.focus();
  }

  clicked(event) {
    const isOnLanes = event.target === this.lanes?.svg;
    const response = isOnLanes ? this.lanes.responseAt(event) : event.target.closest("[data-response]")?.dataset.response;
    if (response) explain(this.worker.id, response);
    else if (event.target === this.fields.drain) this.askToDrain();
  }

  askToDrain() {
    const dialog = document.getElementById("drain");
    dialog.querySelector("[data-drain]").textContent = this.worker.id;
    dialog.querySelector("[name=worker]").value = this.worker.id;
    dialog.querySelector("[name=epoch]").value = this.worker.epoch;
    dialog.showModal();
  }

  // extraMs: how long ago the frame that said all this came; the ages in it have grown by as much.
  age(extraMs) {
    const isIdle = this.worker.board.length === 0;
    this.write("step_age", `${duration(this.worker.step_age_ms + Math.round(extraMs))} ago${isIdle ? ", idle" : ""}`);
    this.root.classList.toggle("is-old", this.worker.state === "silent" || extraMs > 2_000);
  }
}
