"""Batches and requests under way in a real browser. A console that complains fails the test (``page``)."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.utils import timezone
from openai import APIError, OpenAI
from playwright.sync_api import Browser, Page, Route, expect

from billing.models import Rollup
from gateway.batches import tasks, wishes
from gateway.batches.models import Batch
from tenants.models import ApiKey, Tenant
from tenants.roles import Role
from tests.browser.cable import Cable
from tests.browser.product import Product, join
from tests.gateway.fake_worker import MODEL


def drop(page: Page, name: str, path: Path) -> None:
    """As a hand does it: the browser's own drag, over the middle of the field."""
    box = page.get_by_label(name).bounding_box()
    assert box is not None
    devtools = page.context.new_cdp_session(page)
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    at = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2}
    for kind in ("dragEnter", "dragOver", "drop"):
        devtools.send("Input.dispatchDragEvent", {"type": kind, "data": data, **at})


def request_line(custom_id: str) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


@pytest.fixture
def site(product: Product) -> str:
    product.begin_again()
    return product.base_url


@pytest.fixture
def developer(page: Page, site: str) -> Page:
    join(page.context, site, "aurora", Role.DEVELOPER)
    return page


def newest() -> Batch:
    found = Batch.objects.first()
    assert found is not None
    return found


def test_a_dropped_file_is_checked_and_its_errors_come_by_line(developer: Page, tmp_path: Path) -> None:
    path = tmp_path / "dropped.jsonl"
    path.write_text("\n".join([request_line("a"), "nonsense", request_line("a")]))
    developer.goto("/console/aurora/batches")
    expect(developer.get_by_text("No batch yet")).to_be_visible()
    drop(developer, "Input file", path)
    expect(developer.get_by_label("Input file")).to_have_value("C:\\fakepath\\dropped.jsonl")
    developer.get_by_role("button", name="Upload and start").click()

    expect(developer.get_by_role("heading", name="dropped.jsonl")).to_be_visible()
    expect(developer.locator(".state")).to_have_text("validating")
    tasks.validate_batch(str(newest().id))
    expect(developer.locator(".state")).to_have_text("failed")
    expect(developer.locator("tbody th")).to_have_text(["2", "3"])
    expect(developer.get_by_role("button", name="Cancel the batch")).to_have_count(0)


def test_a_refused_upload_is_told_where_it_was_sent_from(developer: Page, tmp_path: Path, settings: Any) -> None:
    path = tmp_path / "large.jsonl"
    path.write_text(request_line("a"))
    settings.RUBATO_FILE_LIMIT_BYTES = 10
    developer.goto("/console/aurora/batches")
    developer.evaluate("window.isSamePage = true")
    developer.get_by_label("Input file").set_input_files(path)
    developer.get_by_role("button", name="Upload and start").click()
    expect(developer.get_by_text("A file may have at most 10 bytes.")).to_be_visible()
    expect(developer.get_by_role("button", name="Upload and start")).to_be_focused()
    assert developer.evaluate("window.isSamePage")


def test_progress_moves_by_itself_and_the_keyboard_keeps_its_place(developer: Page, tmp_path: Path) -> None:
    path = tmp_path / "three.jsonl"
    path.write_text("\n".join(map(request_line, "abc")))
    developer.goto("/console/aurora/batches")
    developer.get_by_label("Input file").set_input_files(path)
    developer.get_by_role("button", name="Upload and start").click()
    expect(developer.locator(".state")).to_have_text("validating")
    batch = newest()
    tasks.validate_batch(str(batch.id))
    expect(developer.locator(".state")).to_have_text("in progress")

    button = developer.get_by_role("button", name="Cancel the batch")
    button.focus()
    Batch.objects.filter(id=batch.id).update(num_completed=2)
    expect(developer.get_by_text("2 of 3")).to_be_visible()
    expect(button).to_be_focused()
    with developer.expect_download() as download:
        developer.get_by_role("link", name="input").click()
    assert download.value.suggested_filename == "three.jsonl"
    assert Path(download.value.path()).read_text() == path.read_text()
    button.press("Enter")
    expect(developer.get_by_text("It is being cancelled")).to_be_visible()
    Batch.objects.filter(id=batch.id).update(status="cancelled", cancelled_at=timezone.now())
    expect(developer.locator(".state")).to_have_text("cancelled")


