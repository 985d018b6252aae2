"""Every page in a browser without JavaScript: what needs it says so and sends nothing, and nobody waits for news."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.utils import timezone
from playwright.sync_api import Browser, Page, expect

from gateway.batches.models import Batch
from tests.browser.test_every_page import CASES, enter, site, things

__all__ = ["site", "things"]  # fixtures
WITHOUT_AN_ADDRESS = """() => [...document.querySelectorAll("form:not([method])")].map((form) => ({
  sends: [...form.querySelectorAll("button:not([type=button]), input[type=submit]")].some((one) => !one.disabled),
  says: Boolean(form.querySelector("noscript p")?.checkVisibility()),
}))"""
ASKS_AGAIN = """() => [...document.querySelectorAll("[hx-trigger*=every]")].some((one) => one.checkVisibility())"""


@pytest.fixture
def plain(browser: Browser, site: str) -> Iterator[Page]:
    context = browser.new_context(base_url=site, java_script_enabled=False)
    yield context.new_page()
    context.close()


@pytest.mark.parametrize(("role", "path"), CASES)
def test_a_page_promises_nothing_that_its_script_would_have_to_keep(
    plain: Page, site: str, things: dict[str, Any], role: str, path: str
) -> None:
    changes = {"status": "in_progress", "in_progress_at": timezone.now(), "errors": []}
    Batch.objects.filter(id=things["batch"]).update(**changes)
    enter(plain, site, role)
    plain.goto(path.format(**things))
    assert all(form == {"sends": False, "says": True} for form in plain.evaluate(WITHOUT_AN_ADDRESS))
    if plain.evaluate(ASKS_AGAIN):
        expect(plain.locator("noscript p").first).to_contain_text("load it again")


def test_the_playground_sends_nothing_and_keeps_what_was_typed(plain: Page, site: str) -> None:
    enter(plain, site, "owner")
    plain.goto("/console/aurora/playground")
    expect(plain.get_by_role("button", name="Send")).to_be_disabled()
    plain.get_by_label("Prompt").fill("a long question")
    plain.get_by_label("Max tokens").press("Enter")
    expect(plain.locator("noscript p")).to_be_visible()
    expect(plain.get_by_label("Prompt")).to_have_value("a long question")
    assert plain.url == f"{site}/console/aurora/playground"


@pytest.mark.parametrize("path", ["live", "batches", "batches/{batch}"])
def test_what_renews_itself_says_that_it_does_not(plain: Page, site: str, things: dict[str, Any], path: str) -> None:
    changes = {"status": "in_progress", "in_progress_at": timezone.now(), "errors": []}
    Batch.objects.filter(id=things["batch"]).update(**changes)
    enter(plain, site, "owner")
    plain.goto(f"/console/aurora/{path.format(**things)}")
    assert plain.evaluate(ASKS_AGAIN)
    expect(plain.locator("noscript p").first).to_be_visible()
