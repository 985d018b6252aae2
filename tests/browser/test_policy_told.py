"""The desk while Redis is away: what is saved is not said to be in force, until it is."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Page, expect

from tenants import services

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def desk(operator: Page, valkey: str) -> Page:
    User.objects.filter(username="ops").update(is_superuser=True)
    services.create_tenant(actor="tests", slug="aurora", name="Aurora")
    operator.goto("/operator/policy/")
    return operator


def test_an_edit_saved_without_redis_turns_to_in_force_by_itself_when_it_is_told(desk: Page, settings: Any) -> None:
    there, settings.REDIS_URL = settings.REDIS_URL, NOWHERE
    desk.get_by_label("Aurora default: concurrency").fill("77")
    desk.get_by_role("button", name="See what this does").click()
    desk.get_by_label("Why", exact=True).fill("they asked")
    desk.get_by_role("button", name="Put it in force").click()
    expect(desk.get_by_text("Version 2 is saved and not in force.")).to_be_visible()
    expect(desk.get_by_text("In force:")).to_have_count(0)
    history = desk.context.new_page()
    history.goto("/operator/policy/history")
    badge = history.get_by_role("row", name="they asked").locator(".role")
    expect(badge).to_have_text("saved")
    settings.REDIS_URL = there
    services.publish_policy()
    expect(badge).to_have_text("in force")
    for page in (desk, history):
        expect(page.get_by_text("In force: version 2.")).to_be_visible()
        expect(page.get_by_text("not in force")).to_have_count(0)


def test_a_pause_without_redis_says_that_it_is_not_in_force_and_leaves_what_was_typed(
    desk: Page, settings: Any
) -> None:
    there, settings.REDIS_URL = settings.REDIS_URL, NOWHERE
    box = desk.get_by_label("Aurora default: concurrency")
    box.fill("77")
    desk.get_by_role("button", name="Pause Aurora default").click()
    said = desk.get_by_text("Aurora, default: paused. Saved as version 2.")
    expect(said).to_be_visible()
    expect(desk.get_by_text("Version 2 is saved and not in force.")).to_be_visible()
    settings.REDIS_URL = there
    services.publish_policy()
    expect(desk.get_by_text("In force: version 2.")).to_be_visible()
    expect(said).to_be_visible()
    expect(desk.get_by_text("not in force")).to_have_count(0)
    expect(box).to_have_value("77")
