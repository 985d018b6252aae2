"""A developer, an operator and somebody from finance, each from the README alone, in a real browser in front of
``manage.py up``: the real engine on the simulated device. A console that complains fails (``page``).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openai import InternalServerError, OpenAI, PermissionDeniedError
from playwright.sync_api import Page, expect

from tests.end_to_end.running_up import Up

REPLAY_LIMIT_MS = 120_000
PAUSE_LIMIT_S = 1.0
CLOSE_TODAY = """
import django; django.setup()
from datetime import timedelta
from django.utils import timezone
from billing import statements
print(len(statements.close_due_days(timezone.now() + timedelta(days=2))))
"""


@pytest.fixture(scope="module")
def platform(project_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    started = Up(project_root, tmp_path_factory.mktemp("up") / "data", "--device-profile=toy")
    try:
        started.wait_until_serving()
        yield started
    finally:
        started.stop()


@pytest.fixture
def site(platform: Up) -> str:
    base_url: str = platform.demo["base_url"]
    return base_url


def sign_in(page: Page, platform: Up, path: str) -> None:
    """As the admin whom the README names, who is an owner of each demo tenant too."""
    page.goto(path)
    page.get_by_label("Login").fill(platform.demo["admin"]["username"])
    page.get_by_label("Password").fill(platform.demo["admin"]["password"])
    page.get_by_role("button", name="Sign in").click()


def ask(page: Page) -> None:
    page.goto("/console/aurora/playground")
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_role("status")).to_contain_text(re.compile("Complete|Cut at max tokens"), timeout=60_000)


def test_a_developer_has_a_first_answer_and_the_call_to_copy(page: Page, platform: Up) -> None:
    sign_in(page, platform, "/console/aurora/")
    expect(page.locator("pre", has_text="curl")).to_contain_text(f"{platform.demo['base_url']}/v1")
    ask(page)
    expect(page.locator("#answer")).not_to_be_empty()
    expect(page.locator("#waits-sum")).to_contain_text("before it started")


def test_an_operator_sees_the_worker_and_saves_a_quota_after_its_preview(page: Page, platform: Up) -> None:
    sign_in(page, platform, "/operator/live")
    expect(page.get_by_role("heading", name="worker-1")).to_be_visible()
    ask(page)
    page.goto("/operator/policy/?q=nova")
    page.get_by_label("Nova default: weight").fill("3")
    page.get_by_role("button", name="See what this does").click()
    expect(page.get_by_role("row", name=re.compile("Nova, default weight"))).to_be_visible()
    page.get_by_role("button", name="Replay the hour").click()
    expect(page.get_by_role("cell", name="this edit").first).to_be_visible(timeout=REPLAY_LIMIT_MS)
    page.get_by_label("Why", exact=True).fill("they pay more")
    page.get_by_role("button", name="Put it in force").click()
    expect(page.get_by_text(re.compile(r"In force: version \d+"))).to_be_visible()


@contextmanager
def runaway(platform: Up) -> Iterator[list[tuple[float, bool]]]:
    """Bulk calls in class batch again and again: when each call was made, and whether it was let in."""
    calls: list[tuple[float, bool]] = []
    is_over = threading.Event()

    def run() -> None:
        key, base_url = platform.demo["keys"]["bulk"], f"{platform.demo['base_url']}/v1"
        with OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            while not is_over.is_set():
                made_at_s = time.monotonic()
                try:
                    client.responses.create(
                        model=platform.demo["model"], input="Hi", max_output_tokens=1, service_tier="flex"
                    )
                    calls.append((made_at_s, True))
                except (PermissionDeniedError, InternalServerError):  # the second while the pause arrives
                    calls.append((made_at_s, False))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield calls
    finally:
        is_over.set()
        for thread in threads:
            thread.join(60)


def test_an_operator_stops_a_runaway_class_within_a_second_and_lets_it_go_on(page: Page, platform: Up) -> None:
    sign_in(page, platform, "/operator/policy/?q=bulk")
    sent_at_s: list[float] = []
    page.on("request", lambda request: sent_at_s.append(time.monotonic()) if request.method == "POST" else None)
    with runaway(platform) as calls:
        platform.wait_for(lambda: len(calls) > 5 and calls[-1][1])
        page.get_by_role("button", name="Pause Bulk batch").click()
        expect(page.get_by_text("Bulk, batch: paused.")).to_be_visible()
        (paused_at_s,) = sent_at_s
        platform.wait_for(lambda: calls[-1][0] > paused_at_s + 2 * PAUSE_LIMIT_S)
        later = {is_let_in for at_s, is_let_in in calls if at_s >= paused_at_s + PAUSE_LIMIT_S}
        page.goto("/operator/policy/?q=bulk")
        page.get_by_role("button", name="Resume Bulk batch").click()
        expect(page.get_by_text("Bulk, batch: resumed.")).to_be_visible()
        platform.wait_for(lambda: calls[-1][1], limit_s=10)
    assert later == {False}


def test_a_finance_reader_finds_a_statement_that_equals_the_ledger(
    page: Page, platform: Up, project_root: Path
) -> None:
    sign_in(page, platform, "/console/aurora/")
    ask(page)
    assert platform.reconcile()["is_right"]
    path = os.pathsep.join([str(project_root), str(project_root / "platform")])
    environment = {**os.environ, **platform.addresses, "RUBATO_DATA": str(platform.data), "PYTHONPATH": path}
    environment["DJANGO_SETTINGS_MODULE"] = "gateway.settings"
    subprocess.run([sys.executable, "-c", CLOSE_TODAY], env=environment, check=True, cwd=project_root)
    page.goto("/console/aurora/statements")
    page.locator("tbody th a").first.click()
    expect(page.get_by_role("region", name="Sums").get_by_role("cell").last).to_have_text(
        re.compile(r"^0\.\d+, equal$")
    )
    expect(page.get_by_role("region", name="Lines").get_by_role("row")).not_to_have_count(1)
