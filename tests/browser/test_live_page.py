"""What an operator sees on /operator/live, in a real browser. A console that complains fails the test (``page``)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from scheduler_engine.policy import PriorityClass
from wire.messages import HISTOGRAM_BOUNDS_MS, BoardRow, ClassSnapshot, Histogram

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


def test_the_numbers_of_a_class_stand_in_the_table(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    counted = Histogram(counts=tuple(10 if bound == 300 else 0 for bound in (*HISTOGRAM_BOUNDS_MS, 0)), sum_us=0)
    stage.play(
        classes=classes(
            stage,
            BATCH,
            num_waiting=61,
            num_running=7,
            num_suspended=3,
            ttft=counted,
            preemptions=(("hold", "slots", 5), ("swap", "memory", 2)),
            shed=(("late", 4),),
        )
    )

    cells = operator.get_by_role("row", name=re.compile("^B ?batch")).get_by_role("cell")
    expect(cells).to_have_text(
        ["61", "7", "3", A_RATE, NONE, "250 ms / 300 ms", "5 · 2 · 0slots 5, memory 2", "4late 4"]
    )


def test_a_closed_class_is_said_to_be_closed(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play(classes=classes(stage, BATCH, num_waiting=900, closed=True))

    expect(operator.get_by_role("row", name=re.compile("^B ?batch")).get_by_role("cell").first).to_have_text(
        "900 · closed"
    )


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
    page.get_by_label("Username").fill("ops")
    page.get_by_label("Password").fill("a long enough one")
    page.get_by_role("button", name="Log in").click()

    expect(page.get_by_role("status")).to_have_text("Live")
    page.get_by_role("link", name="Admin").click()
    expect(page.get_by_role("heading", name="Tenants, policy and books")).to_be_visible()


def test_the_front_page_has_a_call_to_copy(page: Page, site: str) -> None:
    page.goto("/")

    expect(page.get_by_role("heading", name="First call")).to_be_visible()
    expect(page.locator("pre").first).to_contain_text(f"curl {site}/v1/chat/completions")
