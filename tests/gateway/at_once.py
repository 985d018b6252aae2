"""Several who do the same at once, each in a thread with database connections of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from django.db import connections
from django.test import Client

NUMBER = 3
LONGEST_S = 20
KEPT_BACK_S = 1


def at_once(deed: Callable[[int], Any], number_of_them: int = NUMBER) -> list[Any]:
    """What each of them is answered; ``deed`` is told which of them does it."""

    def alone(number: int) -> Any:
        try:
            return deed(number)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(number_of_them) as senders:
        return list(senders.map(alone, range(number_of_them)))


def sender(browser: Client) -> Client:
    """Another tab of a browser; what goes wrong is answered there, not raised here."""
    client = Client(raise_request_exception=False)
    client.cookies = browser.cookies
    return client


def overlap_behind(patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """The first to pass this check waits for the others to pass it too, and goes on alone where something keeps them
    back.
    """
    check, meeting = getattr(owner, name), threading.Barrier(NUMBER)

    def checked(*args: Any, **kwargs: Any) -> Any:
        found = check(*args, **kwargs)
        with suppress(threading.BrokenBarrierError):
            meeting.wait(KEPT_BACK_S)
        return found

    patch.setattr(owner, name, checked)


def meet_behind(patch: pytest.MonkeyPatch, owner: Any, name: str, times: int = 1) -> None:
    """All three have passed this check, as often as each makes it, before one of them goes on to write."""
    check, meeting, mine = getattr(owner, name), threading.Barrier(NUMBER), threading.local()

    def checked(*args: Any, **kwargs: Any) -> Any:
        found = check(*args, **kwargs)
        mine.times = getattr(mine, "times", 0) + 1
        if mine.times <= times:
            meeting.wait(LONGEST_S)
        return found

    patch.setattr(owner, name, checked)
