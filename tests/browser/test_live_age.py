"""Old news is shown as old on /operator/live: silent workers, dead sockets, ended sessions, a frozen picture."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Page, expect


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


def test_the_picture_can_be_frozen_and_goes_on(operator: Page, stage: Any) -> None:
    operator.goto("/operator/live")
    stage.play(num_free_slots=5)
    expect(operator.locator('[data-field="slots"]')).to_have_text("11 / 16")
    operator.get_by_role("button", name="Freeze").press("Space")
    expect(operator.get_by_role("status")).to_have_text("Frozen")
    stage.play(num_free_slots=16)
    operator.wait_for_timeout(400)
    expect(operator.locator('[data-field="slots"]')).to_have_text("11 / 16")
    operator.get_by_role("button", name="Freeze").press("Space")

    expect(operator.locator('[data-field="slots"]')).to_have_text("0 / 16")
