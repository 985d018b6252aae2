// The step lanes: which request was on the device, held or away, over the last half minute. Knows board rows and moments.
// A lane is one request's until it ends, then the next one's, so there are as many lanes as requests at once.

import { LaneCanvas } from "./lane_canvas.js";

const SVG = "http://www.w3.org/2000/svg";
const WINDOW_MS = 30_000;
const HOLE_MS = 2_000; // longer than this between two readings: nobody looked, and nothing is drawn there
const OPEN_MS = 600_000; // a span without an end is drawn far past the right edge, and the edge cuts it
const GAPS = new Set(["held", "on_host", "dropped"]);
const AXIS_PX = 18;
const HEADING_PX = 18;
const MANY_LANES = 24; // of one class: from here on they are a picture
const VERY_MANY_LANES = 64; // and low ones
const LETTER_PX = 16; // a bar narrower than this has no room for its letter

const STATE_WORDS = {
  prefill: "prefill",
  decode: "decode",
  held: "held",
  on_host: "on the host",
  dropped: "to be recomputed",
};

export function stateWord(state) {
  return STATE_WORDS[state] ?? state;
}

function titleOf([response, tenant, , state, blocks, , output]) {
  return `${tenant} · ${response} · ${stateWord(state)} · ${blocks} blocks · ${output} output tokens`;
}

function element(name, attributes, parent) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
}

export class Lanes {
  constructor(svg, canvas, classes) {
    this.svg = svg;
    this.canvas = new LaneCanvas(canvas);
    this.isDense = false;
    this.groups = classes.map((name) => ({ name, lanes: [], node: null }));
    this.byResponse = new Map();
    this.originMs = null; // the moment at x = 0 of the moving part; spans keep their place in it for ever
    this.heardMs = 0;
    this.nowMs = 0;
    this.paintedMs = 0; // what the canvas knows of
    this.slidMs = 0; // the news since which it slides
    this.layout = "";
    this.ticks = element("g", {}, svg);
    this.moving = element("g", {}, svg);
    this.fixed = element("g", {}, svg);
    this.watcher = new ResizeObserver(() => this.arrange(true));
    this.watcher.observe(svg);
  }

  // Another takes the same place over.
  end() {
    this.canvas.end();
    this.watcher.disconnect();
  }

  rest() {
    this.canvas.rest();
  }

  get isEmpty() {
    return this.groups.every((group) => group.lanes.length === 0);
  }

  // rows: [response, tenant, class, state, blocks, computed, output] as they were at atMs
  hear(rows, atMs) {
    this.originMs ??= atMs;
    if (atMs - this.heardMs > HOLE_MS) this.lookedAway();
    this.heardMs = atMs;
    const present = new Set(rows.map((row) => row[0]));
    for (const [response, lane] of this.byResponse) {
      if (!present.has(response)) {
        lane.spans.at(-1).endMs ??= atMs;
        lane.response = null;
        this.byResponse.delete(response);
      }
    }
    for (const row of rows) this.place(row, atMs);
    this.forget(atMs - WINDOW_MS);
    this.arrange(false);
  }

  // What was true at the last reading was not seen to last until now.
  lookedAway() {
    for (const lane of this.byResponse.values()) lane.spans.at(-1).endMs = this.heardMs;
  }

  place(row, atMs) {
    const [response, , name, state] = row;
    const lane = this.byResponse.get(response) ?? this.take(name, response);
    const last = lane.spans.at(-1);
    const isFirst = last?.response !== response;
    if (isFirst || last.state !== state || last.endMs !== null) {
      if (!isFirst) last.endMs ??= atMs;
      const hasLetter = state === "decode" && !lane.isLettered;
      lane.isLettered ||= hasLetter;
      lane.spans.push({ response, name, state, startMs: atMs, endMs: null, hasLetter, node: null });
    }
    lane.spans.at(-1).row = row;
  }

  take(name, response) {
    const group = this.groups.find((each) => each.name === name);
    let lane = group.lanes.find((each) => each.response === null);
    if (!lane) {
      lane = { response: null, spans: [] };
      group.lanes.push(lane);
    }
    lane.response = response;
    lane.isLettered = false; // the letter stands on a request's first decode bar, once
    this.byResponse.set(response, lane);
    return lane;
  }

  forget(beforeMs) {
    for (const group of this.groups) {
      for (const lane of group.lanes) {
        while (lane.spans.length && lane.spans[0].endMs !== null && lane.spans[0].endMs < beforeMs) {
          lane.spans.shift().node?.remove();
        }
      }
      while (group.lanes.length && group.lanes.at(-1).spans.length === 0) group.lanes.pop();
    }
  }

