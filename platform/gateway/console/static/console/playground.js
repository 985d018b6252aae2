// The playground's page: the form, the answer, and what it took. A reload in the middle shows the whole answer again.

import { AnswerStream } from "./answer_stream.js";
import { AnswerText } from "./answer_text.js";

const page = document.getElementById("playground");
const form = document.getElementById("ask");
const fields = form.elements;
const send = document.getElementById("send");
const stop = document.getElementById("stop");
const stateNode = document.getElementById("state");
const problemNode = document.getElementById("problem");
const box = document.getElementById("answer");
const waits = document.getElementById("waits");
const waitsSum = document.getElementById("waits-sum");
const waitsList = document.getElementById("waits-list");
const shelf = `rubato-playground:${page.dataset.slug}`; // of this tab and this sign-in (sign_in.js): a reload finds it, another tab does not
const text = new AnswerText(box);
const PREPARE_EVERY_MS = 5_000; // where no line can be had, or none is kept

let stream = null;
let askedAtMs = null;
let firstAtMs = null;
let numTokens = 0;
let drawnAtMs = 0;
let preparedAtMs = -Infinity;

const fact = (name) => page.querySelector(`[data-fact="${name}"]`);

function show(name, words, below = "") {
  const node = fact(name);
  if (!node) return;
  node.textContent = words;
  if (below) {
    const small = document.createElement("small");
    small.textContent = below;
    node.append(small);
  }
}

function milliseconds(ms) {
  return ms < 10_000 ? `${Math.round(ms)} ms` : `${(ms / 1_000).toFixed(1)} s`;
}

function say(words) {
  if (stateNode.textContent !== words) stateNode.textContent = words;
}

function problem(words) {
  problemNode.textContent = words;
  problemNode.hidden = words === "";
}

function busy(isBusy) {
  send.disabled = isBusy;
  stop.disabled = !isBusy;
  box.setAttribute("aria-busy", String(isBusy));
}

function begin() {
  text.clear();
  problem("");
  waits.hidden = true;
  for (const name of ["ttft", "rate", "output", "input", "tier", "cost"]) show(name, "–");
  firstAtMs = null;
  numTokens = 0;
  busy(true);
  stream ??= line();
  return stream;
}

function line() {
  const csrf = form.querySelector("[name=csrfmiddlewaretoken]").value;
  return new AnswerStream({ ticketUrl: page.dataset.ticketUrl, csrf, project: fields.project.value, hear, tell });
}

// Somebody is about to ask: the line is ready before Send is pressed.
function prepare() {
  const nowMs = performance.now();
  if (send.disabled || (!stream && nowMs < preparedAtMs + PREPARE_EVERY_MS)) return;
  preparedAtMs = nowMs;
  stream ??= line();
  stream.prepare();
}

function ask() {
  if (send.disabled || !form.reportValidity()) return;
  const request = { model: fields.model.value, input: fields.prompt.value, service_tier: fields.tier.value };
  if (fields.max_tokens.value) request.max_output_tokens = Number(fields.max_tokens.value);
  if (fields.temperature.value) request.temperature = Number(fields.temperature.value);
  sessionStorage.removeItem(shelf);
  askedAtMs = performance.now();
  begin().start(request);
}

function hear(event) {
  if (event.type === "response.output_text.delta") return token(event.delta);
  if (event.type === "rubato.account") return account(event);
  const response = event.response;
  if (event.type === "response.created") {
    const kept = { id: response.id, prompt: fields.prompt.value, tier: fields.tier.value };
    sessionStorage.setItem(shelf, JSON.stringify(kept));
    show("tier", response.service_tier);
  }
  if (event.type === "response.failed") {
    const retry = response.error.headers?.["retry-after"];
    problem(response.error.message + (retry ? ` Try again in ${retry} s.` : ""));
  }
  if (response?.usage) {
    show("input", String(response.usage.input_tokens), response.usage.input_tokens_details.cached_tokens ? `${response.usage.input_tokens_details.cached_tokens} cached` : "");
    show("output", String(response.usage.output_tokens));
  }
  const endings = { completed: "Complete", incomplete: "Cut at max tokens", cancelled: "Stopped", failed: "Failed" };
  if (response && endings[response.status] && event.type !== "response.created") {
    say(`${endings[response.status]}${response.usage ? `: ${response.usage.output_tokens} tokens` : ""}.`);
  }
}

