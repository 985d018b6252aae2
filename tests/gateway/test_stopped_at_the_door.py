"""A caller that is stopped anywhere on its way through the door leaves nothing behind: no slot, no money, no row."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from gateway.admission import Denied
from gateway.asking import Ask, Plain
from gateway.auth import Caller
from gateway.door import Door, Keep
from scheduler_engine.policy import PriorityClass

CALLER = Caller("key-aurora", "public", "aurora", "project-aurora", PriorityClass.DEFAULT)


class Gates:
    """Passes every call on, and stands still where told to: before a call, or after it."""

    def __init__(self, behind: Any, stop_at: str) -> None:
        self._behind = behind
        self._stop_at = stop_at
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._behind, name)
        if not asyncio.iscoroutinefunction(found) or name != self._stop_at.partition(" ")[2]:
            return found

        async def gated(*arguments: Any) -> Any:
            if self._stop_at.startswith("before"):
                await self._wait()
                return await found(*arguments)
            answer = await found(*arguments)
            await self._wait()
            return answer

        return gated

    async def _wait(self) -> None:
        self.reached.set()
        await self.go_on.wait()


def gated_door(world: Any, part: str, stop_at: str) -> tuple[Door, Gates]:
    """A door of the world's gateway with a gate in one of its parts."""
    runtime = world.runtime
    parts = {"bus": runtime.bus, "admission": runtime.admission, "ownership": runtime.ownership}
    gates = parts[part] = Gates(parts[part], stop_at)
    door = Door(
        streams=runtime.streams,
        texts=runtime.door.texts,
        policy=runtime.policy,
        loads=lambda: runtime.loads,
        **parts,
    )
    return door, gates


def ask() -> Ask:
    return Ask(model="simulated", prompt=Plain("Hi"), source="rest", received_at_s=time.monotonic(), max_tokens=400)


POINTS = [
    ("admission", "before admit"),
    ("admission", "after admit"),
    ("ownership", "before keep"),
    ("ownership", "after keep"),
    ("bus", "before send"),
    ("bus", "after send"),
]


@pytest.mark.parametrize("is_background", [False, True], ids=["read", "background"])
@pytest.mark.parametrize(("part", "stop_at"), POINTS, ids=[stop_at for _, stop_at in POINTS])
async def test_a_caller_stopped_at_any_await_of_the_door_holds_nothing_afterwards(
    world: Any, part: str, stop_at: str, is_background: bool
) -> None:
    world.worker.script.answer = b"x" * 400
    world.worker.step_s = 0.02
    door, gates = gated_door(world, part, stop_at)
    entering = asyncio.create_task(door.enter(CALLER, [ask()], Keep(b"{}", 0, is_background=is_background)))
    await asyncio.wait_for(gates.reached.wait(), 5)
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    gates.go_on.set()
    await world.until(lambda: _has_ended(world))
    assert world.slots_in_use() == 0
    assert world.money("aurora", "default")["open"] == 0
    assert len(world.runtime.streams) == 0
    assert max(world.worker.generated.values(), default=0) < 100  # not to its end


async def test_a_line_of_a_batch_that_is_stopped_at_the_door_is_not_charged(world: Any) -> None:
    door, gates = gated_door(world, "bus", "after send")
    world.worker.script.answer = b"x" * 400
    world.worker.step_s = 0.02
    entering = asyncio.create_task(door.enter(CALLER, [ask()], if_stopped="expired"))
    await asyncio.wait_for(gates.reached.wait(), 5)
    entering.cancel()
    gates.go_on.set()
    await world.until(lambda: _has_ended(world))
    assert {cancel.reason for _, cancel in world.worker.cancels} == {"expired"}


async def test_a_door_that_closes_while_somebody_is_half_way_in_ends_that_one_too(world: Any) -> None:
    door, gates = gated_door(world, "admission", "after admit")
    world.worker.script.hang = True
    entering = asyncio.create_task(door.enter(CALLER, [ask()]))
    await asyncio.wait_for(gates.reached.wait(), 5)
    closing = asyncio.create_task(door.close())
    await asyncio.sleep(0)
    gates.go_on.set()
    entered = await entering
    await asyncio.wait_for(closing, 5)
    assert not isinstance(entered, Denied)
    assert entered[0].stream.end is not None
    await world.until(lambda: bool(world.worker.cancels))


def _has_ended(world: Any) -> bool:
    """One was let in, and its record says that it is over."""
    records = list(world.redis.scan_iter(f"{world.redis_keys.prefix}response:*"))
    return [world.redis.hget(record, "state") for record in records] == [b"done"] and len(world.runtime.streams) == 0
