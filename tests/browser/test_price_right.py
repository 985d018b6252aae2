"""Somebody who may change prices and nothing else finds the way from the front page to a price in force."""

from __future__ import annotations

from django.contrib.auth.models import Permission, User
from playwright.sync_api import Page, expect

from billing import selectors, services
from billing.pricing import TokenPrices
from tenants import services as accounts


def test_who_may_change_prices_alone_is_led_to_them_and_puts_one_in_force(operator: Page, valkey: str) -> None:
    User.objects.get(username="ops").user_permissions.add(Permission.objects.get(codename="change_price"))
    accounts.create_tenant(actor="tests", slug="aurora", name="Aurora")
    services.set_prices(actor="tests", prices={("m", "batch"): TokenPrices(prompt=1, cached=2, output=3)})
    menu = operator.get_by_role("navigation", name="Pages").get_by_role("link")
    operator.goto("/")
    expect(menu).to_have_text(["Console", "Live", "Prices", "Admin"])
    operator.get_by_role("link", name="Prices").click()
    expect(menu).to_have_text(["Console", "Live", "Prices", "History", "Admin"])
    operator.get_by_label("m, batch: output").fill("4")
    operator.get_by_role("button", name="See what this does").click()
    operator.get_by_label("Why", exact=True).fill("dearer power")
    operator.get_by_role("button", name="Put it in force").click()
    expect(operator.get_by_text("In force: version")).to_be_visible()
    operator.get_by_role("link", name="History").click()
    operator.get_by_role("row", name="dearer power").get_by_role("link").click()
    expect(operator.get_by_role("heading", name="Going back to it")).to_have_count(0)
    found = selectors.price_list(selectors.current_price_version()).find("m", "batch")
    assert found == TokenPrices(prompt=1, cached=2, output=4)
