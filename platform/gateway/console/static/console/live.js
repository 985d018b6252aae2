// The live page: one socket, what it says about itself, and a view for each worker. Old news is shown as old.

import { duration, whole } from "./cells.js";
import { WorkerView } from "./worker_view.js";

const STALE_AFTER_MS = 2_000; // the feed sends at least once a second
const DEAD_AFTER_MS = 10_000; // open and silent: half open after a sleep or a change of network
const HEARTBEAT_MS = 15_000;
const RETRY_MS = [1_000, 2_000, 4_000, 8_000, 15_000];
const NOT_SIGNED_IN = 4401;

const statusNode = document.getElementById("status");
const noticeNode = document.getElementById("notice");
const booksNode = document.getElementById("books");
const emptyNode = document.getElementById("empty");
const freezeNode = document.getElementById("freeze");
const workersNode = document.getElementById("workers");
const template = document.getElementById("worker-template");
const tenantNames = JSON.parse(document.getElementById("tenant-names").textContent);
const calmMotion = matchMedia("(prefers-reduced-motion: reduce)");

const views = new Map();
let socket = null;
let failures = 0;
let retryAtMs = null;
let frame = null;
let frameAtMs = null; // performance.now() when it came
let isFrozen = false;
let isSignedOut = false;

function connect() {
  retryAtMs = null;
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const made = new WebSocket(`${scheme}://${location.host}/operator/live/stream`);
  const openedAtMs = performance.now();
  made.addEventListener("message", (event) => hear(JSON.parse(event.data)));
  made.addEventListener("close", (event) => {
    if (socket !== made) return;
    socket = null;
    isSignedOut = event.code === NOT_SIGNED_IN;
    retryAtMs = performance.now() + RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    tell();
  });
  made.openedAtMs = openedAtMs;
  socket = made;
}

// Leave the socket behind, whatever it thinks of itself, and begin again.
function reconnect() {
  const left = socket;
  socket = null;
  left?.close();
  connect();
}

function hear(news) {
  frame = news;
  frameAtMs = performance.now();
  failures = 0;
  if (!isFrozen) draw();
  tell();
}

function draw() {
  const present = new Set(frame.workers.map((worker) => worker.id));
  for (const [id, view] of views) {
    if (!present.has(id)) {
      view.root.remove();
      views.delete(id);
    }
  }
  for (const worker of frame.workers) {
    if (!views.has(worker.id)) views.set(worker.id, new WorkerView(template, workersNode, tenantNames));
    views.get(worker.id).hear(worker);
  }
  emptyNode.hidden = frame.workers.length > 0;
  slide();
}

function slide() {
  if (!frame || isFrozen) return;
  const sinceMs = Math.min(performance.now() - frameAtMs, 1_000);
  for (const view of views.values()) {
    const isMoving = view.worker.state !== "silent" && !calmMotion.matches;
    view.lanes.show(view.worker.state === "silent" ? view.worker.heard_at_ms : frame.at_ms + (isMoving ? sinceMs : 0), isMoving);
  }
}

function state() {
  if (isSignedOut) return ["signed_out", "Signed out"];
  if (!socket || (socket.readyState !== WebSocket.OPEN && frame)) return ["disconnected", "Disconnected"];
  if (!frame) return ["connecting", "Connecting"];
  const ageMs = performance.now() - frameAtMs;
  if (ageMs > STALE_AFTER_MS) return ["stale", "Stale"]; // how old is said below: this line is read aloud on each change
  if (!frame.bus_up) return ["stale", "No news from the workers"];
  return isFrozen ? ["frozen", "Frozen"] : ["live", "Live"];
}

function notice(name) {
  const old = frame ? ` The numbers below are from ${duration(Math.round((performance.now() - frameAtMs) / 1_000) * 1_000)} ago.` : "";
  if (name === "signed_out") return "You are no longer signed in as an operator. Reload this page to sign in.";
  if (name === "disconnected") {
    const inMs = retryAtMs === null ? 0 : Math.max(0, retryAtMs - performance.now());
    const when = inMs > 0 ? `Trying again in ${Math.ceil(inMs / 1_000)} s.` : "Trying again now.";
    return `The connection to the gateway is gone. ${when}${old}`;
  }
  if (name === "stale" && frame.bus_up) return `The connection is open, but nothing has come over it.${old}`;
  if (name === "stale") return "The gateway cannot reach its message bus, so it hears no worker.";
  const silent = frame?.workers.filter((worker) => worker.state === "silent") ?? [];
  if (silent.length) {
    const names = silent.map((worker) => `${worker.id} (${duration(worker.age_ms)})`).join(", ");
    return `Silent: ${names}. What is shown of it is the last it said.`;
  }
  return "";
}

// What the settler found when it last compared engines, ledger and roll-ups.
function booksWords(found) {
  const prompt = found?.engine_ledger_prompt_tokens ?? 0;
  const output = found?.engine_ledger_output_tokens ?? 0;
  const rows = found?.wrong_rollups ?? 0;
  if (!prompt && !output && !rows) return "";
  return `The books differ: engines counted ${whole(prompt)} prompt and ${whole(output)} output tokens that the ledger has not; ${whole(rows)} roll-up rows are wrong. Run manage.py reconcile.`;
}

function tell() {
  const [name, words] = state();
  if (statusNode.textContent !== words) statusNode.textContent = words;
  statusNode.dataset.state = name;
  const text = notice(name);
  if (noticeNode.textContent !== text) noticeNode.textContent = text;
  noticeNode.hidden = text === "";
  const books = booksWords(frame?.books);
  if (booksNode.textContent !== books) booksNode.textContent = books;
  booksNode.hidden = books === "";
  if (frame && !isFrozen) {
    const ageMs = performance.now() - frameAtMs;
    for (const view of views.values()) view.age(ageMs > 1_000 ? ageMs : 0);
  }
}

function watch() {
  const nowMs = performance.now();
  if (socket && nowMs - Math.max(frameAtMs ?? 0, socket.openedAtMs) > DEAD_AFTER_MS) reconnect();
  else if (!socket && !isSignedOut && retryAtMs !== null && nowMs >= retryAtMs) connect();
  tell();
}

function wake() {
  if (document.hidden || isSignedOut) return;
  if (!socket || performance.now() - (frameAtMs ?? socket.openedAtMs) > STALE_AFTER_MS) reconnect();
}

freezeNode.addEventListener("click", () => {
  isFrozen = !isFrozen;
  freezeNode.setAttribute("aria-pressed", String(isFrozen));
  if (isFrozen) for (const view of views.values()) view.lanes.rest();
  else if (frame) draw();
  tell();
});
document.addEventListener("visibilitychange", wake);
window.addEventListener("online", wake);
for (const button of document.querySelectorAll("dialog [data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}
setInterval(watch, 500);
setInterval(() => socket?.readyState === WebSocket.OPEN && socket.send("here"), HEARTBEAT_MS);

function animate() {
  if (!calmMotion.matches) slide();
  requestAnimationFrame(animate);
}
requestAnimationFrame(animate);
connect();
