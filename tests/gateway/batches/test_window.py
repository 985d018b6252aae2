"""The window: as many lines under way as workers can use, tenants in turn, nobody above their cap."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from gateway.batches.window import ROWS_PER_SLOT, Window
from scheduler_engine.policy import PriorityClass
from tests.loads import quiet_class, quiet_load
from wire.messages import LoadSnapshot

SLOTS = 4


def load(num_waiting: int = 0, closed: bool = False, **changes: Any) -> LoadSnapshot:
    row = quiet_class(PriorityClass.BATCH, num_waiting=num_waiting, closed=closed)
    return quiet_load(**{"num_slots": SLOTS, "num_free_slots": SLOTS, "classes": (row,), **changes})


class World:
    """A window over loads and caps that a test sets, and those who have taken a place, in order."""

    def __init__(self) -> None:
        self.loads: list[LoadSnapshot] = [load()]
        self.caps: dict[str, int] = {}
        self.now_s = 0.0
        self.let_in: list[str] = []
        self.window = Window(lambda: self.loads, self.caps.get, lambda: self.now_s)
        self._tasks: set[asyncio.Task[None]] = set()

    async def ask(self, tenant_id: str, count: int = 1) -> None:
        for _ in range(count):
            self._tasks.add(asyncio.create_task(self._take(tenant_id)))
        await self.settle()

    async def _take(self, tenant_id: str) -> None:
        await self.window.take(tenant_id)
        self.let_in.append(tenant_id)

    async def refresh(self, *loads: LoadSnapshot) -> None:
        self.loads = list(loads)
        self.window.look()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@pytest.fixture
async def world() -> Any:
    world = World()
    yield world
    await world.close()


async def test_between_two_snapshots_no_more_start_than_there_are_slots(world: World) -> None:
    await world.ask("bulk", 100)
    assert len(world.let_in) == SLOTS
    await world.refresh(load())
    assert len(world.let_in) == ROWS_PER_SLOT * SLOTS
    await world.refresh(load())
    assert len(world.let_in) == ROWS_PER_SLOT * SLOTS


async def test_nothing_starts_while_as_many_wait_as_could_run(world: World) -> None:
    await world.refresh(load(num_waiting=SLOTS))
    await world.ask("bulk", 10)
    assert not world.let_in
    await world.refresh(load(num_waiting=SLOTS - 1))
    assert len(world.let_in) == 1


@pytest.mark.parametrize("loads", [[], [load(closed=True)], [load(ready=False)], [load(draining=True)]])
async def test_without_an_open_worker_everybody_waits(world: World, loads: list[LoadSnapshot]) -> None:
    await world.refresh(*loads)
    await world.ask("bulk", 10)
    assert not world.let_in
    await world.refresh(load())
    assert len(world.let_in) == SLOTS


async def test_a_place_that_is_given_back_goes_to_the_next(world: World) -> None:
    await world.ask("bulk", 100)
    await world.refresh(load())
    await world.refresh(load())
    world.window.give("bulk")
    await world.settle()
    assert len(world.let_in) == ROWS_PER_SLOT * SLOTS + 1


async def test_tenants_take_turns_however_long_one_queues(world: World) -> None:
    await world.refresh()
    await world.ask("bulk", 50)
    await world.ask("aurora", 2)
    await world.refresh(load())
    assert Counter(world.let_in) == {"bulk": 2, "aurora": 2}


async def test_nobody_goes_above_its_cap_and_nobody_waits_for_it(world: World) -> None:
    world.caps["bulk"] = 1
    await world.ask("bulk", 5)
    await world.ask("aurora", 1)
    assert sorted(world.let_in) == ["aurora", "bulk"]


async def test_who_was_told_to_come_later_comes_later_and_the_others_do_not_wait_for_it(world: World) -> None:
    world.window.pause("bulk", 5.0)
    await world.ask("bulk", 2)
    await world.ask("aurora", 1)
    assert world.let_in == ["aurora"]
    world.now_s = 5.0
    world.window.look()
    await world.settle()
    assert Counter(world.let_in) == {"bulk": 2, "aurora": 1}


async def test_who_gives_up_waiting_leaves_no_place_taken(world: World) -> None:
    await world.refresh()
    await world.ask("bulk", 3)
    await world.close()
    await world.refresh(load())
    assert (world.let_in, world.window.num_under_way) == ([], 0)
