"""An edit of prices as people see it: old and new, what is odd, what the last day's calls would have cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Context, Decimal

from django.core.exceptions import ValidationError
from django.utils import timezone

from billing import selectors, services
from billing.price_preview import DayOfUse, day_of_use
from billing.price_sanity import oddities
from tenants.policy_changes import Change

MOST_DIGITS = 17  # enough to tell any two prices apart


@dataclass(frozen=True, slots=True)
class PriceChange:
    """One price, for people: amounts in micro-units for a million tokens. ``factor``: new by old in three digits, or as
    many as tell it from 1; "" where old is 0.
    """

    where: str
    kind: str
    before: int
    after: int

    @property
    def factor(self) -> str:
        if not self.before:
            return ""
        texts = (_ratio(self.after, self.before, digits) for digits in range(3, MOST_DIGITS))
        return next((text for text in texts if text != "1"), "1")


def _ratio(above: int, below: int, digits: int) -> str:
    """Rounded to so many digits and written out: 1,000 and 0.000001, never a power of ten."""
    return f"{Context(prec=digits).divide(Decimal(above), Decimal(below)).normalize():,f}"


@dataclass(frozen=True, slots=True)
class PricePreview:
    """What stands on the page of a draft that changes prices."""

    changes: list[PriceChange]
    oddities: list[str]
    day: DayOfUse


def told(changes: Sequence[Change]) -> list[PriceChange]:
    """Changes of prices as a page tells them; a price that is new counts from 0."""
    return [PriceChange(one.place.removeprefix("price "), one.field, one.before or 0, one.after) for one in changes]


def price_preview(changes: Sequence[Change]) -> PricePreview | None:
    """None where no price is changed, or one that is gone."""
    current = selectors.price_list(selectors.current_price_version()).prices
    try:
        edited = services.with_changes(current, changes)
    except ValidationError:
        return None
    if not edited:
        return None
    return PricePreview(
        told(changes), oddities(current, {**current, **edited}), day_of_use(timezone.now(), current, edited)
    )
