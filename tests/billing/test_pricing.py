"""What tokens cost: exact integers, rounded up once."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from billing.pricing import (
    CHARGED_TERMINALS,
    FREE,
    Terminal,
    TokenCounts,
    TokenPrices,
    charge_micros,
    cost_micros,
    worst_case_micros,
)

PRICES = TokenPrices(prompt=150_000, cached=75_000, output=600_000)
prices = st.builds(
    TokenPrices,
    prompt=st.integers(0, 10**10),
    cached=st.integers(0, 10**10),
    output=st.integers(0, 10**10),
)


@st.composite
def token_counts(draw: st.DrawFn) -> TokenCounts:
    prompt = draw(st.integers(0, 10**6))
    return TokenCounts(prompt=prompt, cached=draw(st.integers(0, prompt)), output=draw(st.integers(0, 10**6)))


def test_a_million_of_each_kind_costs_exactly_its_price() -> None:  # P10
    assert cost_micros(TokenCounts(prompt=1_000_000), PRICES) == 150_000
    assert cost_micros(TokenCounts(prompt=1_000_000, cached=1_000_000), PRICES) == 75_000
    assert cost_micros(TokenCounts(output=1_000_000), PRICES) == 600_000


def test_one_token_is_rounded_up_to_a_whole_micro_unit() -> None:
    assert cost_micros(TokenCounts(prompt=1), PRICES) == 1


def test_rounding_happens_once_and_not_per_kind() -> None:
    one_third = TokenPrices(prompt=333_333, cached=333_333, output=333_334)
    assert cost_micros(TokenCounts(prompt=2, cached=1, output=1), one_third) == 1


@given(counts=token_counts(), price=prices)
def test_the_cost_is_the_exact_fraction_rounded_up(counts: TokenCounts, price: TokenPrices) -> None:
    exact = (
        Fraction(counts.prompt - counts.cached) * price.prompt
        + Fraction(counts.cached) * price.cached
        + Fraction(counts.output) * price.output
    ) / 1_000_000
    assert cost_micros(counts, price) == math.ceil(exact)


@given(counts=token_counts(), price=prices)
def test_a_reservation_always_covers_what_is_settled_later(counts: TokenCounts, price: TokenPrices) -> None:
    reserved = worst_case_micros(prompt_tokens=counts.prompt, max_output_tokens=counts.output, prices=price)
    assert cost_micros(counts, price) <= reserved


@pytest.mark.parametrize("terminal", list(Terminal))
def test_only_ends_that_are_not_the_platforms_doing_are_charged(terminal: Terminal) -> None:
    charged = charge_micros(terminal, TokenCounts(prompt=100, output=20), PRICES)
    assert (charged > 0) == (terminal in CHARGED_TERMINALS)


def test_a_cancel_costs_nothing_before_prefill_the_prompt_after_it_and_prompt_plus_k_later() -> None:
    charges = [
        charge_micros(Terminal.CANCELLED_CLIENT, counts, PRICES)
        for counts in (TokenCounts(), TokenCounts(prompt=100), TokenCounts(prompt=100, output=20))
    ]
    assert charges == [0, 15, 27]


def test_free_prices_cost_nothing() -> None:
    assert cost_micros(TokenCounts(prompt=7, output=9), FREE) == 0


@pytest.mark.parametrize("counts", [(-1, 0, 0), (1, 2, 0), (0, 0, -1), (0, -1, 0)])
def test_impossible_counts_are_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="token counts"):
        TokenCounts(*counts)


def test_a_negative_price_is_refused() -> None:
    with pytest.raises(ValueError, match="never negative"):
        TokenPrices(prompt=1, cached=-1, output=1)
