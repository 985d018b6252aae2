"""The lanes of /operator/live in a real browser: bars, gaps, and who is next in a lane."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.live_rows import BATCH, INTERACTIVE, row


def spans(page: Page, response_id: str) -> list[str]:
    """The states of a request's bars, from left to right."""
    bars = page.locator(f'.lane-plot g[data-response="{response_id}"]')
    return [bars.nth(index).get_attribute("data-state") or "" for index in range(bars.count())]


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


def test_the_lanes_can_be_read_as_a_table_by_keyboard(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play(board=(row("victim", BATCH, "on_host"),))
    summary = operator.get_by_text("Requests on the device or suspended")
    summary.focus()
    operator.keyboard.press("Enter")

    cells = operator.locator(".requests tbody tr").get_by_role("cell")
    expect(cells).to_have_text(["victim", "bulk", "batch", "on the host", "20", "300", "44"])