function token(delta) {
  const nowMs = performance.now();
  if (numTokens === 0) {
    firstAtMs = nowMs;
    if (askedAtMs !== null) show("ttft", milliseconds(nowMs - askedAtMs), "seen here");
    say("Answering …");
  }
  numTokens += 1;
  text.add(delta);
  if (nowMs - drawnAtMs < 250) return;
  drawnAtMs = nowMs;
  show("output", String(numTokens));
  if (askedAtMs !== null && nowMs - firstAtMs > 200) show("rate", (((numTokens - 1) * 1_000) / (nowMs - firstAtMs)).toFixed(1));
}

function account(told) {
  if (told.ttft_ms !== null && told.ttft_ms !== undefined) {
    const here = askedAtMs !== null && firstAtMs !== null ? `${milliseconds(firstAtMs - askedAtMs)} seen here` : "";
    show("ttft", milliseconds(told.ttft_ms), here);
    const decodeMs = told.total_ms - told.ttft_ms;
    show("rate", numTokens > 1 && decodeMs > 0 ? (((numTokens - 1) * 1_000) / decodeMs).toFixed(1) : "–");
  }
  if (told.cost) show("cost", told.cost);
  const queued = told.waits.filter((wait) => wait.phase === "queued");
  const paused = told.waits.filter((wait) => wait.phase === "paused");
  const sum = (list) => list.reduce((total, wait) => total + wait.ms, 0);
  const parts = [`It waited ${milliseconds(told.queue_ms ?? sum(queued))} before it started`];
  parts.push(paused.length ? `and was paused for ${milliseconds(sum(paused))} after that.` : "and was not paused after that.");
  if (told.is_moved) parts.push("It went on at another worker: these are the waits there.");
  waitsSum.textContent = parts.join(" ");
  waitsList.replaceChildren(
    ...told.waits.map((wait) => {
      const item = document.createElement("li");
      item.textContent = `${milliseconds(wait.ms)} ${wait.words}`;
      return item;
    }),
  );
  waits.hidden = false;
}

function tell(state, words, event) {
  if (state === "connecting" || state === "lost") say(words);
  if (state === "open") say(numTokens ? "Answering …" : words);
  if (state === "refused") {
    const isForgotten = event?.error.code === "response_not_found";
    if (isForgotten) sessionStorage.removeItem(shelf);
    const retry = event?.error.headers?.["retry-after"];
    problem(isForgotten ? "That answer is not kept any more." : words + (retry ? ` Try again in ${retry} s.` : ""));
    say("No answer.");
  }
  if (state === "over" && words) say(words);
  if (["over", "refused", "unused"].includes(state)) stream = null;
  if (state === "over") preparedAtMs = -Infinity; // the next question may follow at once
  if (["over", "refused"].includes(state)) busy(false);
}

// Only what is granted for the chosen model can be picked.
function offer() {
  const granted = fields.model.selectedOptions[0].dataset.tiers.split(" ");
  for (const radio of form.querySelectorAll("[name=tier]")) {
    radio.disabled = radio.value !== "auto" && !granted.includes(radio.value);
    if (radio.disabled && radio.checked) fields.tier.value = "auto";
  }
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) ask();
});
stop.addEventListener("click", () => {
  say("Stopping …");
  stream?.cancel();
});
fields.model.addEventListener("change", offer);
fields.project.addEventListener("change", () => stream?.isIdle && stream.finish("unused", "")); // a ticket is for one project
for (const sign of ["focusin", "pointerover", "keydown"]) form.addEventListener(sign, prepare);
offer();
busy(false); // the page comes with a button that sends nothing

const kept = JSON.parse(sessionStorage.getItem(shelf) ?? "null");
if (kept) {
  fields.prompt.value = kept.prompt;
  fields.tier.value = kept.tier;
  begin().resume(kept.id);
}
