"""The Bus inside one process: for tests and the simulator. Messages are handed over as they are, never encoded.

Knows lifetimes by the clock it is given; refuses to know real time, except to wait for input when asked to wait.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence

from scheduler_engine.policy import PolicySnapshot
from wire.bus import BadEntry, BusFull, Fenced, FinishedOutput, StepOutput, UsageEntry
from wire.messages import LoadSnapshot, PolicyChanged, ToGateway, ToLedger, ToWorker

LOAD_LIFETIME_US = 2_000_000
GATEWAY_LIFETIME_US = 9_000_000
OUTPUT_LIFETIME_US = 600_000_000


class MemoryHub:
    """All streams of one small world. Always: every field is read and written under ``changed``."""

    def __init__(self, now_us: Callable[[], int], *, max_stream_length: int = 100_000) -> None:
        self.now_us = now_us
        self.max_stream_length = max_stream_length
        self.changed = threading.Condition()
        self.epochs: dict[str, int] = {}
        self.fenced: set[str] = set()
        self.inboxes: dict[str, deque[ToWorker | BadEntry]] = {}
        self.outboxes: dict[str, deque[ToGateway | BadEntry]] = {}
        self.usage: deque[UsageEntry] = deque()
        self.num_usage_entries = 0
        self.loads: dict[str, tuple[int, LoadSnapshot]] = {}
        self.gateways_seen_at_us: dict[str, int] = {}
        self.outputs: dict[str, tuple[int, FinishedOutput]] = {}
        self.policy: PolicySnapshot | None = None
        self.listeners: dict[str, Callable[[], object]] = {}

    def worker(self, worker_id: str) -> MemoryWorkerBus:
        return MemoryWorkerBus(self, worker_id)

    def gateway(self, gateway_id: str) -> MemoryGatewayBus:
        return MemoryGatewayBus(self, gateway_id)

    def usage_reader(self) -> MemoryUsageReader:
        return MemoryUsageReader(self)

    def set_policy(self, policy: PolicySnapshot) -> bool:
        """False, and nothing is changed, where a newer version is in force."""
        with self.changed:
            if self.policy is not None and self.policy.version > policy.version:
                return False
            self.policy = policy
            self.changed.notify_all()
            return True

    def append_usage(self, message: ToLedger) -> None:
        """The caller holds ``changed``."""
        self.num_usage_entries += 1
        self.usage.append(UsageEntry(str(self.num_usage_entries), message))

    def refuse_when_full(self, stream: Sequence[object] | deque[object], gateway_id: str | None = None) -> None:
        if len(stream) >= self.max_stream_length:
            raise BusFull(f"a stream stands at its hard length of {self.max_stream_length}", gateway_id)


class MemoryWorkerBus:
    """A worker's side. Always: an output committed once is not seen again when published again."""

    def __init__(self, hub: MemoryHub, worker_id: str) -> None:
        self.worker_id = worker_id
        self._hub = hub
        self._epoch = 0
        self._policy_version: int | None = None
        self._committed: StepOutput | None = None

    def open(self) -> int:
        hub = self._hub
        with hub.changed:
            self._epoch = hub.epochs[self.worker_id] = hub.epochs.get(self.worker_id, 0) + 1
            hub.fenced.discard(self.worker_id)
            hub.inboxes[self.worker_id] = deque()
            self._policy_version = None
        return self._epoch

    def receive(self, timeout_s: float) -> Sequence[ToWorker | BadEntry]:
        hub = self._hub
        with hub.changed:
            if timeout_s:
                hub.changed.wait_for(self._has_input, timeout_s)
            entries: list[ToWorker | BadEntry] = []
            if hub.policy is not None and hub.policy.version != self._policy_version:
                self._policy_version = hub.policy.version
                entries.append(PolicyChanged(snapshot=hub.policy))
            inbox = hub.inboxes[self.worker_id]
            entries.extend(inbox)
            inbox.clear()
        return entries

    def _has_input(self) -> bool:
        policy = self._hub.policy
        new_policy = policy is not None and policy.version != self._policy_version
        return new_policy or bool(self._hub.inboxes[self.worker_id])

    def publish(self, output: StepOutput) -> None:
        hub = self._hub
        with hub.changed:
            self._check_epoch()
            if output is self._committed:
                return
            for gateway_id in output.to_gateways:
                hub.refuse_when_full(hub.outboxes.setdefault(gateway_id, deque()), gateway_id)
            if output.usages:
                hub.refuse_when_full(hub.usage)
            for gateway_id, messages in output.to_gateways.items():
                hub.outboxes[gateway_id].extend(messages)
            for usage in output.usages:
                hub.append_usage(usage)
            for response_id, finished in output.outputs.items():
                hub.outputs[response_id] = (hub.now_us(), finished)
            self._committed = output
            listeners = [hub.listeners[name] for name in output.to_gateways if name in hub.listeners]
            hub.changed.notify_all()
        for listener in listeners:
            listener()

    def publish_load(self, load: LoadSnapshot) -> None:
        with self._hub.changed:
            self._check_epoch()
            self._hub.loads[self.worker_id] = (self._hub.now_us(), load)

    def _check_epoch(self) -> None:
        if self._hub.epochs.get(self.worker_id) != self._epoch or self.worker_id in self._hub.fenced:
            raise Fenced(f"epoch {self._epoch} of worker {self.worker_id} has been fenced")

    def live_gateways(self) -> frozenset[str]:
        hub = self._hub
        with hub.changed:
            oldest = hub.now_us() - GATEWAY_LIFETIME_US
            return frozenset(name for name, seen_at_us in hub.gateways_seen_at_us.items() if seen_at_us > oldest)

    def close(self) -> None:
        with self._hub.changed:
            self._hub.loads.pop(self.worker_id, None)


