"""Tables of many columns on a laptop: nothing of them is cut off."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import User
from playwright.sync_api import Locator, Page, expect

from tenants import services
from tenants.models import Tenant
from wire.messages import TenantSnapshot


def hidden_px(table: Locator) -> int:
    """How much wider the table is than the box that it stands in."""
    return int(table.evaluate("table => table.parentElement.scrollWidth - table.parentElement.clientWidth"))


@pytest.mark.parametrize("width", [1280, 1440])
def test_the_boards_table_of_tenants_shows_all_of_its_columns(operator: Page, stage: Any, width: int) -> None:
    operator.set_viewport_size({"width": width, "height": 900})
    aurora = Tenant.objects.create(slug="aurora", name="Aurora")
    operator.goto("/operator/live")
    stage.play()
    expect(operator.get_by_role("heading", name="worker-1")).to_be_visible()
    for minutes in (2, 3):
        had = tuple(minutes * 60_000_000 + 36_000_000 for _ in range(3))
        stage.play(tenants=(TenantSnapshot(tenant_id=str(aurora.id), gpu_us=had, weight=4, num_live=62),))
        expect(operator.locator("table.tenants")).to_contain_text("min")
    for name in ("tenants", "policy", "classes"):
        assert (name, hidden_px(operator.locator(f"table.{name}"))) == (name, 0)


def test_wrong_boxes_push_no_button_off_the_desk(operator: Page) -> None:
    User.objects.filter(username="ops").update(is_superuser=True)
    services.create_tenant(actor="tests", slug="aurora", name="Aurora")
    operator.goto("/operator/policy/")
    for field in ("weight", "requests_per_minute", "tokens_per_minute", "money_micros", "max_tokens_cap"):
        operator.locator(f'input[name$=".default.{field}"]').fill("abc")
    operator.get_by_role("button", name="See what this does").click()
    expect(operator.get_by_text("5 fields need another value")).to_be_visible()
    assert hidden_px(operator.locator("table.matrix")) == 0
