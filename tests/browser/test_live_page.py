"""What an operator sees on /operator/live, in a real browser. A console that complains fails the test (``page``)."""

from __future__ import annotations

import re
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from gateway.loads import books
from tests.browser.live_rows import BATCH, cells_of, classes, histogram, row
from wire.messages import PolicyNews, TenantSnapshot

A_RATE = re.compile("^(\\d+[.]\\d|\u2013)$")


NONE = "\u2013"  # how the page writes that nothing was counted


def test_before_any_worker_reports_the_page_says_how_to_start_one(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")

    expect(operator.get_by_role("heading", name="No worker yet")).to_be_visible()
    expect(operator.get_by_role("status")).to_have_text("Live")


def test_a_worker_appears_with_its_facts_and_gauges(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play(num_free_blocks=128, num_free_host_blocks=200, num_free_slots=5)

    expect(operator.get_by_role("heading", name="worker-1")).to_be_visible()
    expect(operator.locator('[data-field="model"]')).to_have_text("smollm2-135m-instruct")
    expect(operator.locator('[data-field="device"]')).to_have_text("384 / 512")
    expect(operator.locator('[data-field="host"]')).to_have_text("56 / 256")
    expect(operator.locator('[data-field="slots"]')).to_have_text("11 / 16")
    expect(operator.locator("#empty")).to_be_hidden()


def test_a_board_that_has_not_seen_a_minute_says_since_when_it_looks(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play()

    expect(operator.locator('[data-field="recent_time"]')).to_have_text(
        re.compile("^Since [0-2][0-9]:[0-5][0-9]:[0-5][0-9]$")
    )
    expect(operator.locator("table.classes caption")).to_have_text(re.compile("p99 since [0-9:]{8}; "))


def test_an_idle_worker_says_that_nobody_is_there(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play()

    expect(operator.get_by_text("Nobody is on the device.")).to_be_visible()
    expect(operator.locator('[data-field="step_age"]')).to_contain_text("idle")


def test_what_a_class_gets_stands_in_a_table_against_its_targets(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play()
    expect(operator.get_by_role("heading", name="worker-1")).to_be_visible()
    stage.play(
        classes=classes(
            stage,
            BATCH,
            num_waiting=61,
            num_running=7,
            num_suspended=3,
            queue_wait=histogram(10, 2_000),
            ttft=histogram(10, 300),
            ttft_target_us=290_000,
            tpot=histogram(10, 50),
            tpot_target_us=50_000,
        )
    )

    cells = cells_of(operator, "classes", "^B ?batch")
    expect(cells).to_have_text(
        [
            "61",
            "7",
            "3",
            A_RATE,
            "1.5 s · 2.0 s · 2.0 s",
            "250 ms · \u25b2 295 ms · \u25b2 299 msp95, p99 over the target of 290 ms",
            "38 ms · 49 ms · 50 mstarget 50 ms",
        ]
    )


def test_what_the_policy_did_stands_in_a_table(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    news = PolicyNews(
        rung="batch_paused",
        batch_paused_us=12_000_000,
        num_batch_pauses=2,
        switching_per_mille=64,
        sheds=(("batch", "batch_paused", "class_closed", 4),),
    )
    stage.play(
        policy=news,
        classes=classes(
            stage,
            BATCH,
            preemptions=(("hold", "slots", 5), ("swap", "memory", 2)),
            shed=(("class_closed", 4),),
            floor_debt_us=1_500_000,
            num_promises_kept=9,
            num_promises_broken=1,
            fairness_gap_us=800_000,
            fairness_bound_us=2_500_000,
        ),
    )

    expect(cells_of(operator, "policy", "^B ?batch")).to_have_text(
        [
            "5 · 2 · 0slots 5, memory 2",
            "4batch paused: class closed 4",
            "1.5 s",
            "90.0 %9 of 10",
            "800 msbound 2.5 s",
        ]
    )
    expect(operator.locator('[data-field="rung"]')).to_have_text("batch paused")
    expect(operator.locator('[data-field="paused"]')).to_have_text("batch paused 12.0 s, 2 times")
    expect(operator.locator('[data-field="switching"]')).to_have_text("6.4 %")


def test_tenants_stand_by_name_with_share_and_entitlement(operator: Page, stage: Any) -> None:
    from tenants.models import Tenant

    aurora = Tenant.objects.create(slug="aurora", name="Aurora")
    operator.goto("/operator/live")
    stage.play()
    expect(operator.get_by_role("heading", name="worker-1")).to_be_visible()
    rows = ((str(aurora.id), 3_000_000, 3), ("stray", 1_000_000, 1), ("", 0, 0))
    stage.play(
        tenants=tuple(
            TenantSnapshot(tenant_id=name, gpu_us=(us, 0, 0), weight=weight, num_live=weight)
            for name, us, weight in rows
        )
    )

    expect(cells_of(operator, "tenants", "^Aurora")).to_have_text(["3", "3.0 s", "75.0 %", "75.0 %", "3.0 s"])
    expect(cells_of(operator, "tenants", "^stray")).to_have_text(["1", "1.0 s", "25.0 %", "25.0 %", "1.0 s"])
    expect(cells_of(operator, "tenants", "^other")).to_have_text(["0", "0 ms", "0.0 %", NONE, "0 ms"])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_a_phone_in_either_colour_scheme(operator: Page, stage: Any, scheme: Any) -> None:
    operator.emulate_media(color_scheme=scheme)
    operator.set_viewport_size({"width": 390, "height": 800})
    operator.goto("/operator/live")
    stage.play(classes=classes(stage, BATCH, ttft=histogram(3, 300), preemptions=(("hold", "slots", 5),)))
    expect(operator.get_by_role("heading", name="worker-1")).to_be_visible()

    assert operator.evaluate("document.documentElement.scrollWidth") == 390


def test_a_closed_class_is_said_to_be_closed(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play(classes=classes(stage, BATCH, num_waiting=900, closed=True))

    expect(cells_of(operator, "classes", "^B ?batch").first).to_have_text("900 · closed")


def test_names_are_shown_as_text_never_as_markup(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play(model="<img src=x onerror=alert(1)>", board=(row("<script>", BATCH, "decode", "<b>bulk"),))
    operator.get_by_text("Requests on the device or suspended").click()

    expect(operator.locator('[data-field="model"]')).to_have_text("<img src=x onerror=alert(1)>")
    expect(operator.locator(".requests tbody td").first).to_have_text("<script>")
    assert operator.locator("main img, main script").count() == 0


def test_books_that_differ_are_said_above_everything(operator: Page, stage: Any, monkeypatch: Any) -> None:
    found = {"engine_ledger_prompt_tokens": 0, "engine_ledger_output_tokens": 0, "wrong_rollups": 0}
    monkeypatch.setattr(books, "newest", found)
    operator.goto("/operator/live")
    stage.play()
    expect(operator.locator(".worker")).to_be_visible()
    expect(operator.locator("#books")).to_be_hidden()
    monkeypatch.setattr(books, "newest", {**found, "engine_ledger_output_tokens": 3})
    stage.play()
    expect(operator.get_by_role("alert")).to_contain_text("0 prompt and 3 output tokens that the ledger has not")


def test_nothing_is_wider_than_a_phone(operator: Page, stage: Any) -> None:
    operator.set_viewport_size({"width": 360, "height": 740})
    operator.goto("/operator/live")
    stage.play(board=(row("victim", BATCH, "held"),))
    expect(operator.locator(".lane-plot line.held")).to_have_count(1)

    assert operator.evaluate("document.documentElement.scrollWidth") == 360


def test_the_log_in_leads_to_the_live_page(page: Page, site: str, stage: Any) -> None:
    from django.contrib.auth.models import User

    User.objects.create_superuser("ops", password="a long enough one")
    page.goto("/operator/live")
    page.get_by_label("Login").fill("ops")
    page.get_by_label("Password").fill("a long enough one")
    page.get_by_role("button", name="Sign in").click()

    expect(page.get_by_role("status")).to_have_text("Live")
    page.get_by_role("link", name="Admin").click()
    expect(page.get_by_role("heading", name="Tenants, policy and books")).to_be_visible()


def test_the_front_page_has_a_call_to_copy(page: Page, site: str) -> None:
    page.goto("/")

    expect(page.get_by_role("heading", name="First call")).to_be_visible()
    expect(page.locator("pre", has_text="curl")).to_contain_text(f"curl {site}/v1/chat/completions")
