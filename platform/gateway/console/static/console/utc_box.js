// A box for a moment in UTC says what that is in the viewer's own zone.

import { inViewersZone } from "./times.js";

for (const box of document.querySelectorAll("input[data-utc]")) {
  const told = document.createElement("small");
  told.setAttribute("role", "status");
  const tell = () => {
    const at = new Date(`${box.value}Z`);
    told.textContent = box.value && !Number.isNaN(at.getTime()) ? `that is ${inViewersZone(at, "minute")}` : "";
  };
  box.after(told);
  box.addEventListener("input", tell);
  tell();
}
