"""What an operator sees on /operator/live, in a real browser. A console that complains fails the test (``page``)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from gateway.console.switchboard import switchboard
from gateway.loads import books
from scheduler_engine.policy import PriorityClass
from wire.messages import (
    HISTOGRAM_BOUNDS_MS,
    BoardRow,
    ClassSnapshot,
    Drain,
    Explain,
    Explained,
    Histogram,
    PolicyNews,
    TenantSnapshot,
)

INTERACTIVE, DEFAULT, BATCH = PriorityClass
A_RATE = re.compile("^(\\d+[.]\\d|\u2013)$")
NONE = "\u2013"  # how the page writes that nothing was counted


def row(response_id: str, priority_class: PriorityClass, state: str, tenant_id: str = "bulk") -> BoardRow:
    return BoardRow(
        response_id=response_id,
        tenant_id=tenant_id,
        priority_class=priority_class,
        state=state,
        num_blocks=20,
        num_computed_tokens=300,
        num_output_tokens=44,
    )


def classes(stage: Any, priority_class: PriorityClass, **changes: Any) -> tuple[ClassSnapshot, ...]:
    return tuple(
        replace(each, **changes) if each.priority_class is priority_class else each for each in stage.now.classes
    )


def spans(page: Page, response_id: str) -> list[str]:
    """The states of a request's bars, from left to right."""
    bars = page.locator(f'.lane-plot g[data-response="{response_id}"]')
    return [bars.nth(index).get_attribute("data-state") or "" for index in range(bars.count())]


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


