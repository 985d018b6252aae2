"""A long list, a page at a time. Knows rows and a number in the query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet
from django.http import HttpRequest

SHOWN = 50


@dataclass(frozen=True, slots=True)
class Shown:
    """One page of a list. Always: at most SHOWN rows. ``name`` is its number's in the query."""

    rows: list[Any]
    name: str
    number: int
    has_more: bool

    @property
    def before(self) -> int:
        return self.number - 1

    @property
    def after(self) -> int:
        return self.number + 1


def shown(request: HttpRequest, rows: QuerySet[Any], name: str = "page") -> Shown:
    """The page that is asked for; the first one where the number is none."""
    text = request.GET.get(name, "")
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    found = list(rows[number * SHOWN : (number + 1) * SHOWN + 1])
    return Shown(found[:SHOWN], name, number, len(found) > SHOWN)
