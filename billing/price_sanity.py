"""What is odd about a price list that somebody wants, in words. Pure; refuses nothing: a price may be meant so."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from billing.lines import PriceKey
from billing.pricing import TokenKind, TokenPrices
from scheduler_engine.policy import PriorityClass

SUSPICIOUS_FACTOR = 10


def oddities(before: Mapping[PriceKey, TokenPrices], after: Mapping[PriceKey, TokenPrices]) -> list[str]:
    """Of the places that differ: a price of 0, one that is ten times what it was or a tenth, output cheaper than input,
    cached input dearer than input, and a class cheaper than a lower one of the same model.
    """
    found: list[str] = []
    for place in sorted(after):
        if after[place] != before.get(place):
            found += _of_a_price(place, before.get(place), after[place])
            found += _of_a_place(place, after[place])
    for model in sorted({model for model, label in after if after[model, label] != before.get((model, label))}):
        found += _between_classes(model, after)
    return found


def _of_a_price(place: PriceKey, before: TokenPrices | None, after: TokenPrices) -> Iterator[str]:
    for kind in TokenKind:
        old, new = getattr(before, kind, None), getattr(after, kind)
        if new == old:
            continue
        where = f"{' '.join(place)}: {kind.value}"
        if new == 0:
            yield f"{where} tokens would cost nothing"
        elif old and new >= SUSPICIOUS_FACTOR * old:
            yield f"{where} would cost {new / old:,.0f} times what it does"
        elif old and new * SUSPICIOUS_FACTOR <= old:
            yield f"{where} would cost 1/{old / new:,.0f} of what it does"


def _of_a_place(place: PriceKey, prices: TokenPrices) -> Iterator[str]:
    where = " ".join(place)
    if prices.output < prices.prompt:
        yield f"{where}: output ({prices.output:,}) would be cheaper than input ({prices.prompt:,})"
    if prices.cached > prices.prompt:
        yield f"{where}: cached input ({prices.cached:,}) would be dearer than input ({prices.prompt:,})"


def _between_classes(model: str, after: Mapping[PriceKey, TokenPrices]) -> Iterator[str]:
    labels: Sequence[str] = [one.label for one in PriorityClass if (model, one.label) in after]
    for rank, label in enumerate(labels):
        for lower in labels[rank + 1 :]:
            for kind in TokenKind:
                mine, theirs = getattr(after[model, label], kind), getattr(after[model, lower], kind)
                if mine < theirs:
                    yield f"{model}: {kind.value} would be cheaper as {label} ({mine:,}) than as {lower} ({theirs:,})"
