"""Reservations that nobody can end any more are released, never charged, and never too early."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from billing import ledger
from billing.models import UsageRequest
from gateway.gate import Record
from gateway.orphans import OrphanSweep
from wire.messages import Released


class FakeGate:
    """Records and heartbeats as a test puts them."""

    def __init__(self) -> None:
        self.states: dict[str, Record] = {}
        self.alive: set[str] = set()
        self.ended: list[Released] = []

    def records(self, response_ids: Sequence[str]) -> Mapping[str, Record]:
        return {name: record for name, record in self.states.items() if name in response_ids}

    def live_gateways(self, gateway_ids: Sequence[str]) -> frozenset[str]:
        return frozenset(self.alive.intersection(gateway_ids))

    def end(self, released: Released) -> None:
        self.ended.append(released)


class Scene:
    """One operation, reserved long ago, and a sweep whose clock the test moves."""

    def __init__(self, world: Any) -> None:
        ledger.apply([world.reserve(1)])
        self.operation_id = str(world.operation_id(1))
        self.gate = FakeGate()
        self.now_s = 0.0
        self.reserved_ago = timedelta(hours=1)
        self.sweep = OrphanSweep(
            self.gate, clock_s=lambda: self.now_s, now=lambda: timezone.now() + self.reserved_ago, grace_s=60.0
        )

    def look(self, at_s: float) -> int:
        self.now_s = at_s
        return self.sweep.run()

    @property
    def state(self) -> str:
        return UsageRequest.objects.get().state


@pytest.fixture
def scene(world: Any) -> Scene:
    return Scene(world)


def test_an_operation_whose_record_is_gone_expires_after_the_grace_through_the_stream(scene: Scene) -> None:
    assert [scene.look(at_s) for at_s in (0.0, 59.0, 60.0)] == [0, 0, 1]
    assert [(ended.response_id, ended.reason) for ended in scene.gate.ended] == [(scene.operation_id, "expired")]
    assert scene.state == "open"  # until the stream tells of it


def test_an_operation_whose_gateway_is_dead_is_ended_in_redis_first(scene: Scene) -> None:
    scene.gate.states[scene.operation_id] = Record("open", "gateway-1")
    assert [scene.look(at_s) for at_s in (0.0, 60.0)] == [0, 1]
    assert [(ended.response_id, ended.reason) for ended in scene.gate.ended] == [(scene.operation_id, "expired")]
    assert scene.state == "open"  # until the stream tells of it


def test_a_gateway_that_comes_back_in_time_keeps_its_operation(scene: Scene) -> None:
    scene.gate.states[scene.operation_id] = Record("open", "gateway-1")
    scene.look(0.0)
    scene.gate.alive = {"gateway-1"}
    scene.look(30.0)
    scene.gate.alive = set()
    assert [scene.look(at_s) for at_s in (61.0, 120.0, 121.0)] == [0, 0, 1]


def test_a_record_that_is_done_is_left_to_the_stream(scene: Scene) -> None:
    scene.gate.states[scene.operation_id] = Record("done", "gateway-1")
    assert [scene.look(at_s) for at_s in (0.0, 1_000.0)] == [0, 0]
    assert scene.state == "open"


def test_a_young_operation_is_not_looked_at(scene: Scene) -> None:
    scene.reserved_ago = timedelta(seconds=5)
    assert [scene.look(at_s) for at_s in (0.0, 1_000.0)] == [0, 0]


def test_an_operation_that_has_ended_is_no_orphan(scene: Scene, world: Any) -> None:
    scene.look(0.0)
    ledger.apply([world.usage(1)])
    assert scene.look(100.0) == 0
    assert scene.state == "completed"