def test_a_request_under_way_is_seen_and_stopped(developer: Page, product: Product) -> None:
    product.worker.script.answer, product.worker.step_s = b"x" * 2_000, 0.05
    developer.goto("/console/aurora/live")
    expect(developer.get_by_text("Nothing of yours")).to_be_visible()

    def ask() -> None:
        with OpenAI(base_url=f"{product.base_url}/v1", api_key=product.keys["aurora"], max_retries=0) as client:
            try:
                client.responses.create(model=MODEL, input="Hi", max_output_tokens=2_000)
            except APIError as error:
                ended.append(error)

    ended: list[APIError] = []
    asking = threading.Thread(target=ask)
    asking.start()
    expect(developer.get_by_role("cell", name="answering")).to_be_visible()
    developer.get_by_role("button", name="Cancel").click()
    expect(developer.get_by_text("It is told to stop")).to_be_visible()
    expect(developer.get_by_text("Nothing of yours")).to_be_visible()
    asking.join(10)
    assert not asking.is_alive()
    assert [cancel.reason for _, cancel in product.worker.cancels] == ["client"]


def test_usage_over_time_has_a_scale_and_can_be_read_off(developer: Page) -> None:
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    sums = {"num_requests": 3, "prompt_tokens": 900, "cached_tokens": 100, "output_tokens": 700, "cost_micros": 5}
    tenant = Tenant.objects.get(slug="aurora")
    Rollup.objects.create(tenant=tenant, hour=hour, priority_class="interactive", model=MODEL, key_id=tenant.id, **sums)
    developer.goto("/console/aurora/usage?span=day")
    plot = developer.locator("#chart .u-over")
    box = plot.bounding_box()
    assert box is not None
    developer.mouse.move(box["x"] + box["width"] - 8, box["y"] + box["height"] / 2)
    words = developer.locator("#chart .u-legend")
    expect(words).to_contain_text("1,600")
    expect(words).to_contain_text(f"{hour.astimezone(ZoneInfo(tenant.timezone)):%Y-%m-%d %H:%M}")


def test_a_double_press_makes_one_key_and_shows_its_secret_and_a_reload_makes_no_other(
    developer: Page, site: str
) -> None:
    developer.goto(f"{site}/console/aurora/keys")
    before = ApiKey.objects.count()
    developer.get_by_label("Name").fill("pressed twice")
    developer.get_by_role("button", name="Make the key").dblclick()
    expect(developer.get_by_label("The key", exact=True)).to_contain_text("sk_")
    developer.reload()
    expect(developer.get_by_role("status")).to_contain_text("This form was sent before")
    assert ApiKey.objects.count() == before + 1


def test_news_that_does_not_come_is_said_once_and_no_longer_when_it_comes_again(developer: Page, site: str) -> None:
    page = developer.context.new_page()  # its console may complain
    page.goto(f"{site}/console/aurora/live")
    answers: list[int] = []

    def broken(route: Route) -> None:
        answers.append(503)
        route.fulfill(status=503)

    page.route("**/live", broken)
    told = page.get_by_role("alert")
    expect(told).to_contain_text("The gateway answered with an error (503). What is shown is the last it said.")
    while len(answers) < 2:
        page.wait_for_event("requestfinished")
    expect(told).to_have_count(1)
    page.unroute("**/live")
    expect(told).to_have_count(0)
    page.close()


def test_a_file_whose_answer_was_lost_is_sent_again_and_is_one_batch(
    site: str, browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lost.jsonl"
    path.write_text(request_line("a"))
    before = Batch.objects.count()
    with Cable(site) as cable:
        page = browser.new_page(base_url=cable.base_url)  # its console may complain
        join(page.context, cable.base_url, "aurora", Role.DEVELOPER)
        page.goto("/console/aurora/batches")
        page.get_by_label("Input file").set_input_files(path)
        monkeypatch.setattr(wishes, "ask_for", lambda task, batch_id: cable.cut())  # asked for once it is made
        page.get_by_role("button", name="Upload and start").click()
        expect(page.get_by_role("alert")).to_contain_text("Not done, as far as this page knows")
        assert Batch.objects.count() == before + 1
        cable.mend()
        page.get_by_role("button", name="Upload and start").click()
        expect(page.get_by_role("heading", name="lost.jsonl")).to_be_visible()
        expect(page.get_by_text("This form was sent before")).to_be_visible()
        page.close()
    assert Batch.objects.count() == before + 1
