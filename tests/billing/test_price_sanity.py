"""What is called odd about a price list, and what is not."""

from __future__ import annotations

import pytest

from billing.price_sanity import oddities
from billing.pricing import TokenPrices

BEFORE = {
    ("m", "interactive"): TokenPrices(prompt=400, cached=200, output=1_200),
    ("m", "default"): TokenPrices(prompt=300, cached=150, output=900),
    ("m", "batch"): TokenPrices(prompt=150, cached=75, output=450),
}


def told(label: str, **kinds: int) -> list[str]:
    prices = {"prompt": 300, "cached": 150, "output": 900, **kinds}
    return oddities(BEFORE, {**BEFORE, ("m", label): TokenPrices(**prices)})


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ({"cached": 0}, "m default: cached tokens would cost nothing"),
        ({"output": 9_000}, "m default: output would cost 10 times what it does"),
        ({"cached": 15}, "m default: cached would cost 1/10 of what it does"),
        ({"output": 299}, "m default: output (299) would be cheaper than input (300)"),
        ({"cached": 301}, "m default: cached input (301) would be dearer than input (300)"),
        ({"output": 449}, "m: output would be cheaper as default (449) than as batch (450)"),
        ({"output": 1_201}, "m: output would be cheaper as interactive (1,200) than as default (1,201)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_odd_about_an_edit_is_said(kinds: dict[str, int], words: str) -> None:
    assert words in told("default", **kinds)


def test_an_ordinary_edit_is_not_odd() -> None:
    assert told("default", output=1_000) == []


def test_what_was_odd_before_is_not_said_of_an_edit_that_leaves_it() -> None:
    odd = {**BEFORE, ("n", "batch"): TokenPrices(prompt=9, cached=9, output=0)}
    after = {**odd, ("m", "default"): TokenPrices(prompt=310, cached=150, output=900)}
    assert oddities(odd, after) == []
