"""Which lines a tenant's use has crossed: budgets as the door counts them, tokens and first tokens as the books do.

Read by beat, never on the way of a token. Refuses to know who is told, and how.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.db.models import Count, F, Q, Sum

from billing.models import Rollup, UsageRequest
from gateway.budgets import MoneyGate, Window, spent_in, windows_of
from gateway.webhooks.models import Alert, Endpoint, Threshold
from tenants.models import PriorityClass, QuotaPolicy

HOUR = timedelta(hours=1)
SLA_SPAN = timedelta(minutes=5)
SLA_LONGEST = timedelta(minutes=15)  # a call that is older at its end is not looked at: ids begin with their moment
SLA_LEAST_CALLS = 20
SLA_LATE_SHARE = 20  # one in so many late is p95 above the target


@dataclass(frozen=True, slots=True)
class Standing:
    """A line beside what its window has used: percent of the budget, or tokens. ``used`` None: there is no budget."""

    line: Threshold
    window: Window
    used: int | None

    @property
    def is_crossed(self) -> bool:
        return self.used is not None and self.used >= self.line.amount

    @property
    def subject(self) -> str:
        """Of the alert that is kept once the line is crossed."""
        return f"{self.window.priority_class} {self.window.id} {self.line.amount} {self.unit}"

    @property
    def unit(self) -> str:
        return "percent" if self.line.measure == Threshold.Measure.MONEY else "tokens"

    @property
    def percent(self) -> int:
        """Of the way to the line."""
        return min(100, 100 * (self.used or 0) // self.line.amount)


def find(now: datetime, gate: MoneyGate) -> None:
    """Keeps an alert for everything that has been crossed and was not yet. Raises BusError."""
    lines = list(Threshold.objects.filter(tenant__is_active=True))
    found = [*_exhausted(now, gate), *_crossed(now, lines, gate), *_late(now)]
    Alert.objects.bulk_create(found, ignore_conflicts=True)


def standings(now: datetime, lines: Sequence[Threshold], gate: MoneyGate) -> list[Standing]:
    """In the order of the lines. Raises BusError."""
    quotas = QuotaPolicy.objects.filter(tenant_id__in={line.tenant_id for line in lines})
    windows = {(one.tenant_id, one.priority_class): one for one in windows_of(now, quotas)}
    pairs = [(line, windows[line.tenant_id, line.priority_class]) for line in lines]
    capped = {window for line, window in pairs if line.measure == Threshold.Measure.MONEY and window.cap_micros}
    percents = {window: 100 * held.settled_micros // cap for window, cap, held in spent_in(capped, gate)}
    counted = _tokens({window for line, window in pairs if line.measure == Threshold.Measure.TOKENS})
    return [
        Standing(line, window, (counted if line.measure == Threshold.Measure.TOKENS else percents).get(window))
        for line, window in pairs
    ]


def _exhausted(now: datetime, gate: MoneyGate) -> Iterator[Alert]:
    """Percentages only, here and below: amounts of money are for the roles that see money."""
    quotas = QuotaPolicy.objects.filter(money_micros__isnull=False, tenant__is_active=True)
    for window, cap, spent in spent_in(windows_of(now, quotas), gate):
        if spent.refused_ms is not None:
            at = datetime.fromtimestamp(spent.refused_ms / 1_000, UTC)
            percent = 100 * spent.settled_micros // cap if cap else 100
            yield _alert("budget.exhausted", window, f"{window.priority_class} {window.id}", at, used_percent=percent)


def _crossed(now: datetime, lines: Sequence[Threshold], gate: MoneyGate) -> Iterator[Alert]:
    for one in standings(now, lines, gate):
        if one.is_crossed:
            told = {"measure": one.line.measure, f"threshold_{one.unit}": one.line.amount, f"used_{one.unit}": one.used}
            yield _alert("quota.threshold", one.window, one.subject, now, **told)


def _tokens(windows: Collection[Window]) -> dict[Window, int]:
    """Prompt and output tokens that are charged: those that a quota counts, for the gate gives all others back.

    From the hour on in which a window begins: roll-ups are by hours of UTC.
    """
    if not windows:
        return {}
    wanted = Q()
    for one in windows:
        wanted |= Q(tenant_id=one.tenant_id, priority_class=one.priority_class, hour__gte=_hour(one.starts_at))
    rows = Rollup.objects.filter(wanted, is_charged=True).order_by().values("tenant_id", "priority_class")
    sums = rows.annotate(tokens=Sum(F("prompt_tokens") + F("output_tokens")))
    found = {(row["tenant_id"], row["priority_class"]): int(row["tokens"]) for row in sums}
    return {one: found.get((one.tenant_id, one.priority_class), 0) for one in windows}


def _late(now: datetime) -> Iterator[Alert]:
    """Of tenants that want to be told: p95 of their own calls' first tokens above the class's target; once an hour."""
    asking = Endpoint.objects.filter(is_active=True, events__contains=["class.sla_breach"])
    tenant_ids = set(asking.values_list("tenant_id", flat=True))
    targets = PriorityClass.objects.exclude(ttft_target_ms=None).values_list("label", "ttft_target_ms")
    for label, target_ms in targets if tenant_ids else ():
        oldest = UUID(int=int((now - SLA_LONGEST).timestamp() * 1_000) << 80)
        calls = UsageRequest.objects.filter(
            tenant_id__in=tenant_ids, id__gte=oldest, priority_class=label, ended_at__gte=now - SLA_SPAN
        )
        late = Count("id", filter=Q(ttft_us__gt=1_000 * (target_ms or 0)))
        answered = calls.exclude(ttft_us=None).order_by().values("tenant_id").annotate(num=Count("id"), late=late)
        for row in answered:
            if row["num"] >= SLA_LEAST_CALLS and row["late"] * SLA_LATE_SHARE > row["num"]:
                hour = _hour(now)
                window = Window(row["tenant_id"], label, f"{hour:%Y-%m-%dT%H:00Z}", hour, hour + HOUR, None)
                told = {"ttft_target_ms": target_ms, "calls": row["num"], "late_calls": row["late"]}
                yield _alert("class.sla_breach", window, f"{label} {window.id}", now, **told)


def _hour(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def _alert(event: str, window: Window, subject: str, at: datetime, **told: Any) -> Alert:
    return Alert(
        tenant_id=window.tenant_id,
        event=event,
        subject=subject,
        data={"class": window.priority_class, "window": window.id, **told},
        happened_at=at,
    )
