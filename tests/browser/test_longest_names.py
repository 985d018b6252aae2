"""The longest names that can be given: no page grows wider than the window, on a laptop and on a phone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.utils import timezone
from playwright.sync_api import Page

from billing import services as billing_services
from billing.models import Rollup, Statement, UsageRequest
from gateway.batches.models import Batch, StoredFile
from gateway.webhooks.models import Delivery, Endpoint
from tenants import services
from tenants.models import (
    ApiKey,
    Invitation,
    Membership,
    PolicyProposal,
    PolicyVersion,
    Project,
    Tenant,
)
from tests.browser.product import Product
from tests.browser.test_every_page import CASES, LINE, enter, site, things

__all__ = ["site", "things"]  # fixtures
WIDTHS = (1280, 360)
SUMS = ("charged_micros", "adjusted_micros", "credited_micros", "total_micros")
LISTS = sorted(f"{of._meta.app_label}/{of._meta.model_name}" for of in admin.site._registry)
OUT = """() => [...document.querySelectorAll("body *")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 && one.checkVisibility())
  .filter((one) => !one.closest(".scroller, pre, .results, .visually-hidden"))
  .map((one) => one.outerHTML.slice(0, 90))"""


def longest(model: Any, field: str) -> str:
    """One word of as many wide letters as the field takes."""
    return "W" * int(model._meta.get_field(field).max_length)


def rename(model: Any, *fields: str) -> None:
    model.objects.update(**{field: longest(model, field) for field in fields})


@pytest.fixture(scope="module")
def named(product: Product, things: dict[str, Any]) -> dict[str, Any]:
    """Each of those with the longest names."""
    aurora, key = Tenant.objects.get(slug="aurora"), ApiKey.objects.get(id=things["key"])
    billing_services.credit(actor="W" * 150, tenant_id=aurora.id, amount_micros=10**15, reason="W" * 120)
    batch = Batch.objects.get(id=things["batch"])
    StoredFile.objects.create(
        id=batch.input_file_id,
        tenant=aurora,
        project=key.project,
        purpose="batch",
        filename=longest(StoredFile, "filename"),
        num_bytes=1,
        storage_name="0" * 32,
        created_by=longest(StoredFile, "created_by"),
        expires_at=timezone.now() + timedelta(days=9),
    )
    wrong = {"code": "x", "line": 2, "message": f"'model' {'W' * 200} is unknown", "param": "W" * 100}
    Batch.objects.update(errors=[wrong], model=longest(Batch, "model"))
    lines = [{**LINE, "project": "W" * 120, "key": "W" * 120, "model": "W" * 120}]
    corrections = [{"kind": "credit", "reason": "W" * 120, "amount_micros": 5}]
    known = Statement.objects.get(id=things["statement"])
    day, lasts, sums = known.day + timedelta(days=1), timedelta(days=1), dict.fromkeys(SUMS, 10**15)
    span = {"starts_at": known.ends_at, "ends_at": known.ends_at + lasts}
    statement = Statement.objects.create(
        tenant=aurora, day=day, zone="UTC", lines=lines, corrections=corrections, **span, **sums
    )
    rename(Tenant, "name")
    rename(Rollup, "model")
    rename(UsageRequest, "model", "reason")
    rename(Delivery, "last_error")
    rename(PolicyProposal, "created_by")
    version = services.record_policy(longest(PolicyVersion, "actor"), "W" * 1_000).version
    rename(ApiKey, "created_by", "revoked_by")
    ApiKey.objects.filter(id=key.id).update(name=longest(ApiKey, "name"))
    Project.objects.filter(id=key.project_id).update(name=longest(Project, "name"))
    rename(Invitation, "invited_by")
    for made in (Invitation, Membership):
        for number, one in enumerate(made.objects.all()):
            made.objects.filter(pk=one.pk).update(email=f"{number:03d}{'w' * 239}@example.com")
    Endpoint.objects.update(url="https://" + "w" * 492)
    return {**things, "statement": statement.id, "version": version}


@pytest.fixture
def renamed(named: dict[str, Any]) -> dict[str, Any]:
    User.objects.filter(username="ops").update(first_name="W" * 150, email="w" * 242 + "@example.com")
    return named


def too_wide(page: Page, address: str) -> list[str]:
    found = []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.goto(address)
        wide = page.evaluate("document.documentElement.scrollWidth")
        found += [f"{width}: {wide} px, by {page.evaluate(OUT)}"] if wide > width else []
    return found


@pytest.mark.parametrize(("role", "path"), CASES)
def test_a_page_with_the_longest_names_is_no_wider_than_the_window(
    page: Page, site: str, renamed: dict[str, Any], role: str, path: str
) -> None:
    enter(page, site, role)
    assert too_wide(page, path.format(**renamed)) == []


@pytest.mark.parametrize("name", ["", *LISTS])
def test_a_list_of_the_admin_with_the_longest_names_is_no_wider_than_the_window(
    page: Page, site: str, renamed: dict[str, Any], name: str
) -> None:
    enter(page, site, "operator")
    assert too_wide(page, f"/admin/{name}/".replace("//", "/")) == []
