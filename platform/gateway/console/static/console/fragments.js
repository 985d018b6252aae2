// What htmx leaves to the page: nothing is asked while nobody looks, what failed is said, moments are the viewer's.

import { tellInViewersZone } from "./times.js";

const failures = new Map(); // what was asked: the alert that says it failed, until the same succeeds

function reasonOf({ status }) {
  if (!status) return "The gateway does not answer";
  if (status === 403) return "It was refused; perhaps somebody has signed in or out since this page was loaded";
  return `The gateway answered with an error (${status})`;
}

function wordsOf({ requestConfig: { verb, elt }, xhr }) {
  const reason = reasonOf(xhr);
  if (verb === "get") return `${reason}. What is shown is the last it said.`;
  const notDone = elt.closest("[data-failed]")?.dataset.failed ?? "Not done";
  const asFarAsKnown = xhr.status ? "" : ", as far as this page knows";
  return `${notDone}${asFarAsKnown}: ${reason[0].toLowerCase()}${reason.slice(1)}. Load the page again.`;
}

const asked = ({ requestConfig: { verb, path } }) => `${verb} ${path}`;

function told({ detail }) {
  const alert = failures.get(asked(detail)) ?? document.createElement("p");
  failures.set(asked(detail), alert);
  const words = wordsOf(detail);
  if (alert.isConnected && alert.textContent === words) return; // what asks again says it once
  alert.className = "notice bad failed";
  alert.setAttribute("role", "alert");
  alert.textContent = words;
  document.querySelector("main").append(alert);
}

for (const failed of ["htmx:responseError", "htmx:sendError", "htmx:timeout"]) document.addEventListener(failed, told);
document.addEventListener("htmx:beforeRequest", (event) => document.hidden && event.preventDefault());
document.addEventListener("htmx:afterRequest", ({ detail }) => detail.successful && failures.get(asked(detail))?.remove());
document.addEventListener("htmx:load", ({ detail }) => tellInViewersZone(detail.elt));
document.addEventListener("htmx:xhr:progress", ({ target, detail }) => {
  const bar = target.querySelector("progress[data-upload]");
  if (bar && detail.total) bar.value = detail.loaded / detail.total;
});
