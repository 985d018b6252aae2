"""What the books say: prices in force, open operations, sums per window and in all. Reads only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from uuid import UUID

from django.db.models import Count, Max, Q, Sum

from billing.lines import PriceKey, PriceList
from billing.models import (
    CORRECTIONS,
    OPEN,
    EngineCount,
    LedgerAlert,
    LedgerEntry,
    Price,
    PriceVersion,
    Rollup,
    UsageRequest,
)
from billing.pricing import TokenKind, TokenPrices
from tenants import selectors as tenant_selectors
from tenants.policy_changes import followed

ENDS = ("settle", "release")


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Tokens and money of many ended operations."""

    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_micros: int


@dataclass(frozen=True, slots=True)
class WindowSums:
    """What one tenant used and holds in one money window of one class; enough to rebuild the gate when Redis is
    lost.
    """

    tenant_id: UUID
    priority_class: str
    window_id: str
    settled_micros: int
    open_micros: int


def current_price_version() -> int:
    """0 while no price was ever set."""
    newest = PriceVersion.objects.order_by("-version").first()
    return newest.version if newest else 0


def charged_micros(operation_id: UUID) -> int | None:
    """What an operation is charged by now: its settle and all adjustments. None where the ledger does not know it."""
    lines = dict(
        LedgerEntry.objects.filter(operation_id=operation_id)
        .order_by("kind")
        .values_list("kind")
        .annotate(Sum("amount_micros"))
    )
    return int(lines.get("settle", 0) + lines.get("adjust", 0)) if lines else None


def credit_given(operation_id: UUID) -> LedgerEntry | None:
    """The credit that an operation is, if it is one."""
    return LedgerEntry.objects.filter(operation_id=operation_id, kind="credit").first()


def correction_of(made_id: UUID) -> LedgerEntry | None:
    """The correction that a form of this id has booked."""
    keys = [f"{kind}:{made_id}" for kind in CORRECTIONS]
    return LedgerEntry.objects.filter(kind__in=CORRECTIONS, entry_key__in=keys).first()


def price_list(version: int) -> PriceList:
    return price_lists([version])[version]


def prices_by_place() -> dict[str, dict[str, int]]:
    """The prices in force by the places of policy edits, "price <model> <class>", and token kinds."""
    return by_place(price_list(current_price_version()).prices)


def by_place(prices: Mapping[PriceKey, TokenPrices]) -> dict[str, dict[str, int]]:
    return {f"price {model} {label}": asdict(price) for (model, label), price in prices.items()}


def price_lists(versions: Iterable[int]) -> dict[int, PriceList]:
    """One query, however many they are."""
    found: dict[int, dict[PriceKey, dict[str, int]]] = {version: {} for version in versions}
    for price in Price.objects.filter(price_version__in=list(found)):
        places = found[price.price_version_id]
        kinds = places.setdefault((price.model, price.priority_class), dict.fromkeys(TokenKind, 0))
        kinds[price.token_kind] = price.micros_per_million
    return {
        version: PriceList(version, {key: TokenPrices(**kinds) for key, kinds in places.items()})
        for version, places in found.items()
    }


def current_policy_document() -> dict[str, object]:
    """All that gateways and workers follow: policy, prices, names of tenants. Version 0 is the policy before the
    first edit.
    """
    stored = tenant_selectors.current_policy()
    policy = stored.policy if stored else tenant_selectors.live_policy(version=0)
    price_version = current_price_version()
    return {
        "version": stored.version if stored else 0,
        "policy": followed(policy),
        "price_version": price_version,
        "prices": [
            {
                "model": price.model,
                "priority_class": price.priority_class,
                "token_kind": price.token_kind,
                "micros_per_million": price.micros_per_million,
            }
            for price in Price.objects.filter(price_version=price_version)
        ],
        "tenants": tenant_selectors.tenants_by_id(),
    }


def open_operations(*, reserved_before: datetime | None = None, limit: int | None = None) -> list[UsageRequest]:
    """Reservations that nothing has ended yet, oldest first."""
    found = UsageRequest.objects.filter(state=OPEN, reserved_at__isnull=False).order_by("reserved_at", "id")
    if reserved_before is not None:
        found = found.filter(reserved_at__lt=reserved_before)
    return list(found[:limit])


def ledger_sums() -> TokenSums:
    """Worker-counted ends in the ledger. Releases without a count have no tokens and are not counted as requests."""
    found = LedgerEntry.objects.filter(kind__in=ENDS, attempt__isnull=False).aggregate(
        num_requests=Count("id"),
        prompt_tokens=Sum("prompt_tokens", default=0),
        cached_tokens=Sum("cached_tokens", default=0),
        output_tokens=Sum("output_tokens", default=0),
        cost_micros=Sum("amount_micros", filter=Q(kind="settle"), default=0),
    )
    return TokenSums(**found)


def rollup_sums() -> TokenSums:
    names = ("num_requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost_micros")
    return TokenSums(**Rollup.objects.aggregate(**{name: Sum(name, default=0) for name in names}))


def engine_sums() -> tuple[int, int]:
    """(prompt, output) tokens that workers say they counted, over all their epochs."""
    return _engine_sums("prompt_tokens", "output_tokens")


def rework_sums() -> tuple[int, int]:
    """(prompt, output) tokens that workers computed for responses which had been given up: charged to nobody."""
    return _engine_sums("rework_prompt_tokens", "rework_output_tokens")


def _engine_sums(prompt: str, output: str) -> tuple[int, int]:
    found = EngineCount.objects.aggregate(prompt=Sum(prompt, default=0), output=Sum(output, default=0))
    return found["prompt"], found["output"]


def window_sums(*, since: datetime) -> list[WindowSums]:
    """Every money window in which something was reserved at ``since`` or later, whole."""
    rows = (
        UsageRequest.objects.exclude(window_id="")
        .values("tenant_id", "priority_class", "window_id")
        .annotate(
            settled_micros=Sum("cost_micros", default=0),
            open_micros=Sum("reserved_micros", filter=Q(state=OPEN), default=0),
            newest=Max("reserved_at"),
        )
        .filter(newest__gte=since)
        .order_by("tenant_id", "priority_class", "window_id")
    )
    return [
        WindowSums(
            tenant_id=row["tenant_id"],
            priority_class=row["priority_class"],
            window_id=row["window_id"],
            settled_micros=row["settled_micros"],
            open_micros=row["open_micros"],
        )
        for row in rows
    ]


def num_open_alerts() -> int:
    return LedgerAlert.objects.filter(closed_at=None).count()
