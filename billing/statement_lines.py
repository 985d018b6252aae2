"""A statement's lines: what the ledger charged, in sums that can be computed again from the prices beside them.

Refuses to compute an amount: the ledger holds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import Case, Count, F, QuerySet, Sum, When

from billing.lines import PriceList
from billing.models import LedgerEntry
from billing.pricing import FREE, TOKENS_PER_PRICE, TokenCounts, scaled_cost
from billing.selectors import ENDS, price_lists
from tenants.models import ApiKey, Project


@dataclass(frozen=True, slots=True, kw_only=True)
class StatementLine:
    """What one key used of one model in one class under one price list; what was used and not charged is a line of its
    own, without prices. Names are those of the day of closing; blank where unknown.

    Prices are micro-units for a million tokens; ``rounding_picos`` is what was added by rounding every request up, in
    millionths of a micro-unit. Always, of a charged line: 0 <= rounding_picos < num_requests x 1,000,000, and
    cost_micros x 1,000,000 = (prompt_tokens - cached_tokens) x price_prompt + cached_tokens x price_cached
    + output_tokens x price_output + rounding_picos.
    """

    project_id: str
    project: str
    key_id: str
    key: str
    priority_class: str
    model: str
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    is_charged: bool
    price_version: int | None
    price_prompt: int | None
    price_cached: int | None
    price_output: int | None
    rounding_picos: int
    cost_micros: int


def lines_of(tenant_id: UUID, entries: QuerySet[LedgerEntry]) -> list[StatementLine]:
    """Of these entries of the tenant, three queries and one for their prices."""
    projects = dict(Project.objects.filter(tenant_id=tenant_id).values_list("id", "name"))
    keys = _names_of_keys(tenant_id)
    place = ("project_id", "key_id", "priority_class", "model", "applied")
    rows = list(
        entries.filter(kind__in=ENDS, attempt__isnull=False)
        .annotate(applied=Case(When(kind="settle", then=F("price_version"))))
        .order_by(*place)
        .values(*place)
        .annotate(
            num_requests=Count("id"),
            prompts=Sum("prompt_tokens"),
            cached=Sum("cached_tokens"),
            outputs=Sum("output_tokens"),
            cost=Sum("amount_micros"),
        )
    )
    lists = price_lists(row["applied"] for row in rows if row["applied"] is not None)
    return [
        StatementLine(
            project_id=str(row["project_id"] or ""),
            project=projects.get(row["project_id"], ""),
            key_id=str(row["key_id"] or ""),
            key=keys.get(row["key_id"], ""),
            priority_class=row["priority_class"],
            model=row["model"],
            num_requests=row["num_requests"],
            prompt_tokens=row["prompts"],
            cached_tokens=row["cached"],
            output_tokens=row["outputs"],
            **_priced(row, lists),
            cost_micros=row["cost"],
        )
        for row in rows
    ]


def _priced(row: Mapping[str, Any], lists: Mapping[int, PriceList]) -> dict[str, Any]:
    """The prices that were applied to a sum of operations, and what was added by rounding each of them up."""
    version = row["applied"]
    if version is None:
        prices = dict.fromkeys(("price_prompt", "price_cached", "price_output"))
        return {"is_charged": False, "price_version": None, **prices, "rounding_picos": 0}
    found = lists[version].find(row["model"], row["priority_class"]) or FREE
    exact = scaled_cost(TokenCounts(row["prompts"], row["cached"], row["outputs"]), found)
    return {
        "is_charged": True,
        "price_version": version,
        "price_prompt": found.prompt,
        "price_cached": found.cached,
        "price_output": found.output,
        "rounding_picos": row["cost"] * TOKENS_PER_PRICE - exact,
    }


def _names_of_keys(tenant_id: UUID) -> dict[UUID, str]:
    """By id; those of one name are told apart by the end of their secret, as where they are listed."""
    keys = ApiKey.objects.filter(tenant_id=tenant_id).values_list("id", "name", "last4")
    of_name = Counter(name for _, name, _ in keys)
    return {key_id: f"{name} …{last4}" if of_name[name] > 1 else name for key_id, name, last4 in keys}
