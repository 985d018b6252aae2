"""What the calls of the last day with usage would have cost under other prices, beside what they cost. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Count, F, Max, Q, Sum
from django.db.models.expressions import Combinable

from billing.lines import PriceKey
from billing.models import Rollup, UsageRequest
from billing.pricing import CHARGED_TERMINALS, TOKENS_PER_PRICE, TokenPrices

HOUR, DAY = timedelta(hours=1), timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one model and class. ``charged_micros`` is what the calls were charged, each at the prices of its own time;
    the other two are the same calls at the prices in force and at the new ones.
    """

    model: str
    priority_class: str
    num_calls: int
    charged_micros: int
    now_micros: int
    then_micros: int


@dataclass(frozen=True, slots=True)
class DayOfUse:
    """The 24 hours up to the end of the newest hour with use, or up to now, by when calls were let in; a row for each
    place. ``has_use``: there ever was any.
    """

    starts_at: datetime
    ends_at: datetime
    rows: list[Costs]
    has_use: bool


def day_of_use(
    now: datetime, before: Mapping[PriceKey, TokenPrices], after: Mapping[PriceKey, TokenPrices]
) -> DayOfUse:
    """Over the places of ``after``. Every call is rounded up alone, as it is when it is charged."""
    charged = UsageRequest.objects.filter(state__in=CHARGED_TERMINALS)
    newest = Rollup.objects.aggregate(newest=Max("hour"))["newest"]
    ends_at = min(now, newest + HOUR) if newest else now
    starts_at = ends_at - DAY
    within = charged.filter(reserved_at__gte=starts_at, reserved_at__lt=ends_at)
    sums: dict[str, Any] = {}
    for number, (model, label) in enumerate(sorted(after)):
        here = Q(model=model, priority_class=label)
        sums |= {
            f"num_calls_{number}": Count("id", filter=here),
            f"charged_{number}": Sum("cost_micros", filter=here, default=0),
            f"now_{number}": Sum(_cost(before[model, label]), filter=here, default=0),
            f"then_{number}": Sum(_cost(after[model, label]), filter=here, default=0),
        }
    found = within.aggregate(**sums) if sums else {}
    rows = [
        Costs(model, label, *(int(found[f"{name}_{number}"]) for name in ("num_calls", "charged", "now", "then")))
        for number, (model, label) in enumerate(sorted(after))
    ]
    return DayOfUse(starts_at, ends_at, rows, newest is not None or any(row.num_calls for row in rows))


def _cost(prices: TokenPrices) -> Combinable:
    """``pricing.cost_micros`` of a row, in the database's whole numbers."""
    scaled = (
        (F("prompt_tokens") - F("cached_tokens")) * prices.prompt
        + F("cached_tokens") * prices.cached
        + F("output_tokens") * prices.output
    )
    return (scaled + (TOKENS_PER_PRICE - 1)) / TOKENS_PER_PRICE
