"""Price lists as versions."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ValidationError

from billing import selectors, services
from billing.models import Price, PriceVersion
from billing.pricing import FREE, TokenKind, TokenPrices
from tenants import selectors as tenant_selectors

BEYOND = 2 * 10**12
OLD = TokenPrices(prompt=1, cached=2, output=BEYOND)


def test_a_new_price_makes_a_new_version_and_keeps_all_others(world: Any) -> None:
    dearer = TokenPrices(prompt=1, cached=2, output=3)
    version = services.set_prices(actor="admin", prices={(world.model, "batch"): dearer}).version
    before, after = selectors.price_list(world.price_version), selectors.price_list(version)
    assert after.find(world.model, "batch") == dearer
    assert before.find(world.model, "batch") != dearer
    assert after.find(world.model, "interactive") == before.find(world.model, "interactive")


def test_a_price_edit_is_told_as_a_new_policy_version(world: Any) -> None:
    before = tenant_selectors.current_policy()
    services.set_prices(actor="admin", prices={(world.model, "batch"): FREE})
    assert tenant_selectors.current_policy().version == before.version + 1


def test_the_document_names_every_price_in_force(world: Any) -> None:
    document = selectors.current_policy_document()
    assert document["price_version"] == world.price_version
    assert len(document["prices"]) == 9
    assert {"model": world.model, "priority_class": "batch", "token_kind": "cached", "micros_per_million": 37_500} in (
        document["prices"]
    )


def test_an_unknown_model_has_no_price_and_version_0_is_free(world: Any) -> None:
    assert selectors.price_list(world.price_version).find("unknown", "batch") is None
    assert selectors.price_list(0).find("unknown", "batch") == FREE


def test_a_class_that_does_not_exist_gets_no_price(world: Any) -> None:
    with pytest.raises(ValidationError, match="valid choice"):
        services.set_prices(actor="admin", prices={(world.model, "platinum"): FREE})


@pytest.mark.parametrize("price", [10**12 + 1, 10**22])
def test_a_price_that_no_column_would_hold_for_a_long_call_is_refused(world: Any, price: int) -> None:
    beyond = TokenPrices(prompt=1, cached=1, output=price)
    with pytest.raises(ValidationError, match="at most 1,000,000,000,000 micro-units for a million tokens"):
        services.set_prices(actor="admin", prices={(world.model, "batch"): beyond})
    assert selectors.current_price_version() == world.price_version


@pytest.fixture
def with_an_old_price(world: Any) -> int:
    """The version of a list with one price that nobody could enter any more."""
    version = PriceVersion.objects.create(actor="long ago")
    prices = {**selectors.price_list(world.price_version).prices, (world.model, "batch"): OLD}
    Price.objects.bulk_create(
        Price(
            price_version=version,
            model=model,
            priority_class=priority_class,
            token_kind=kind.value,
            micros_per_million=getattr(price, kind.value),
        )
        for (model, priority_class), price in prices.items()
        for kind in TokenKind
    )
    return version.version


@pytest.mark.parametrize(
    ("priority_class", "edited"),
    [
        ("default", TokenPrices(prompt=7, cached=7, output=7)),
        ("batch", TokenPrices(prompt=7, cached=2, output=BEYOND)),
        ("batch", TokenPrices(prompt=1, cached=2, output=3)),
    ],
    ids=["of another class", "beside it", "its own"],
)
def test_a_price_beyond_the_bound_that_stands_already_keeps_nobody_from_an_edit(
    world: Any, with_an_old_price: int, priority_class: str, edited: TokenPrices
) -> None:
    place = (world.model, priority_class)
    after = selectors.price_list(services.set_prices(actor="admin", prices={place: edited}).version)
    assert after.prices == {**selectors.price_list(with_an_old_price).prices, place: edited}


def test_a_price_beyond_the_bound_is_refused_also_where_another_stands(world: Any, with_an_old_price: int) -> None:
    beyond = TokenPrices(prompt=BEYOND, cached=2, output=BEYOND)
    with pytest.raises(ValidationError, match="at most"):
        services.set_prices(actor="admin", prices={(world.model, "batch"): beyond})