  // Where each lane is. Spans are made anew only when the arrangement itself has changed.
  arrange(force) {
    const width = this.svg.clientWidth;
    const counts = this.groups.map((group) => group.lanes.length);
    this.isDense = Math.max(...counts) > MANY_LANES;
    const pitch = Math.max(...counts) > VERY_MANY_LANES ? 5 : this.isDense ? 10 : 18;
    const layout = `${width}/${pitch}/${counts}`;
    if (force || layout !== this.layout) {
      this.layout = layout;
      this.pitch = pitch;
      this.pixelsPerMs = width / WINDOW_MS;
      let y = 0;
      this.fixed.replaceChildren();
      for (const group of this.groups) {
        if (!group.lanes.length) continue;
        const heading = element("text", { class: `group ${group.name}`, x: 0, y: y + 12 }, this.fixed);
        heading.textContent = group.name;
        y += HEADING_PX;
        for (const lane of group.lanes) {
          lane.y = y;
          y += pitch;
          for (const span of lane.spans) this.undraw(span);
        }
        y += 6;
      }
      this.drawAxis(width, y);
      this.heightPx = y;
      this.canvas.canvas.hidden = !this.isDense;
    }
    if (this.isDense) {
      const { layout: look, paintedMs: freshMs, heightPx, pitch, pixelsPerMs } = this;
      const leftMs = this.heardMs - WINDOW_MS;
      this.canvas.paint(this.groups, { leftMs, freshMs, look, widthPx: width, heightPx, pitch, pixelsPerMs });
      this.paintedMs = this.heardMs;
      return;
    }
    this.paintedMs = 0;
    for (const group of this.groups) {
      for (const lane of group.lanes) {
        for (const span of lane.spans) this.draw(span, lane);
      }
    }
  }

  // Which request has a bar at this place of the picture; null where none has.
  responseAt(event) {
    if (!this.isDense) return null;
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const atMs = this.nowMs - (this.svg.clientWidth - x) / this.pixelsPerMs;
    const lane = this.groups.flatMap((group) => group.lanes).find((each) => y >= each.y && y < each.y + this.pitch);
    const span = lane?.spans.find((each) => each.startMs <= atMs && (each.endMs === null || atMs < each.endMs));
    return span?.response ?? null;
  }

  drawAxis(width, bottom) {
    this.svg.setAttribute("height", bottom + AXIS_PX);
    this.ticks.replaceChildren();
    const anchors = { 0: "start", [WINDOW_MS]: "end" };
    for (let ms = 0; ms <= WINDOW_MS; ms += 10_000) {
      const x = Math.min(Math.max(ms * this.pixelsPerMs, 0.5), width - 0.5);
      element("line", { class: "tick", x1: x, x2: x, y1: 0, y2: bottom }, this.ticks);
      const label = element("text", { x, y: bottom + 14, "text-anchor": anchors[ms] ?? "middle" }, this.ticks);
      label.textContent = ms === WINDOW_MS ? "now" : `−${(WINDOW_MS - ms) / 1000} s`;
    }
  }

  undraw(span) {
    span.node?.remove();
    span.node = null;
    span.drawnEndMs = undefined;
  }

  draw(span, lane) {
    if (span.node && span.drawnEndMs === span.endMs) {
      if (span.endMs === null) span.titleNode.textContent = titleOf(span.row);
      return;
    }
    const x = (span.startMs - this.originMs) * this.pixelsPerMs;
    const endMs = span.endMs ?? span.startMs + OPEN_MS;
    const width = Math.max((endMs - span.startMs) * this.pixelsPerMs, 1);
    span.node ??= this.make(span, lane, x);
    if (GAPS.has(span.state)) span.node.firstChild.setAttribute("x2", x + width);
    else span.node.firstChild.setAttribute("width", Math.max(width - 1, 1));
    if (span.hasLetter && width < LETTER_PX) {
      span.node.querySelector("text")?.remove();
      if (lane.response === span.response) lane.isLettered = false; // the next decode bar may have the room
    }
    span.titleNode.textContent = titleOf(span.row);
    span.drawnEndMs = span.endMs;
  }

  make(span, lane, x) {
    const node = element("g", { class: span.name, "data-response": span.response, "data-state": span.state }, this.moving);
    const height = this.pitch - (this.pitch > 5 ? 3 : 1);
    if (GAPS.has(span.state)) {
      const middle = lane.y + height / 2;
      element("line", { class: span.state, x1: x, y1: middle, y2: middle }, node);
    } else {
      element("rect", { class: span.state, x, y: lane.y, height, rx: Math.min(3, height / 2) }, node);
    }
    span.titleNode = element("title", {}, node);
    if (span.hasLetter && height >= 12) {
      const letter = element("text", { class: "letter", x: x + 5, y: lane.y + height - 4 }, node);
      letter.textContent = span.name[0].toUpperCase();
    }
    return node;
  }

  // Slide so that nowMs is the right edge; it never slides back. isMoving: and on from there, by itself, where it can.
  show(nowMs, isMoving) {
    if (this.originMs === null) return;
    this.nowMs = Math.max(this.nowMs, nowMs);
    if (this.isDense) {
      if (this.slidMs !== this.paintedMs) this.canvas.slide(this.nowMs - WINDOW_MS, this.pixelsPerMs, isMoving);
      this.slidMs = this.paintedMs;
      return;
    }
    const shift = this.svg.clientWidth - (this.nowMs - this.originMs) * this.pixelsPerMs;
    this.moving.setAttribute("transform", `translate(${shift.toFixed(1)} 0)`);
  }
}
