"""Copies on streams that are as late as they may be: each does its work only when somebody waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from gpu_worker.device.host_copies import HostCopies
from gpu_worker.kernels.cpu import CpuKernels
from gpu_worker.kernels.layout import PoolShape
from scheduler_engine.plan import BlockCopy
from scheduler_engine.request import RequestId

SHAPE = PoolShape(num_layers=2, block_size=4, num_heads=2, num_kv_heads=1, head_dim=4)


@dataclass
class LateStream:
    """Always: work runs in its order, and none of it before an event behind it is waited for."""

    todo: list[Callable[[], object]] = field(default_factory=list)
    num_done: int = 0

    def run(self, work: Callable[[], object]) -> None:
        self.todo.append(work)

    def record(self) -> LateEvent:
        return LateEvent(self, len(self.todo))

    def wait_for(self, event: LateEvent) -> None:
        self.todo.append(event.wait)

    def run_until(self, position: int) -> None:
        while self.num_done < position:
            self.num_done += 1
            self.todo[self.num_done - 1]()


@dataclass(frozen=True)
class LateEvent:
    stream: LateStream
    position: int

    def wait(self) -> None:
        self.stream.run_until(self.position)


class NowStream:
    """Always: up to date; what it waits for has happened when it goes on."""

    def run(self, work: Callable[[], object]) -> None:
        work()

    def record(self) -> LateEvent:
        return LateEvent(LateStream(), 0)

    def wait_for(self, event: LateEvent) -> None:
        event.wait()


@dataclass
class World:
    """Two pools, streams that are late, and a computation that spoils device blocks as soon as it may."""

    num_slots: int = 3
    pool: torch.Tensor = field(default_factory=lambda: torch.randn(8, *SHAPE.of_block))
    host: torch.Tensor = field(default_factory=lambda: torch.full((8, *SHAPE.of_block), torch.nan))
    compute: LateStream = field(default_factory=LateStream)
    out: LateStream = field(default_factory=LateStream)
    into: LateStream = field(default_factory=LateStream)

    def __post_init__(self) -> None:
        self.copies = HostCopies(
            self.pool,
            self.host,
            CpuKernels(SHAPE),
            num_slots=self.num_slots,
            compute=self.compute,
            out=self.out,
            into=self.into,
        )

    def spoil(self, *blocks: int) -> None:
        for block in blocks:
            self.compute.run(partial(self.pool[block].fill_, -1.0))

    def read(self, block: int) -> torch.Tensor:
        """As the computation would see it now."""
        self.compute.record().wait()
        return self.pool[block].clone()


def pairs(device: Sequence[int], host: Sequence[int]) -> list[BlockCopy]:
    return [BlockCopy(RequestId("bulk"), block, place) for block, place in zip(device, host, strict=True)]


def test_a_block_may_be_written_again_as_soon_as_its_copy_was_asked_for() -> None:
    world = World()
    before = world.pool.clone()
    world.copies.swap_out(pairs([2, 5], [0, 7]))
    world.spoil(2, 5)
    world.compute.record().wait()  # the computation is far ahead of the bus
    world.copies.finish()
    assert torch.equal(world.host[[0, 7]], before[[2, 5]])
    assert (world.pool[[2, 5]] == -1.0).all()


def test_a_block_comes_back_though_its_way_out_has_not_begun() -> None:
    world = World()
    before = world.pool.clone()
    world.copies.swap_out(pairs([2], [4]))
    world.spoil(2)
    world.copies.swap_in(pairs([6], [4]))
    assert torch.equal(world.read(6), before[2])


@pytest.mark.parametrize("num_slots", [1, 2, 3, 8])
def test_more_blocks_than_staging_slots_all_arrive(num_slots: int) -> None:
    world = World(num_slots)
    before = world.pool.clone()
    world.copies.swap_out(pairs(range(8), [3, 1, 4, 0, 5, 2, 7, 6]))
    world.spoil(*range(8))
    world.copies.swap_in(pairs(range(8), [3, 1, 4, 0, 5, 2, 7, 6]))
    assert torch.equal(torch.stack([world.read(block) for block in range(8)]), before)


def test_a_host_block_that_is_used_again_gives_back_what_was_sent_last() -> None:
    world = World()
    before = world.pool.clone()
    world.copies.swap_out(pairs([0], [1]))
    world.copies.swap_in(pairs([7], [1]))
    world.copies.swap_out(pairs([3], [1]))
    world.copies.swap_in(pairs([6], [1]))
    assert torch.equal(world.read(7), before[0])
    assert torch.equal(world.read(6), before[3])


def test_through_many_random_copies_every_block_keeps_its_bytes() -> None:
    world, random = World(2), torch.Generator().manual_seed(3)
    on_device, on_host = {block: world.pool[block].clone() for block in range(8)}, {}
    for _ in range(60):
        block, place = (int(torch.randint(8, (1,), generator=random)) for _ in range(2))
        if block in on_device:
            world.copies.swap_out(pairs([block], [place]))
            on_host[place] = on_device.pop(block)
            world.spoil(block)
        elif place in on_host:
            world.copies.swap_in(pairs([block], [place]))
            on_device[block] = on_host.pop(place)
    assert len(on_device) < 8
    assert all(torch.equal(world.read(block), expected) for block, expected in on_device.items())
    world.copies.finish()
    assert all(torch.equal(world.host[place], expected) for place, expected in on_host.items())
