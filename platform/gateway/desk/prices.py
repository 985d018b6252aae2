"""The price table at the policy desk. A form makes a draft; its page shows old and new, what is odd about the new
prices, and what the last day's calls would have cost under them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib import messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse
from django.shortcuts import redirect, render

from billing import selectors, services
from billing.lines import PriceKey
from billing.models import LARGEST_PRICE_MICROS
from billing.pricing import TokenKind, TokenPrices
from gateway.desk.forms import RANKS, Box, number
from gateway.desk.rights import operator
from tenants import proposals
from tenants import selectors as policies
from tenants.operators import MAY_EDIT_PRICES

KINDS = [kind.value for kind in TokenKind]


@operator(MAY_EDIT_PRICES)
def prices(request: HttpRequest) -> HttpResponse:
    """Every price in force; a POST makes a draft of what differs from the list that the form was of."""
    version, is_known = selectors.current_price_version(), True
    if request.method == "POST":
        text = request.POST.get("price_version", "")
        asked = int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0
        is_known = bool(selectors.price_list(asked).prices)
        version = asked if is_known else version
    start = selectors.price_list(version).prices
    places = sorted(start, key=lambda place: (place[0], RANKS[place[1]]))
    rows = [(place, [_box(place, kind, getattr(start[place], kind)) for kind in KINDS]) for place in places]
    if not is_known:
        messages.error(request, "This form is of no price version we know; here is the one in force.")
    elif request.method == "POST" and (answer := _drafted(request, start, rows)):
        return answer
    context = {"rows": rows, "kinds": KINDS, "price_version": version}
    return render(request, "operator/policy/prices.html", context)


def _box(place: PriceKey, kind: str, value: int) -> Box:
    model, label = place
    return Box(f"price.{model}.{label}.{kind}", kind, value)


def _drafted(
    request: HttpRequest, start: Mapping[PriceKey, TokenPrices], rows: list[tuple[PriceKey, list[Box]]]
) -> HttpResponse | None:
    """The way to the draft; None where something is wrong, which then stands at its box."""
    edited: dict[PriceKey, TokenPrices] = {}
    for place, boxes in rows:
        values: dict[str, Any] = {}
        for box in boxes:
            text = request.POST.get(box.name, str(box.value)).strip()
            value, box.wrong = number(text, 0, LARGEST_PRICE_MICROS, may_be_empty=False)
            box.value, values[box.label] = text, value
        if not any(box.wrong for box in boxes):
            edited[place] = TokenPrices(**values)
    current = policies.current_policy()
    if len(edited) < len(rows):
        messages.error(request, "Nothing was saved. What a price may be is written below it.")
        return None
    try:
        drafted = proposals.draft(
            actor=request.user.get_username(),
            document=current.policy if current else {},
            based_on=current.version if current else 0,
            prices=services.price_changes(start, edited),
        )
    except ValidationError as refusal:
        messages.error(request, " ".join(refusal.messages))
        return None
    return redirect("desk-proposal", proposal_id=drafted.id)
