"""One simulated worker: its own loop, engine and memory bus on a virtual clock; only the executor is a model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpu_worker.clock import VirtualClock
from gpu_worker.loop import Turn, WorkerLoop
from gpu_worker.simulated import BYTE_TOKENS, DeviceProfile, SimulatedExecutor
from gpu_worker.simulation.clients import Clients
from gpu_worker.simulation.trace_viewer import TraceViewer
from gpu_worker.simulation.traffic import SECOND_US, Arrival
from gpu_worker.simulation.watch import FairnessGap, Timeline, WatchedExecutor, Watcher
from gpu_worker.telling.telemetry import Telemetry, WorkerIdentity
from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants
from scheduler_engine.policy import PolicySnapshot, PriorityClass
from scheduler_engine.request import RequestId
from scheduler_engine.scheduler import Scheduler
from wire.memory_bus import MemoryHub
from wire.messages import Usage

FULL_CHECK_STEPS = 1_000
PROGRESS_STEPS = 200
WORKER_ID, GATEWAY_ID = "simulated", "simulator"

Charges = dict[tuple[PriorityClass, str], int]
EngineMaker = Callable[[EngineConfig, PolicySnapshot, CostConstants], Scheduler]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A simulation that has run to its end. ``charges``: device time of each tenant in each class, as they stood
    when each second began.
    """

    device: DeviceProfile
    policy: PolicySnapshot
    clients: Clients
    telemetry: Telemetry
    usages: Sequence[Usage]
    timeline: Timeline
    gap: FairnessGap
    charges: dict[int, Charges]
    digest: str
    virtual_us: int
    cpu_s: float


class Simulation:
    """One worker and its clients. Always: the clock moves by steps, and to the next arrival or timer when idle."""

    def __init__(
        self,
        device: DeviceProfile,
        arrivals: Sequence[Arrival],
        *,
        policy: PolicySnapshot | None = None,
        noise_percent: int = 0,
        seed: int = 0,
        with_viewer: bool = False,
        make_engine: EngineMaker = Scheduler,
        clock: VirtualClock | None = None,
    ) -> None:
        self._device = device
        self._policy = policy or PolicySnapshot(version=0, classes=device.classes)
        self.clients = Clients(arrivals, self._policy.classes)
        self._num_arrivals = len(arrivals)
        self._clock = clock or VirtualClock()
        self._hub = MemoryHub(self._clock.now_us, max_stream_length=10_000_000)
        self._worker_bus, self._gateway_bus = self._hub.worker(WORKER_ID), self._hub.gateway(GATEWAY_ID)
        self._telemetry = Telemetry()
        self._by_request: dict[RequestId, Arrival] = {}
        self.viewer = TraceViewer(self._by_request) if with_viewer else None
        self._timeline, self._gap = Timeline(self._by_request, device.cost), FairnessGap()
        self._charges: dict[int, Charges] = {}
        self.scheduler = make_engine(device.engine_config(), self._policy, device.cost)
        watchers: list[Watcher] = [self._timeline, *([] if self.viewer is None else [self.viewer])]
        executor = SimulatedExecutor(device, self._clock, noise_percent=noise_percent, seed=seed)
        self._loop = WorkerLoop(
            identity=WorkerIdentity(
                worker_id=WORKER_ID,
                epoch=self._worker_bus.open(),
                model="simulated",
                max_model_len=device.shape.max_model_len,
            ),
            scheduler=self.scheduler,
            executor=WatchedExecutor(executor, self._clock, watchers),
            clock=self._clock,
            token_bytes=BYTE_TOKENS,
            telemetry=self._telemetry,
        )

    def run(self, *, until_us: int | None = None, show_progress: bool = False) -> Outcome:
        """To the last token of the last client, or to the first step boundary at ``until_us`` or later. Raises
        BrokenBooks.
        """
        began_s = time.process_time()
        num_turns = 0
        while self._is_going_on(until_us):
            self._deliver_arrivals()
            turn = self._loop.turn()
            self._hear(turn)
            if turn.is_idle:
                self._skip_to_next(turn)
            self._loop.check_totals()
            self._gap.look(self.scheduler)
            self._note_charges()
            num_turns += 1
            if num_turns % FULL_CHECK_STEPS == 0:
                self._loop.check_books()
            if show_progress and num_turns % PROGRESS_STEPS == 0:
                self._show_progress()
        self._loop.check_books()
        if show_progress:
            sys.stderr.write("\r\033[K")
        return Outcome(
            device=self._device,
            policy=self._policy,
            clients=self.clients,
            telemetry=self._telemetry,
            usages=[entry.message for entry in self._hub.usage if isinstance(entry.message, Usage)],
            timeline=self._timeline,
            gap=self._gap,
            charges=self._charges,
            digest=self.scheduler.digest,
            virtual_us=self._clock.now_us(),
            cpu_s=time.process_time() - began_s,
        )

    def _is_going_on(self, until_us: int | None) -> bool:
        if until_us is not None and self._clock.now_us() >= until_us:
            return False
        return self._loop.has_work or self.clients.next_at_us is not None

    def _deliver_arrivals(self) -> None:
        due = self.clients.send(self._clock.now_us())
        for arrival in due:
            submit = arrival.submit
            self._by_request[RequestId(f"{submit.response_id}/0")] = arrival
            self._gateway_bus.send_now(WORKER_ID, submit)
        if due:
            for arrival, message in zip(due, self._worker_bus.receive(0), strict=True):
                assert message is arrival.submit
                self._loop.take_in(arrival.submit, arrival.at_us)

    def _hear(self, turn: Turn) -> None:
        if not turn.output.is_empty:
            self._worker_bus.publish(turn.output)
            self.clients.hear(self._gateway_bus.receive_now(), self._clock.now_us())

    def _skip_to_next(self, turn: Turn) -> None:
        moments = [at_us for at_us in (turn.wake_at_us, self.clients.next_at_us) if at_us is not None]
        if not moments:
            raise AssertionError(f"{self.clients.num_open} responses wait and nothing will ever wake the engine")
        self._clock.sleep_us(max(1, min(moments) - self._clock.now_us()))

    def _note_charges(self) -> None:
        second = self._clock.now_us() // SECOND_US
        if second not in self._charges:
            self._charges[second] = self.scheduler.charges_us()

    def _show_progress(self) -> None:
        filled = 30 * self.clients.num_ended // self._num_arrivals
        seconds = self._clock.now_us() // SECOND_US
        bar = "#" * filled + "." * (30 - filled)
        sys.stderr.write(f"\r[{bar}] {self.clients.num_ended}/{self._num_arrivals} requests, {seconds} s simulated")
        sys.stderr.flush()
