// Numbers as words, and table rows made of them. Writes text only, never markup.

export const NONE = "–";
const tenth = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const wholeNumber = new Intl.NumberFormat("en");

export const whole = (value) => wholeNumber.format(value);

export function duration(ms) {
  if (ms === null || ms === undefined) return NONE;
  if (ms < 1_000) return `${whole(ms)} ms`;
  if (ms < 60_000) return `${tenth.format(ms / 1_000)} s`;
  return `${whole(Math.floor(ms / 60_000))} min ${whole(Math.floor((ms % 60_000) / 1_000))} s`;
}

export function rate(value) {
  return value === null ? NONE : value < 100 ? tenth.format(value) : whole(Math.round(value));
}

const clock = new Intl.DateTimeFormat("en", { hourCycle: "h23", hour: "2-digit", minute: "2-digit", second: "2-digit" });

// 09:05:07, on the viewer's own clock
export const timeOfDay = (at) => clock.format(at);

export const percent = (value) => (value === null ? NONE : `${tenth.format(value)} %`);

// {slots: 5, step_time: 2} → "slots 5, step time 2"
export function partsOf(counts) {
  return Object.entries(counts)
    .map(([word, count]) => `${word.replaceAll("_", " ")} ${whole(count)}`)
    .join(", ");
}

export const sum = (counts) => Object.values(counts).reduce((total, count) => total + count, 0);

const NOTHING = new Set([NONE, "0", "0.0", "0 · 0 · 0", "0 ms"]);

// A cell is a text, a node, or {text, parts, isOver}: what it is made of, and whether a target is missed.
function cellOf(content) {
  const cell = document.createElement("td");
  if (content instanceof Node) {
    cell.append(content);
    return cell;
  }
  const { text, parts = "", isOver = false } = typeof content === "string" ? { text: content } : content;
  cell.textContent = text;
  if (NOTHING.has(text)) cell.className = "none";
  if (isOver) cell.className = "over";
  if (parts) cell.append(Object.assign(document.createElement("small"), { textContent: parts }));
  return cell;
}

export function row(cells, heading) {
  const made = document.createElement("tr");
  if (heading) made.append(heading);
  made.append(...cells.map(cellOf));
  return made;
}

export function classHeading(name) {
  const heading = document.createElement("th");
  heading.scope = "row";
  const swatch = document.createElement("i");
  swatch.className = `swatch ${name}`;
  swatch.textContent = name[0].toUpperCase();
  heading.append(swatch, name);
  return heading;
}

export function plainHeading(text) {
  return Object.assign(document.createElement("th"), { scope: "row", textContent: text });
}

// A body's rows as they should be now. Only cells that differ are put in: the rest is not laid out anew.
export function renew(body, rows) {
  rows.forEach((fresh, index) => {
    const old = body.rows[index];
    if (!old) body.append(fresh);
    else if (old.cells.length !== fresh.cells.length) old.replaceWith(fresh);
    else [...fresh.cells].forEach((cell, at) => old.cells[at].isEqualNode(cell) || old.cells[at].replaceWith(cell));
  });
  while (body.rows.length > rows.length) body.rows[rows.length].remove();
}
