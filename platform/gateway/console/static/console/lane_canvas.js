// Many lanes as one picture: thousands of bars as elements would not keep up. What is past moves left as it was painted,
// only what is new is painted, and between two news the browser's compositor slides it. Knows the lanes' spans and places.

const AHEAD_MS = 1_200; // painted beyond the right edge, to slide into view until the next news
const DASHES = { held: [], on_host: [7, 4], dropped: [1.5, 4.5] };

export class LaneCanvas {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.look = "";
    this.sliding = null;
  }

  // leftMs is the moment at the left edge; what lies before freshMs is as it was at the last call, if ``look`` is: where
  // the lanes are, and how large and in what colours all is.
  paint(groups, { leftMs, freshMs, look, widthPx, heightPx, pitch, pixelsPerMs }) {
    const { canvas, context } = this;
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.ceil((widthPx + AHEAD_MS * pixelsPerMs) * ratio), Math.ceil(heightPx * ratio)];
    const colours = getComputedStyle(canvas);
    const inks = groups.map((group) => colours.getPropertyValue(`--${group.name}`));
    const pixelMs = 1 / (pixelsPerMs * ratio);
    const moved = Math.round((leftMs - this.leftMs) / pixelMs); // whole pixels: nothing blurs
    const isNew = this.look !== `${look}/${ratio}/${inks}` || moved < 0 || moved >= width;
    context.setTransform(1, 0, 0, 1, 0, 0);
    if (isNew) {
      this.look = `${look}/${ratio}/${inks}`;
      this.leftMs = leftMs;
      Object.assign(canvas, { width, height }); // empty
      Object.assign(canvas.style, { width: `${width / ratio}px`, height: `${height / ratio}px` });
    } else {
      this.leftMs += moved * pixelMs;
      context.globalCompositeOperation = "copy";
      context.drawImage(canvas, -moved, 0);
      context.globalCompositeOperation = "source-over";
    }
    const from = isNew ? 0 : Math.max(0, Math.floor((freshMs - this.leftMs) / pixelMs) - 1);
    context.clearRect(from, 0, width - from, height);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    groups.forEach((group, index) => {
      context.fillStyle = context.strokeStyle = inks[index];
      for (const lane of group.lanes) this.lane(lane, from / ratio, width / ratio, pixelsPerMs, pitch - (pitch > 5 ? 3 : 1));
    });
  }

  // From the newest span back to the first that ends left of ``from``.
  lane({ spans, y }, from, wide, pixelsPerMs, height) {
    for (let index = spans.length - 1; index >= 0; index -= 1) {
      const { state, startMs, endMs } = spans[index];
      const x = (startMs - this.leftMs) * pixelsPerMs;
      const until = endMs === null ? wide : Math.min(wide, Math.max((endMs - this.leftMs) * pixelsPerMs, x + 1));
      if (until <= from) return;
      this.bar(state, x, Math.max(x, from), y, until, height);
    }
  }

  // x: where it begins; from: where it is painted from.
  bar(state, x, from, y, until, height) {
    const { context } = this;
    const dashes = DASHES[state];
    if (!dashes) {
      context.globalAlpha = state === "prefill" ? 0.42 : 1;
      context.fillRect(from, y, Math.max(until - 1 - from, from > x ? 0 : 1), height);
      context.globalAlpha = 1;
    } else if (!dashes.length) context.fillRect(from, y + height / 2 - 1, until - from, 2);
    else {
      context.setLineDash(dashes);
      context.lineDashOffset = from - x;
      context.lineWidth = 2;
      context.beginPath();
      context.moveTo(from, y + height / 2);
      context.lineTo(until, y + height / 2);
      context.stroke();
    }
  }

  // atMs is at the left edge now, and one millisecond more with every one that passes, until all that is painted is shown.
  slide(atMs, pixelsPerMs, isMoving) {
    this.end();
    const left = (this.leftMs - atMs) * pixelsPerMs;
    this.canvas.style.transform = `translateX(${left.toFixed(1)}px)`;
    const restMs = AHEAD_MS - Math.max(0, atMs - this.leftMs);
    if (!isMoving || restMs <= 0) return;
    const to = `translateX(${(left - restMs * pixelsPerMs).toFixed(1)}px)`;
    this.sliding = this.canvas.animate({ transform: [this.canvas.style.transform, to] }, { duration: restMs, fill: "forwards" });
  }

  // It stays where it is.
  rest() {
    this.sliding?.pause();
  }

  end() {
    this.sliding?.cancel();
    this.sliding = null;
  }
}
