// What htmx leaves to the page: nothing is asked while nobody looks, old news is told as old, moments are the viewer's.

import { tellInViewersZone } from "./times.js";

const oldNews = document.getElementById("old-news");

document.addEventListener("htmx:beforeRequest", (event) => document.hidden && event.preventDefault());
document.addEventListener("htmx:afterRequest", ({ detail }) => oldNews?.toggleAttribute("hidden", detail.successful));
document.addEventListener("htmx:load", ({ detail }) => tellInViewersZone(detail.elt));
document.addEventListener("htmx:xhr:progress", ({ target, detail }) => {
  const bar = target.querySelector("progress[data-upload]");
  if (bar && detail.total) bar.value = detail.loaded / detail.total;
});
