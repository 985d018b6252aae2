// Tokens over time as columns, in the tenant's own zone. Knows the page's figures and colours; uPlot draws.

const box = document.getElementById("chart");
const columns = JSON.parse(document.getElementById("columns").textContent);
const ink = (name) => () => getComputedStyle(box).getPropertyValue(name);
const axis = { stroke: ink("--muted"), grid: { stroke: ink("--rule"), width: 1 }, ticks: { show: false } };
const WORDS_PX = 32; // uPlot's line below: the moment and the tokens under the pointer
const [DAY_S, HOUR_S] = [86_400, 3_600];
const bucket = columns[0].length > 1 ? columns[0][1] - columns[0][0] : HOUR_S;
const DATES = [
  [DAY_S, "{MM}-{DD}", "\n{YYYY}", null, null, null, null, null, 1],
  [HOUR_S, "{HH}:{mm}", "\n{MM}-{DD}", null, "\n{MM}-{DD}", null, null, null, 1],
];

const size = () => ({ width: box.clientWidth, height: box.clientHeight - WORDS_PX });
const plot = new uPlot(
  {
    ...size(),
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1_000), box.dataset.zone),
    cursor: { drag: { x: false, y: false } },
    scales: { x: { range: (_, first, last) => [first, last + bucket] }, y: { range: (_, __, most) => [0, Math.max(most, 1)] } },
    axes: [{ ...axis, values: DATES }, { ...axis, size: 70 }],
    series: [
      { label: "From", value: "{YYYY}-{MM}-{DD} {HH}:{mm}" },
      { label: "Tokens", fill: ink("--accent"), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.85], align: 1 }) },
    ],
  },
  columns,
  box,
);

new ResizeObserver(() => plot.setSize(size())).observe(box);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw());
