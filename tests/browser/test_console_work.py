"""Batches and requests under way in a real browser. A console that complains fails the test (``page``)."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from django.utils import timezone
from openai import APIError, OpenAI
from playwright.sync_api import Page, expect

from gateway.batches import tasks
from gateway.batches.models import Batch
from tenants.roles import Role
from tests.browser.product import Product, join
from tests.gateway.conftest import MODEL

DROP = """(form, content) => {
  const data = new DataTransfer();
  data.items.add(new File([content], "dropped.jsonl"));
  for (const kind of ["dragenter", "dragover", "drop"]) {
    form.dispatchEvent(new DragEvent(kind, { dataTransfer: data, bubbles: true, cancelable: true }));
  }
}"""


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


def test_a_dropped_file_is_checked_and_its_errors_come_by_line(developer: Page) -> None:
    content = "\n".join([request_line("a"), "nonsense", request_line("a")])
    developer.goto("/console/aurora/batches")
    expect(developer.get_by_text("No batch yet")).to_be_visible()
    developer.locator("#upload").evaluate(DROP, content)
    expect(developer.locator("#upload-state")).to_contain_text("dropped.jsonl")
    developer.get_by_role("button", name="Upload and start").click()

    expect(developer.get_by_role("heading", name="dropped.jsonl")).to_be_visible()
    expect(developer.locator(".state")).to_have_text("validating")
    tasks.validate_batch(str(newest().id))
    expect(developer.locator(".state")).to_have_text("failed")
    expect(developer.locator("tbody th")).to_have_text(["2", "3"])
    expect(developer.get_by_role("button", name="Cancel the batch")).to_have_count(0)


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
