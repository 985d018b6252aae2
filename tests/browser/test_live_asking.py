"""What an operator asks of a worker on /operator/live: where a request's time went, and to drain."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from gateway.console.switchboard import switchboard
from tests.browser.live_rows import BATCH, INTERACTIVE, row
from wire.messages import Drain, Explain, Explained

ACCOUNT = Explained(
    response_id="victim",
    choice=0,
    is_known=True,
    sentence="waited 412 ms: 380 ms for KV memory held by the default class, 32 ms behind another tenant",
    total_us=2_000_000,
    queue_us=412_000,
    paused_us=88_000,
    ttft_us=530_000,
    waits=(("queued", "for KV memory held by the default class", 380_000),),
    timeline=((0, "let in"), (412_000, "started")),
)


class AnsweringBus:
    """A Bus whose workers answer at once. Always: notes whatever was sent."""

    gateway_id = "g1"

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    async def send(self, worker_id: str, message: Any) -> None:
        self.sent.append((worker_id, message))
        if isinstance(message, Explain):
            known = message.response_id == ACCOUNT.response_id
            switchboard.hear(ACCOUNT if known else Explained(response_id=message.response_id, choice=0, is_known=False))


@pytest.fixture
def bus() -> Iterator[AnsweringBus]:
    answering = AnsweringBus()
    switchboard.connect(answering)  # type: ignore[arg-type]  # what the switchboard needs of a Bus
    yield answering
    switchboard.connect(None)


def test_a_click_on_a_bar_tells_where_the_time_of_the_request_went(
    operator: Page, stage: Any, bus: AnsweringBus
) -> None:
    operator.goto("/operator/live")
    stage.play(board=(row("victim", BATCH, "decode"),))
    operator.locator('.lane-plot g[data-response="victim"] rect').dispatch_event("click")  # it moves: no steady place

    dialog = operator.get_by_role("dialog")
    expect(dialog).to_contain_text(ACCOUNT.sentence)
    expect(dialog).to_contain_text("queued 412 ms, paused 88 ms, running 1,500 ms; first token after 530 ms")
    expect(dialog.get_by_role("row")).to_have_text(
        ["queued380 msfor KV memory held by the default class", "+0 mslet in", "+412 msstarted"]
    )
    operator.keyboard.press("Escape")
    expect(dialog).to_be_hidden()


def test_many_lanes_are_a_picture_on_which_a_click_still_finds_its_request(
    operator: Page, stage: Any, bus: AnsweringBus
) -> None:
    operator.goto("/operator/live")
    rows = tuple(row(f"r{number}", BATCH, "decode") for number in range(80))
    stage.play(board=(*rows, row("victim", INTERACTIVE, "decode", "aurora")))
    expect(operator.locator(".lane-canvas")).to_be_visible()
    assert operator.locator(".lane-plot g[data-response]").count() == 0
    operator.wait_for_timeout(600)  # until its bar is some pixels long
    box = operator.locator(".lane-plot").bounding_box()
    assert box is not None
    operator.mouse.click(box["x"] + box["width"] - 4, box["y"] + 20)  # the first lane, under the heading

    expect(operator.get_by_role("dialog")).to_contain_text(ACCOUNT.sentence)
    assert [message.response_id for _, message in bus.sent] == ["victim"]
    operator.keyboard.press("Escape")
    stage.play(board=rows[:3])
    expect(operator.locator(".lane-canvas")).to_be_visible()  # lanes that were there in the last half minute stay


def test_a_request_or_a_worker_that_nobody_remembers_is_said_to_be_gone(
    operator: Page, stage: Any, bus: AnsweringBus
) -> None:
    stage.play()
    unknown = operator.request.get("/operator/live/explain?worker=worker-1&response=unknown")

    assert unknown.status == 404
    assert unknown.json() == {"error": "The worker does not remember this request any more."}
    assert operator.request.get("/operator/live/explain?worker=nobody&response=x").status == 404


def test_a_stranger_asks_no_worker_and_drains_none(operator: Page, stage: Any, bus: AnsweringBus) -> None:
    from django.contrib.auth.models import User

    User.objects.update(is_staff=False)
    stage.play()

    assert "/login" in operator.request.get("/operator/live/explain?worker=worker-1&response=victim").url
    assert operator.request.post("/operator/live/drain", form={"worker": "worker-1", "epoch": "1"}).status == 403
    assert bus.sent == []


def test_an_operator_who_may_drains_a_worker_and_it_is_on_record(operator: Page, stage: Any, bus: AnsweringBus) -> None:
    from django.contrib.admin.models import LogEntry
    from django.contrib.auth.models import Permission, User

    User.objects.get(username="ops").user_permissions.add(Permission.objects.get(codename="change_quotapolicy"))
    operator.goto("/operator/live")
    stage.play()
    operator.get_by_role("button", name="Drain …").click()
    operator.get_by_role("dialog").get_by_role("button", name="Drain", exact=True).click()

    expect(operator.get_by_text("worker-1 was told to drain.")).to_be_visible()
    assert bus.sent == [("worker-1", Drain(worker_epoch=1, actor="ops"))]
    entry = LogEntry.objects.get()
    assert (entry.user.username, entry.object_repr, entry.change_message) == (
        "ops",
        "worker worker-1: drained",
        "Drained, epoch 1.",
    )
    operator.goto("/admin/")
    told = operator.locator("#recent-actions-module").get_by_role("listitem")
    expect(told).to_have_text(re.compile(r"worker worker-1: drained\s+Worker"))


def test_who_may_not_change_quotas_drains_nobody(operator: Page, stage: Any, bus: AnsweringBus) -> None:
    operator.goto("/operator/live")
    stage.play()
    expect(operator.get_by_role("heading", name="worker-1")).to_be_visible()

    assert operator.get_by_role("button", name="Drain …").count() == 0
    assert bus.sent == []
