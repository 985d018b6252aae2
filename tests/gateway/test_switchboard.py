"""What an operator says to a worker, and the answers."""

from __future__ import annotations

import asyncio

import pytest

from gateway.console.switchboard import MOST_WAITING, Switchboard
from wire.bus import BusError
from wire.memory_bus import MemoryGatewayBus, MemoryHub
from wire.messages import Drain, Explain, Explained


def connected() -> tuple[Switchboard, MemoryHub]:
    hub = MemoryHub(lambda: 0)
    switchboard = Switchboard()
    bus: MemoryGatewayBus = hub.gateway("g1")
    switchboard.connect(bus)
    return switchboard, hub


async def test_a_question_is_answered_by_the_worker_it_was_sent_to() -> None:
    switchboard, hub = connected()
    asked = asyncio.create_task(switchboard.explain("w1", "r1"))
    await asyncio.sleep(0)
    answer = Explained(response_id="r1", choice=0, is_known=True, sentence="waited 4 ms")
    switchboard.hear(answer)

    assert await asked == answer
    assert list(hub.inboxes["w1"]) == [Explain(gateway_id="g1", response_id="r1")]


async def test_a_worker_that_does_not_answer_is_waited_for_no_longer_than_the_limit() -> None:
    switchboard, _ = connected()

    assert await switchboard.explain("w1", "r1", limit_s=0.01) is None
    switchboard.hear(Explained(response_id="r1", choice=0, is_known=True))  # late: nobody is there


async def test_two_who_ask_the_same_both_hear_the_answer() -> None:
    switchboard, _ = connected()
    both = [asyncio.create_task(switchboard.explain("w1", "r1")) for _ in range(2)]
    await asyncio.sleep(0)
    switchboard.hear(Explained(response_id="r1", choice=0, is_known=False))

    assert [found.is_known for found in await asyncio.gather(*both) if found] == [False, False]


async def test_open_questions_are_bounded() -> None:
    switchboard, _ = connected()
    tasks = [asyncio.create_task(switchboard.explain("w1", f"r{number}", limit_s=9)) for number in range(MOST_WAITING)]
    await asyncio.sleep(0)

    with pytest.raises(BusError, match="too many questions"):
        await switchboard.explain("w1", "one more")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await switchboard.explain("w1", "later", limit_s=0.01) is None


async def test_a_drain_is_sent_for_the_epoch_that_was_seen() -> None:
    switchboard, hub = connected()
    await switchboard.drain("w1", 7, "ops")

    assert list(hub.inboxes["w1"]) == [Drain(worker_epoch=7, actor="ops")]


async def test_without_a_bus_nothing_is_asked() -> None:
    with pytest.raises(BusError):
        await Switchboard().explain("w1", "r1")
