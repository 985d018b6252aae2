"""Every page as axe-core reads it, on a light desk and on a dark phone. A console that complains fails (``page``).

With PAGE_PICTURES=FOLDER each view of each page is also photographed there, to be looked at.
"""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal
from zoneinfo import ZoneInfo

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.utils import timezone
from playwright.sync_api import Browser, Page, expect

from billing.models import Rollup, Statement
from gateway.batches.models import Batch
from gateway.webhooks import services as webhooks
from gateway.webhooks import tasks
from gateway.webhooks.models import Alert
from tenants import members, proposals, selectors, services
from tenants.models import ApiKey, Project, QuotaPolicy, Tenant
from tenants.roles import Role
from tests.browser.product import Product, join

MOST_SHIFT = 0.1
SHIFTS = """
window.shift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shift += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""
AXE = """async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  return found.violations.flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.target} ${node.failureSummary}`));
}"""
VIEWS: dict[str, tuple[int, int, Literal["light", "dark"]]] = {
    "desk": (1280, 900, "light"),
    "phone": (390, 800, "dark"),
}
OPEN_TO_ALL = {
    "front": "/",
    "log-in": "/account/login/",
    "forgotten": "/account/password/reset/",
    "asked": "/account/password/reset/done/",
    "nowhere": "/nowhere",
    "ended": "/invitation/nonsense",
    "invitation": "/invitation/{invitation}",
}
OF_A_TENANT = {
    "home": "/console/",
    "start": "/console/aurora/",
    "playground": "/console/aurora/playground",
    "batches": "/console/aurora/batches",
    "batch": "/console/aurora/batches/{batch}",
    "under way": "/console/aurora/live",
    "keys": "/console/aurora/keys",
    "rotate": "/console/aurora/keys/{key}/rotate",
    "revoke": "/console/aurora/keys/{key}/revoke",
    "projects": "/console/aurora/projects",
    "usage": "/console/aurora/usage?by=model",
    "statements": "/console/aurora/statements",
    "statement": "/console/aurora/statements/{statement}",
    "members": "/console/aurora/members",
    "alerts": "/console/aurora/alerts",
    "webhooks": "/console/aurora/webhooks",
    "trail": "/console/aurora/trail",
    "sign out": "/account/logout/",
    "joining": "/invitation/{invitation}",
}
OF_A_VISITOR = {"for operators": "/operator/live", "of a role": "/console/aurora/trail"}
OF_AN_OPERATOR = {
    "board": "/operator/live",
    "quotas": "/operator/policy/",
    "classes": "/operator/policy/classes",
    "prices": "/operator/policy/prices",
    "edit": "/operator/policy/edits/{edit}",
    "history": "/operator/policy/history",
    "version": "/operator/policy/versions/{version}",
}
LINE = {
    **{"project": "Customer support assistant (production, EU-West)", "priority_class": "interactive"},
    **{"key": "nightly summariser of the insurance claims team in Kraków-Łódź", "model": "smollm2-135m-instruct"},
    **{"num_requests": 1_234_567, "prompt_tokens": 123_456_789_012, "cached_tokens": 99_999_999_999},
    **{"output_tokens": 55_555_555_555, "cost_micros": 123_456_789_012_345, "is_charged": True},
    **{"price_version": 1_234, "price_prompt": 150_000, "price_cached": 75_000, "price_output": 10**12},
    "rounding_picos": 1_234_567_000_000,
}
CASES = [
    pytest.param(role, path, id=name)
    for role, paths in (
        *(("", OPEN_TO_ALL), ("owner", OF_A_TENANT)),
        *(("developer", OF_A_VISITOR), ("operator", OF_AN_OPERATOR)),
    )
    for name, path in paths.items()
]


@pytest.fixture(scope="module")
def things(product: Product) -> dict[str, Any]:
    """One of each that a page can show."""
    tenant = Tenant.objects.get(slug="aurora")
    key = ApiKey.objects.filter(tenant=tenant).order_by("created_at")[0]
    project = Project.objects.filter(tenant=tenant)[0]
    now = timezone.now()
    for name in ("ops", "deputy"):
        User.objects.create_superuser(name, password="a long enough one")
    batch = Batch.objects.create(
        tenant=tenant,
        project=project,
        key_id=key.id,
        key_public_id=key.public_id,
        endpoint="/v1/responses",
        input_file_id=uuid.uuid4(),
        output_lifetime_s=1,
        expires_at=now,
        status="failed",
        errors=[{"code": "invalid_json", "line": 2, "message": "this is no JSON", "param": None}],
        failed_at=now,
    )
    webhooks.draw(actor="tests", tenant=tenant, priority_class="interactive", measure="tokens", amount=9_000)
    Alert.objects.create(
        tenant=tenant,
        event="budget.exhausted",
        subject="batch 2026-11",
        data={"class": "batch", "window": "2026-11", "used_percent": 97},
        happened_at=now,
    )
    webhooks.add(actor="tests", tenant=tenant, url="https://aurora.example/hook", events=["batch.failed"])
    Batch.objects.filter(id=batch.id).update(failed_at=timezone.now())
    tasks.announce(timezone.now())
    sums = {"num_requests": 3, "prompt_tokens": 900, "cached_tokens": 100, "output_tokens": 700, "cost_micros": 12_345}
    hour = now.replace(minute=0, second=0, microsecond=0)
    Rollup.objects.create(
        tenant=tenant, hour=hour, priority_class="interactive", model="simulated", key_id=key.id, **sums
    )
    day = datetime(2026, 11, 1, tzinfo=UTC)
    statement = Statement.objects.create(
        tenant=tenant,
        day=day.date(),
        zone="UTC",
        starts_at=day,
        ends_at=day + timedelta(days=1),
        lines=[{**LINE, "project_id": str(project.id), "key_id": str(key.id)}],
        corrections=[{"kind": "credit", "reason": "a night that was lost to us", "amount_micros": 5}],
        charged_micros=5,
        adjusted_micros=0,
        credited_micros=0,
        total_micros=5,
    )
    members.invite(actor="tests", tenant=tenant, email="open@example.com", role=Role.AUDITOR)
    cell = selectors.tenant_class_policy(QuotaPolicy.objects.get(tenant=tenant, priority_class="default"))
    services.save_quota(actor="tests", policy=replace(cell, money_micros=20_000_000, money_window="day"))
    current = selectors.current_policy()
    assert current is not None
    document = selectors.live_policy(current.version)
    document["tenants"][0]["weight"] += 1  # type: ignore[index]
    edit = proposals.draft(actor="ops", document=document, based_on=current.version)
    invitation = members.invite(actor="tests", tenant=tenant, email="new@example.com", role=Role.BILLING)
    return {
        "key": key.id,
        "batch": batch.id,
        "edit": edit.id,
        "statement": statement.id,
        "version": current.version - 1,
        "invitation": invitation.token,
    }


@pytest.fixture
def site(product: Product, things: dict[str, Any]) -> str:
    product.begin_again()
    return product.base_url


def enter(page: Page, site: str, role: str) -> None:
    if role in list(Role):
        join(page.context, site, "aurora", Role(role))
    elif role:
        name = {"operator": "ops"}.get(role, role)
        client = Client()
        client.force_login(User.objects.get(username=name), backend="django.contrib.auth.backends.ModelBackend")
        page.context.add_cookies([{"name": "sessionid", "value": client.cookies["sessionid"].value, "url": site}])


@pytest.mark.parametrize(("role", "path"), CASES)
def test_a_page_reads_well_for_everybody(page: Page, site: str, things: dict[str, Any], role: str, path: str) -> None:
    enter(page, site, role)
    page.add_init_script(SHIFTS)
    complaints, pictures = [], os.environ.get("PAGE_PICTURES")
    for view, (width, height, scheme) in VIEWS.items():
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": height})
        page.goto(path.format(**things))
        expect(page.get_by_role("heading", level=1)).to_have_count(1)
        page.evaluate(AXE_SCRIPT)
        complaints += [f"{view}: {one}" for one in page.evaluate(AXE)]
        wide, shift = page.evaluate("[document.documentElement.scrollWidth, window.shift]")
        if pictures:
            name = path.strip("/").replace("/", "-") or "front"
            page.screenshot(path=f"{pictures}/{name}-{view}.png", full_page=True)
        complaints += [f"{view}: {wide} px wide"] if wide > width else []
        complaints += [f"{view}: the layout shifts by {shift}"] if shift >= MOST_SHIFT else []
    assert complaints == []


@pytest.mark.parametrize(
    "name", ["billing/ledgerentry", "billing/usagerequest", "tenants/quotapolicy", "tenants/tenant"]
)
def test_a_list_of_the_admin_reads_well_for_everybody(page: Page, site: str, name: str) -> None:
    enter(page, site, "operator")
    page.goto(f"/admin/{name}/")
    page.evaluate(AXE_SCRIPT)
    assert page.evaluate(AXE) == []


TAB_STOPS = """() => {
  const all = document.querySelectorAll("a, button, input, select, textarea, summary, [tabindex='0']");
  const canBeUsed = (one) =>
    !one.disabled && one.type !== "hidden" && one.checkVisibility({ visibilityProperty: true });
  return [...all].filter(canBeUsed).filter((one) => one.type !== "radio" || one.checked).length;
}"""
AT = """() => {
  const at = document.activeElement, style = getComputedStyle(at);
  if (at === document.body) return null;
  window.passed ??= new Set();
  const isNew = !window.passed.has(at);
  window.passed.add(at);
  const isShown = style.outlineStyle !== "none" && style.outlineWidth !== "0px";
  return { what: at.outerHTML.slice(0, 120), isNew, isShown };
}"""


@pytest.mark.parametrize(
    ("role", "path"),
    [("owner", "/console/aurora/playground"), ("owner", "/console/aurora/keys"), ("operator", "/operator/policy/")],
)
def test_the_keyboard_reaches_everything_in_order_and_shows_where_it_is(
    page: Page, site: str, role: str, path: str
) -> None:
    enter(page, site, role)
    page.goto(path)
    stops = page.evaluate(TAB_STOPS)
    seen: list[dict[str, Any]] = []
    for _ in range(stops):
        page.keyboard.press("Tab")
        if (at := page.evaluate(AT)) is None:
            break
        seen.append(at)
    assert "Skip to the content" in seen[0]["what"]
    assert [one["what"] for one in seen if not one["isNew"]] == []
    assert [one["what"] for one in seen if not one["isShown"]] == []
    assert len(seen) == stops


CUT = "[...document.querySelectorAll('.matrix input')].filter((one) => one.scrollWidth > one.clientWidth).length"


def test_every_number_of_the_matrix_is_seen_whole_on_a_laptop(page: Page, site: str) -> None:
    enter(page, site, "operator")
    page.goto("/operator/policy/")
    assert page.get_by_label("Bulk batch: tokens_per_minute").input_value() == "20000000"
    assert page.evaluate(CUT) == 0
    wide = page.get_by_role("region", name="Quota matrix").evaluate("(box) => box.scrollWidth - box.clientWidth")
    assert wide == 0


def test_two_admins_in_conflict_see_each_others_edit(page: Page, browser: Browser, site: str) -> None:
    other = browser.new_context(base_url=site).new_page()
    for one, name, weight in ((page, "ops", "7"), (other, "deputy", "9")):
        enter(one, site, name)
        one.goto("/operator/policy/?q=aurora")
        one.get_by_label("Aurora batch: weight").fill(weight)
    for one in (page, other):
        one.get_by_role("button", name="See what this does").click()
        expect(one.get_by_role("cell", name="weight").first).to_be_visible()
    row = other.get_by_role("region", name="Other edits of the same").get_by_role("row").last
    expect(row).to_contain_text("Aurora, batch")
    expect(row).to_contain_text("ops, ")
    for one, told in ((page, "In force: version"), (other, "Somebody has edited the same since")):
        one.get_by_label("Why", exact=True).fill("they asked")
        one.get_by_role("button", name="Put it in force").click()
        expect(one.get_by_text(told)).to_be_visible()
    row = other.get_by_role("alert").get_by_role("row").last
    expect(row.get_by_role("cell")).to_have_text(["weight", "7", "9"])
    other.context.close()


def test_times_are_told_in_the_viewers_own_zone(browser: Browser, site: str, things: dict[str, Any]) -> None:
    context = browser.new_context(base_url=site, timezone_id="Asia/Kolkata")
    page = context.new_page()
    enter(page, site, "owner")
    page.goto("/console/aurora/alerts")
    told = page.locator("time").first
    expect(told).to_contain_text("GMT+5:30")
    at = datetime.fromisoformat(told.get_attribute("datetime") or "").astimezone(ZoneInfo("Asia/Kolkata"))
    assert told.text_content() == f"{at:%Y-%m-%d %H:%M} GMT+5:30"
    context.close()


@pytest.mark.soak
def test_fifty_thousand_rows_come_a_page_at_a_time(page: Page, site: str, things: dict[str, Any]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO webhooks_delivery (id, tenant_id, endpoint_id, event, subject, payload, state, num_attempts,"
            " next_at, last_error, created_at) SELECT gen_random_uuid(), tenant_id, id, 'key.revoked', n::text, '{}',"
            " 'dead', 1, now(), '', now() FROM webhooks_endpoint, generate_series(1, 50000) AS n LIMIT 50000"
        )
    enter(page, site, "owner")
    sizes: list[int] = []
    page.on("response", lambda answer: sizes.append(len(answer.body())))
    began = time.monotonic()
    page.goto("/console/aurora/webhooks")
    rows = page.get_by_role("region", name="Deliveries").locator("tbody tr")
    expect(rows).to_have_count(50)
    first = rows.first.inner_text()
    page.get_by_role("link", name="Older").click()
    expect(rows).to_have_count(50)
    assert rows.first.inner_text() != first
    assert sum(sizes) < 300_000
    assert time.monotonic() - began < 10