def test_an_idle_worker_says_that_nobody_is_there(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play()

    expect(operator.get_by_text("Nobody is on the device.")).to_be_visible()
    expect(operator.locator('[data-field="step_age"]')).to_contain_text("idle")


def test_each_request_is_a_bar_of_its_class(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play(board=(row("chat", INTERACTIVE, "decode", "aurora"), row("batch-1", BATCH, "decode")))

    expect(operator.locator('.lane-plot g.interactive[data-response="chat"] rect.decode')).to_have_count(1)
    expect(operator.locator('.lane-plot g.batch[data-response="batch-1"] rect.decode')).to_have_count(1)
    expect(operator.locator(".lane-plot text.letter")).to_have_text(["I", "B"])


@pytest.mark.parametrize("gap", ["held", "on_host", "dropped"])
def test_a_preempted_request_leaves_a_gap_and_comes_back_into_its_lane(operator: Page, stage: Any, gap: str) -> None:
    operator.goto("/operator/live")
    stage.play(board=(row("victim", BATCH, "decode"),))
    expect(operator.locator(".lane-plot rect.decode")).to_have_count(1)

    stage.play(board=(row("chat", INTERACTIVE, "prefill", "aurora"), row("victim", BATCH, gap)))
    expect(operator.locator(f".lane-plot g.batch line.{gap}")).to_have_count(1)
    stage.play(board=(row("victim", BATCH, "decode"),))
    expect(operator.locator('.lane-plot g[data-response="victim"]')).to_have_count(3)

    assert spans(operator, "victim") == ["decode", gap, "decode"]
    boxes = [operator.locator(f'.lane-plot g[data-response="victim"] >> nth={i}').bounding_box() for i in range(3)]
    middles = {round(box["y"] + box["height"] / 2) for box in boxes if box}
    assert len(middles) == 1
    heights = [box["height"] for box in boxes if box]
    assert heights[1] < heights[0] / 2


def test_a_lane_is_the_next_requests_when_the_first_has_ended(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play(board=(row("first", BATCH, "decode"),))
    expect(operator.locator('.lane-plot g[data-response="first"]')).to_have_count(1)
    stage.play(board=())
    expect(operator.locator('[data-field="num_requests"]')).to_have_text("0")
    stage.play(board=(row("second", BATCH, "decode"),))
    expect(operator.locator('.lane-plot g[data-response="second"]')).to_have_count(1)

    tops = {
        operator.locator(f'.lane-plot g[data-response="{each}"] rect').get_attribute("y")
        for each in ("first", "second")
    }
    assert len(tops) == 1


def histogram(count: int, bound_ms: int) -> Histogram:
    return Histogram(counts=tuple(count if bound == bound_ms else 0 for bound in (*HISTOGRAM_BOUNDS_MS, 0)), sum_us=0)


def cells_of(page: Page, table: str, name: str) -> Any:
    return page.locator(f"table.{table}").get_by_role("row", name=re.compile(name)).get_by_role("cell")


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
            ttft_target_us=295_000,
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
            "250 ms · \u25b2 300 ms · \u25b2 300 msp95, p99 over the target of 295 ms",
            "37 ms · 50 ms · 50 mstarget 50 ms",
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
        "worker worker-1",
        "Drained, epoch 1.",
    )


def test_who_may_not_change_quotas_drains_nobody(operator: Page, stage: Any, bus: AnsweringBus) -> None:
    operator.goto("/operator/live")
    stage.play()
    expect(operator.get_by_role("heading", name="worker-1")).to_be_visible()

    assert operator.get_by_role("button", name="Drain …").count() == 0
    assert bus.sent == []


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


def test_the_lanes_can_be_read_as_a_table_by_keyboard(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play(board=(row("victim", BATCH, "on_host"),))
    summary = operator.get_by_text("Requests on the device or suspended")
    summary.focus()
    operator.keyboard.press("Enter")

    cells = operator.locator(".requests tbody tr").get_by_role("cell")
    expect(cells).to_have_text(["victim", "bulk", "batch", "on the host", "20", "300", "44"])


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


def test_a_silent_worker_is_shown_as_old_with_its_last_numbers(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.is_repeating = False
    stage.play(num_free_blocks=100)

    expect(operator.locator(".worker")).to_have_class(re.compile("is-old"))
    expect(operator.locator('[data-field="state"]')).to_contain_text("silent for")
    expect(operator.locator("#notice")).to_contain_text("Silent: worker-1")
    expect(operator.locator('[data-field="device"]')).to_have_text("412 / 512")


def test_a_worker_that_speaks_again_is_young_again(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.is_repeating = False
    stage.play()
    expect(operator.locator(".worker")).to_have_class(re.compile("is-old"))
    stage.is_repeating = True
    stage.play()

    expect(operator.locator('[data-field="state"]')).to_have_text("ready")
    expect(operator.locator("#notice")).to_be_hidden()
    expect(operator.locator(".worker")).not_to_have_class(re.compile("is-old"))


def test_an_open_socket_over_which_nothing_comes_is_stale(operator: Page, stage: Any) -> None:
    """Half open, as after a sleep: the browser's own clock says so, without a word from the server."""
    operator.clock.install()
    operator.route_web_socket("**/operator/live/stream", lambda socket: half_open(socket))
    operator.goto("/operator/live")
    expect(operator.get_by_role("status")).to_have_text("Live")
    operator.clock.run_for(4_000)

    expect(operator.get_by_role("status")).to_have_text("Stale")
    expect(operator.locator("#notice")).to_contain_text("nothing has come over it")
    expect(operator.locator("#notice")).to_contain_text("from 4.0 s ago")


def half_open(socket: Any) -> None:
    socket.send('{"at_ms": 1, "bus_up": true, "workers": []}')


def test_a_lost_connection_is_said_and_mended(operator: Page, stage: Any) -> None:
    operator.clock.install()
    sockets: list[Any] = []
    operator.route_web_socket("**/operator/live/stream", lambda socket: (half_open(socket), sockets.append(socket)))
    operator.goto("/operator/live")
    expect(operator.get_by_role("status")).to_have_text("Live")
    sockets[0].close(code=1001)

    expect(operator.get_by_role("status")).to_have_text("Disconnected")
    expect(operator.locator("#notice")).to_contain_text("Trying again in 1 s")
    operator.clock.run_for(2_000)
    expect(operator.get_by_role("status")).to_have_text("Live")
    assert len(sockets) == 2


def test_an_operator_who_was_signed_out_is_told_to_sign_in(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    expect(operator.get_by_role("status")).to_have_text("Live")
    operator.context.clear_cookies()
    operator.route_web_socket("**/operator/live/stream", lambda socket: socket.close(code=4401))
    operator.reload()

    expect(operator.get_by_label("Password")).to_be_visible()


def test_a_session_that_ends_under_an_open_page_is_said(operator: Page, stage: Any) -> None:
    operator.route_web_socket("**/operator/live/stream", lambda socket: socket.close(code=4401))
    operator.goto("/operator/live")

    expect(operator.get_by_role("status")).to_have_text("Signed out")
    expect(operator.locator("#notice")).to_contain_text("Reload this page to sign in")


def test_the_picture_can_be_paused_and_goes_on(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play(num_free_slots=5)
    expect(operator.locator('[data-field="slots"]')).to_have_text("11 / 16")
    operator.get_by_role("button", name="Pause").press("Space")
    expect(operator.get_by_role("status")).to_have_text("Paused")
    stage.play(num_free_slots=16)
    operator.wait_for_timeout(400)
    expect(operator.locator('[data-field="slots"]')).to_have_text("11 / 16")
    operator.get_by_role("button", name="Pause").press("Space")

    expect(operator.locator('[data-field="slots"]')).to_have_text("0 / 16")


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
    expect(page.locator("pre").first).to_contain_text(f"curl {site}/v1/chat/completions")
