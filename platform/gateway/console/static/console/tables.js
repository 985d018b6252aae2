// The tables of one worker: what each class gets, what was done to it, and what each tenant had. Knows frames.

import { classHeading, duration, NONE, partsOf, percent, plainHeading, rate, row, sum, whole } from "./cells.js";

const LEVERS = ["hold", "swap", "recompute"];

// Three recent quantiles; those above the target carry a mark, and are named below.
function latency({ recent_ms: recent, target_ms: target, over }) {
  if (recent[0] === null) return { text: NONE, parts: target === null ? "" : `target ${duration(target)}` };
  const text = recent.map((ms, index) => (over.includes(["p50", "p95", "p99"][index]) ? `▲ ${duration(ms)}` : duration(ms))).join(" · ");
  if (target === null) return text;
  return { text, parts: over.length ? `${over.join(", ")} over the target of ${duration(target)}` : `target ${duration(target)}`, isOver: over.length > 0 };
}

export function latencyRow(each) {
  const waiting = each.closed ? `${whole(each.waiting)} · closed` : whole(each.waiting);
  return row(
    [
      waiting,
      whole(each.running),
      whole(each.suspended),
      rate(each.output_per_s),
      latency(each.queue_wait),
      latency(each.ttft),
      latency(each.tpot),
    ],
    classHeading(each.class),
  );
}

export function policyRow(each) {
  const [kept, broken] = each.promises;
  const asked = kept + broken;
  const isTight = each.gap_bound_ms > 0 && each.gap_ms > each.gap_bound_ms;
  const levers = LEVERS.map((lever) => whole(each.preemptions[lever] ?? 0)).join(" · ");
  return row(
    [
      { text: levers, parts: partsOf(each.preempted_by) },
      { text: whole(sum(each.shed)), parts: partsOf(sum(each.shed_by_rung) ? each.shed_by_rung : each.shed) },
      duration(each.floor_debt_ms),
      { text: asked ? percent((100 * kept) / asked) : NONE, parts: asked ? `${whole(kept)} of ${whole(asked)}` : "" },
      {
        text: isTight ? `▲ ${duration(each.gap_ms)}` : duration(each.gap_ms),
        parts: isTight ? `over the bound of ${duration(each.gap_bound_ms)}` : `bound ${duration(each.gap_bound_ms)}`,
        isOver: isTight,
      },
    ],
    classHeading(each.class),
  );
}

export function tenantRow([tenant, live, recentMs, share, entitled, allMs], names) {
  return row(
    [whole(live), duration(recentMs), percent(share), percent(entitled), duration(allMs)],
    plainHeading(tenant === "" ? "other" : (names[tenant] ?? tenant)),
  );
}
