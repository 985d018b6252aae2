"""Price lists as versions."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ValidationError

from billing import selectors, services
from billing.pricing import FREE, TokenPrices
from tenants import selectors as tenant_selectors


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
