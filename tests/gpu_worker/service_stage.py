"""A worker's service on its thread, on a Bus in memory that fails as told, and one gateway that listens to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from gpu_worker.clock import MonotonicClock
from gpu_worker.executor import DeviceLost
from gpu_worker.loop import WorkerLoop
from gpu_worker.serving.service import ThreadDied, WorkerService
from gpu_worker.simulated import DEVICES, SimulatedExecutor
from scheduler_engine.plan import StepPlan, StepResult
from wire.bus import BadEntry, BusError, StepOutput
from wire.memory_bus import MemoryGatewayBus, MemoryHub, MemoryWorkerBus
from wire.messages import Finished, Rejected, Tokens, Usage

LIMIT_S = 20.0


class ShiftedClock(MonotonicClock):
    """Real time, and jumps when a test says so."""

    def __init__(self) -> None:
        self.shift_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.shift_us


class Gate:
    """Holds whoever passes while ``gate`` is closed."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()

    def pass_gate(self) -> None:
        assert self.gate.wait(LIMIT_S)


class HeldExecutor(SimulatedExecutor, Gate):
    """Waits in the middle of a step while ``gate`` is closed."""

    def __init__(self, clock: Any, scale: float) -> None:
        SimulatedExecutor.__init__(self, DEVICES["toy"], clock, scale=scale)
        Gate.__init__(self)

    def execute(self, plan: StepPlan) -> StepResult:
        self.pass_gate()
        return super().execute(plan)


class FlakyBus(MemoryWorkerBus):
    """Fails as often as told, before or after what it was asked to do."""

    failures_before = failures_after = num_deaf = num_gateway_checks = 0
    failure: BusError = BusError("gone")
    broken: Exception | None = None
    not_understood: tuple[BadEntry, ...] | list[BadEntry] = ()

    def publish(self, output: StepOutput) -> None:
        if self.failures_before:
            self.failures_before -= 1
            raise self.failure
        super().publish(output)
        if self.failures_after:
            self.failures_after -= 1
            raise BusError("the answer was lost")

    def live_gateways(self) -> frozenset[str]:
        self.num_gateway_checks += 1
        return super().live_gateways()

    def receive(self, timeout_s: float) -> Any:
        if self.broken is not None:
            raise self.broken
        if self.num_deaf:
            self.num_deaf -= 1
            raise self.failure
        bad, self.not_understood = self.not_understood, ()
        return [*bad, *super().receive(timeout_s)]


class Stage:
    """A service on its thread and one gateway that listens to it."""

    def __init__(
        self, small_worker: Any, *, max_stream_length: int = 10_000, scale: float = 0.01, executor: Any = None
    ) -> None:
        self.clock = ShiftedClock()
        self.hub = MemoryHub(self.clock.now_us, max_stream_length=max_stream_length)
        self.bus = FlakyBus(self.hub, "w1")
        self.gateway: MemoryGatewayBus = self.hub.gateway("g1")
        self.executor = executor or HeldExecutor(self.clock, scale)
        self.epochs: list[int] = []
        self.heard: list[Any] = []
        self.error: BaseException | None = None
        self.all_sent: bool | None = None
        self.service = WorkerService(
            bus=self.bus,
            make_loop=lambda epoch: self.make_loop(small_worker, epoch),
            clock=self.clock,
            drain_limit_s=LIMIT_S,
            on_ready=self.epochs.append,
        )
        self.thread = threading.Thread(target=self._run)

    def make_loop(self, small_worker: Any, epoch: int) -> WorkerLoop:
        loop: WorkerLoop = small_worker.loop(self.clock, epoch=epoch, executor=self.executor)
        return loop

    def _run(self) -> None:
        try:
            self.all_sent = self.service.run()
        except (ThreadDied, DeviceLost) as error:
            self.error = error

    def start(self) -> None:
        self.beat()
        self.thread.start()
        self.until(lambda: bool(self.epochs))

    def beat(self) -> None:
        self.hub.gateways_seen_at_us["g1"] = self.clock.now_us()

    def send(self, message: Any) -> None:
        self.gateway.send_now("w1", message)

    def until(self, condition: Callable[[], bool]) -> None:
        """Listen until it holds."""
        give_up_s = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < give_up_s, self.heard
            self.heard.extend(self.gateway.receive_now())
            with self.hub.changed:
                self.hub.changed.wait(0.01)

    def until_end(self, response_id: str) -> Any:
        self.until(lambda: self.end(response_id) is not None)
        return self.end(response_id)

    def until_checked(self, num_checks: int) -> None:
        self.until(lambda: self.bus.num_gateway_checks >= num_checks)

    def until_load_after(self, at_us: int) -> int:
        """Until a newer heartbeat; when it came."""
        self.until(lambda: self.hub.loads["w1"][0] > at_us)
        return self.hub.loads["w1"][0]

    def end(self, response_id: str) -> Finished | Rejected | None:
        for message in self.heard:
            if isinstance(message, Finished | Rejected) and message.response_id == response_id:
                return message
        return None

    def indexes(self, response_id: str) -> list[int]:
        """Index of every token heard of a response, in order of arrival."""
        return [
            first + offset
            for message in self.heard
            if isinstance(message, Tokens)
            for name, first, new in zip(message.response_ids, message.first_indexes, message.token_ids, strict=True)
            if name == response_id
            for offset in range(len(new))
        ]

    def usages(self) -> list[Usage]:
        return [entry.message for entry in self.hub.usage if isinstance(entry.message, Usage)]

    def stop(self) -> None:
        self.executor.gate.set()
        self.service.ask_drain()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
