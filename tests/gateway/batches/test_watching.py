"""A batch is never driven unwatched: where its watch fails, the drive breaks off and the next owner comes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import InterfaceError, OperationalError

from gateway.auth import KeyStoreDown
from gateway.batches import driving
from gateway.batches.driving import Drive
from gateway.fates import NeverSeen
from wire.bus import BusError


class Threads:
    """Database work without a database."""

    async def run(self, work: Callable[[], Any]) -> Any:
        return work()


def drive(monkeypatch: pytest.MonkeyPatch, **errors: Exception) -> Drive:
    """One whose watch meets these errors, by what it asks."""

    def ask(what: str, answer: Any) -> Callable[..., Any]:
        def asked(*_: object) -> Any:
            if what in errors:
                raise errors[what]
            return answer

        return asked

    async def is_open(_: str) -> bool:
        return bool(ask("key", True)())

    monkeypatch.setattr(driving.leases, "renew", ask("lease", "in_progress"))
    monkeypatch.setattr(driving.leases, "has_class", ask("class", True))
    runtime = SimpleNamespace(keys=SimpleNamespace(is_open=is_open))
    lease: Any = SimpleNamespace(
        batch_id="b", claimed_up_to=0, key_id="k", key_public_id="p", tenant_id="t", project_id="j", expires_at=1
    )
    means: Any = SimpleNamespace(runtime=runtime, threads=Threads(), now=lambda: 0)
    return Drive(lease, means)


@pytest.mark.parametrize("asked", ["lease", "class", "key"])
@pytest.mark.parametrize("error", [RuntimeError("not thought of"), OSError("reset")], ids=lambda error: str(error))
async def test_whatever_ends_the_watch_breaks_the_drive_off(
    asked: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = drive(monkeypatch, **{asked: error})
    await found._watch()
    assert found._ending.exception() is error


async def test_while_nobody_can_say_whether_the_key_is_open_the_batch_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = drive(monkeypatch, key=KeyStoreDown("no answer"))

    async def paused(_: float) -> None:
        found._end(driving.Ending("completed"))  # so that the watch ends

    monkeypatch.setattr(driving.asyncio, "sleep", paused)
    await found._watch()
    assert found._ending.result().outcome == "completed"


@pytest.mark.parametrize("error", [BusError, OperationalError, InterfaceError])
async def test_while_nobody_can_say_what_became_of_a_line_it_waits_and_the_batch_goes_on(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Any] = [error("away"), NeverSeen()]

    async def of(*_: object) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def paused(_: float) -> None:
        """No test waits."""

    found = drive(monkeypatch)
    means: Any = found._means
    means.fates = SimpleNamespace(of=of)
    monkeypatch.setattr(driving.ids, "response_id", lambda *_: "r")
    monkeypatch.setattr(driving.asyncio, "sleep", paused)
    line: Any = SimpleNamespace(number=1, num_tries=0)
    assert await found._last_try(line) is None
    assert answers == []
