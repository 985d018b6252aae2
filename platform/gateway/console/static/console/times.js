// Moments in the viewer's own zone: <time datetime="…" data-to="minute|second|day">, which says UTC without this module.

const OPTIONS = {
  day: {},
  minute: { hour: "2-digit", minute: "2-digit", timeZoneName: "short" },
  second: { hour: "2-digit", minute: "2-digit", second: "2-digit", timeZoneName: "short" },
};

export function inViewersZone(at, to) {
  const options = { hourCycle: "h23", year: "numeric", month: "2-digit", day: "2-digit", ...OPTIONS[to] };
  const parts = Object.fromEntries(new Intl.DateTimeFormat("en", options).formatToParts(at).map(({ type, value }) => [type, value]));
  const clock = [parts.hour, parts.minute, parts.second].filter(Boolean).join(":");
  return [`${parts.year}-${parts.month}-${parts.day}`, clock, parts.timeZoneName].filter(Boolean).join(" ");
}

export function tellInViewersZone(root) {
  for (const each of root.querySelectorAll("time[data-to]")) {
    each.title = each.dateTime;
    each.textContent = inViewersZone(new Date(each.dateTime), each.dataset.to);
  }
}

tellInViewersZone(document);