class MemoryGatewayBus:
    """A gateway's side."""

    def __init__(self, hub: MemoryHub, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self._hub = hub

    async def open(self) -> None:
        with self._hub.changed:
            self._hub.outboxes.setdefault(self.gateway_id, deque())
        await self.heartbeat()

    async def send(self, worker_id: str, *messages: ToWorker) -> None:
        self.send_now(worker_id, *messages)

    def send_now(self, worker_id: str, *messages: ToWorker) -> None:
        """``send`` for a caller without an event loop."""
        hub = self._hub
        with hub.changed:
            inbox = hub.inboxes.setdefault(worker_id, deque())
            hub.refuse_when_full(inbox)
            inbox.extend(messages)
            hub.changed.notify_all()

    async def receive(self, timeout_s: float) -> Sequence[ToGateway | BadEntry]:
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        with self._hub.changed:
            self._hub.listeners[self.gateway_id] = lambda: loop.call_soon_threadsafe(arrived.set)
        try:
            entries = self.receive_now()
            if entries or not timeout_s:
                return entries
            async with asyncio.timeout(timeout_s):
                await arrived.wait()
        except TimeoutError:
            return []
        finally:
            with self._hub.changed:
                self._hub.listeners.pop(self.gateway_id, None)
        return self.receive_now()

    def receive_now(self) -> Sequence[ToGateway | BadEntry]:
        """``receive`` without waiting, for a caller without an event loop."""
        with self._hub.changed:
            outbox = self._hub.outboxes.setdefault(self.gateway_id, deque())
            entries = list(outbox)
            outbox.clear()
        return entries

    async def loads(self) -> Sequence[LoadSnapshot]:
        hub = self._hub
        with hub.changed:
            oldest = hub.now_us() - LOAD_LIFETIME_US
            return [load for published_at_us, load in hub.loads.values() if published_at_us > oldest]

    async def output(self, response_id: str) -> FinishedOutput | None:
        with self._hub.changed:
            kept = self._hub.outputs.get(response_id)
            if kept is None or kept[0] <= self._hub.now_us() - OUTPUT_LIFETIME_US:
                return None
            return kept[1]

    async def tell_gateway(self, gateway_id: str, message: ToGateway) -> None:
        with self._hub.changed:
            outbox = self._hub.outboxes.setdefault(gateway_id, deque())
            self._hub.refuse_when_full(outbox, gateway_id)
            outbox.append(message)
            listener = self._hub.listeners.get(gateway_id)
        if listener is not None:
            listener()

    async def append_usage(self, message: ToLedger) -> None:
        with self._hub.changed:
            self._hub.refuse_when_full(self._hub.usage)
            self._hub.append_usage(message)
            self._hub.changed.notify_all()

    async def fence(self, worker_id: str, epoch: int) -> bool:
        with self._hub.changed:
            if self._hub.epochs.get(worker_id) != epoch:
                return False
            self._hub.fenced.add(worker_id)
            return True

    async def heartbeat(self) -> None:
        with self._hub.changed:
            self._hub.gateways_seen_at_us[self.gateway_id] = self._hub.now_us()

    async def close(self) -> None:
        with self._hub.changed:
            self._hub.gateways_seen_at_us.pop(self.gateway_id, None)


class MemoryUsageReader:
    """The settler's side: an entry stays until it is acknowledged."""

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub

    def read(self, count: int, timeout_s: float) -> Sequence[UsageEntry]:
        with self._hub.changed:
            if timeout_s:
                self._hub.changed.wait_for(lambda: bool(self._hub.usage), timeout_s)
            return [self._hub.usage[index] for index in range(min(count, len(self._hub.usage)))]

    def acknowledge(self, entry_ids: Sequence[str]) -> None:
        done = frozenset(entry_ids)
        with self._hub.changed:
            kept = [entry for entry in self._hub.usage if entry.entry_id not in done]
            self._hub.usage.clear()
            self._hub.usage.extend(kept)
