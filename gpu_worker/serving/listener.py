"""The worker's ear: receives input, tells the heartbeat, watches for lost gateways and for a step that hangs.

Runs on a thread of its own; whatever it learns goes into the loop's inbox, in order.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpu_worker.clock import Clock
from gpu_worker.serving.outage import Outage, say, stacks
from wire.bus import BadEntry, BusError, Fenced, WorkerBus
from wire.messages import LoadSnapshot, ToWorker

LOAD_INTERVAL_US = 150_000  # a board shows a step within 300 ms: this, and the waits of listener, feed and page
LOOK_US = 50_000
GATEWAY_CHECK_INTERVAL_US = 1_000_000
WATCHDOG_US = 30_000_000


@dataclass(frozen=True, slots=True)
class Arrived:
    message: ToWorker
    at_us: int


@dataclass(frozen=True, slots=True)
class LiveGateways:
    gateway_ids: frozenset[str]


@dataclass(frozen=True, slots=True)
class DeafGateway:
    """Its outbox stands at its hard length: it has not read for very long."""

    gateway_id: str


@dataclass(frozen=True, slots=True)
class Wake:
    """Look at the flags again."""


Input = Arrived | LiveGateways | DeafGateway | Wake


class Pulse:
    """What the loop shows of itself to the listener. Always: written by the loop, between two steps or around one."""

    def __init__(self, load: LoadSnapshot, now_us: int, dump: Callable[[], str]) -> None:
        self.load = load
        self.dump = dump
        self.last_step_at_us = now_us
        self.step_started_at_us: int | None = None


class Listener:
    """Always: what the loop says of itself goes out at once, and again every LOAD_INTERVAL_US however long a step
    takes; it is not ready while a step hangs.
    """

    def __init__(self, bus: WorkerBus, clock: Clock, pulse: Pulse, inbox: queue.SimpleQueue[Input]) -> None:
        self._bus = bus
        self._clock = clock
        self._pulse = pulse
        self._inbox = inbox
        self._load_due_us = 0
        self._told: LoadSnapshot | None = None
        self._gateways_due_us = 0
        self._reported_step_us: int | None = None

    def listen(self, over: threading.Event) -> None:
        """Until ``over``. Raises Fenced."""
        outage = Outage("listening")
        while not over.is_set():
            try:
                self._receive()
                self._beat()
                outage.is_over()
            except Fenced:
                raise
            except BusError as error:
                over.wait(outage.pause_s(error))
            self._watch_step()

    def _receive(self) -> None:
        for message in self._bus.receive(LOOK_US / 1_000_000):
            if isinstance(message, BadEntry):
                say(f"skipped entry {message.entry_id}: {message.reason}")
            else:
                self._inbox.put(Arrived(message, self._clock.now_us()))

    def _beat(self) -> None:
        now_us = self._clock.now_us()
        load = self._pulse.load
        if load is not self._told or now_us >= self._load_due_us:
            self._load_due_us, self._told = now_us + LOAD_INTERVAL_US, load
            age_us = max(0, now_us - self._pulse.last_step_at_us)
            ready = load.ready and not self._is_hanging(now_us)
            self._bus.publish_load(replace(load, last_step_age_us=age_us, ready=ready))
        if now_us >= self._gateways_due_us:
            self._gateways_due_us = now_us + GATEWAY_CHECK_INTERVAL_US
            self._inbox.put(LiveGateways(self._bus.live_gateways()))

    def _is_hanging(self, now_us: int) -> bool:
        started_at_us = self._pulse.step_started_at_us
        return started_at_us is not None and now_us - started_at_us >= WATCHDOG_US

    def _watch_step(self) -> None:
        started_at_us = self._pulse.step_started_at_us
        if started_at_us != self._reported_step_us and self._is_hanging(self._clock.now_us()):
            self._reported_step_us = started_at_us
            say(f"a step has been running for {WATCHDOG_US // 1_000_000} s\n{self._pulse.dump()}\n{stacks()}")
