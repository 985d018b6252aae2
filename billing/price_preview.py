"""What the calls of the last day with usage would have cost under other prices, beside what they cost. Reads only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Count, F, Max, Sum
from django.db.models.expressions import Combinable

from billing.lines import PriceKey
from billing.models import Rollup, UsageRequest
from billing.pricing import CHARGED_TERMINALS, TOKENS_PER_PRICE, TokenPrices

HOUR, DAY = timedelta(hours=1), timedelta(days=1)
LONGEST_CALL = timedelta(days=2)  # between a call's reservation and its end, of which only the former is looked up fast


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
    """The 24 hours up to the end of the newest hour with use, or up to now; a row for each place."""

    starts_at: datetime
    ends_at: datetime
    rows: list[Costs]


def day_of_use(
    now: datetime, before: Mapping[PriceKey, TokenPrices], after: Mapping[PriceKey, TokenPrices]
) -> DayOfUse:
    """Over the places of ``after``. Every call is rounded up alone, as it is when it is charged."""
    newest = Rollup.objects.aggregate(newest=Max("hour"))["newest"]
    ends_at = min(now, newest + HOUR) if newest else now
    starts_at = ends_at - DAY
    charged = UsageRequest.objects.filter(state__in=CHARGED_TERMINALS)
    within = charged.filter(reserved_at__gte=starts_at - LONGEST_CALL, ended_at__gte=starts_at, ended_at__lt=ends_at)
    rows = []
    for (model, label), prices in sorted(after.items()):
        sums = within.filter(model=model, priority_class=label).aggregate(
            num_calls=Count("id"),
            charged=Sum("cost_micros", default=0),
            now=Sum(_cost(before[model, label]), default=0),
            then=Sum(_cost(prices), default=0),
        )
        rows.append(Costs(model, label, sums["num_calls"], int(sums["charged"]), int(sums["now"]), int(sums["then"])))
    return DayOfUse(starts_at, ends_at, rows)


def _cost(prices: TokenPrices) -> Combinable:
    """``pricing.cost_micros`` of a row, in the database's whole numbers."""
    scaled = (
        (F("prompt_tokens") - F("cached_tokens")) * prices.prompt
        + F("cached_tokens") * prices.cached
        + F("output_tokens") * prices.output
    )
    return (scaled + (TOKENS_PER_PRICE - 1)) / TOKENS_PER_PRICE
