// Many lanes as one picture: painted when news comes, slid in between. Thousands of bars as elements would not keep up.
// Knows the lanes' spans and places; the element it slides is its own.

const AHEAD_MS = 1_200; // painted beyond the right edge, to slide into view until the next news
const DASHES = { held: [], on_host: [7, 4], dropped: [1.5, 4.5] };

export class LaneCanvas {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
  }

  // leftMs is the moment at the left edge, and x = 0.
  paint(groups, { leftMs, widthPx, heightPx, pitch, pixelsPerMs }) {
    const { canvas, context } = this;
    const ratio = window.devicePixelRatio || 1;
    const wide = widthPx + AHEAD_MS * pixelsPerMs;
    const [width, height] = [Math.ceil(wide * ratio), Math.ceil(heightPx * ratio)];
    if (canvas.width !== width || canvas.height !== height) {
      Object.assign(canvas, { width, height });
      Object.assign(canvas.style, { width: `${wide}px`, height: `${heightPx}px` });
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, wide, heightPx);
    const colours = getComputedStyle(canvas);
    const barPx = pitch - 1;
    for (const group of groups) {
      context.fillStyle = context.strokeStyle = colours.getPropertyValue(`--${group.name}`);
      for (const lane of group.lanes) {
        for (const span of lane.spans) {
          const from = Math.max(0, (span.startMs - leftMs) * pixelsPerMs);
          const until = span.endMs === null ? wide : Math.min(wide, (span.endMs - leftMs) * pixelsPerMs);
          if (until > from) this.bar(span.state, from, lane.y, Math.max(until - from, 1), barPx);
        }
      }
    }
    this.slide(0);
  }

  bar(state, x, y, width, height) {
    const { context } = this;
    const dashes = DASHES[state];
    if (!dashes) {
      context.globalAlpha = state === "prefill" ? 0.42 : 1;
      context.fillRect(x, y, Math.max(width - 1, 1), height);
      context.globalAlpha = 1;
    } else if (!dashes.length) context.fillRect(x, y + height / 2 - 1, width, 2);
    else {
      context.setLineDash(dashes);
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(x, y + height / 2);
      context.lineTo(x + width, y + height / 2);
      context.stroke();
    }
  }

  slide(px) {
    this.canvas.style.transform = `translateX(${-px.toFixed(1)}px)`;
  }
}
