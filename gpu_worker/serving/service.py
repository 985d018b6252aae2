"""The worker as a process: the loop on the main thread, one thread that listens, one that sends, epoch after epoch.

The loop never waits on the Bus: input comes through a queue, and what step n said is sent while step n + 1 runs.
Refuses to know what is in a message.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import assert_never

from gpu_worker.clock import Clock
from gpu_worker.loop import Turn, WorkerLoop
from gpu_worker.serving.garbage import Sweeper
from gpu_worker.serving.listener import (
    LOAD_INTERVAL_US,
    Arrived,
    DeafGateway,
    Input,
    Listener,
    LiveGateways,
    Pulse,
    Wake,
)
from gpu_worker.serving.outage import Outage, say
from gpu_worker.serving.sender import Sender
from wire.bus import BusError, Fenced, WorkerBus

# Beyond the 9 s that a gateway's heartbeat lives: a Redis that restarts empty must not end everybody's work.
GATEWAY_GRACE_US = 3_000_000
BOOKS_INTERVAL_US = 1_000_000  # of an idle worker, which looks up as often: the sender waits meanwhile
JOIN_LIMIT_S = 10.0
SHORTEST_WAIT_US = 1_000


class ThreadDied(Exception):
    """The listener or the sender ended by a fault of its own; the process must not live on deaf or mute."""


class Session:
    """One epoch: a loop, two threads, two queues. Always: over once fenced or drained, then thrown away."""

    def __init__(self, bus: WorkerBus, loop: WorkerLoop, clock: Clock) -> None:
        self.loop = loop
        self.inbox: queue.SimpleQueue[Input] = queue.SimpleQueue()
        self.is_fenced = False
        self._died: str | None = None
        self._over = threading.Event()
        self._clock = clock
        self._bus = bus
        self._pulse = Pulse(loop.snapshot(), clock.now_us(), loop.dump)
        self._load_taken_at_us = clock.now_us()
        self._load_is_stale = False
        self._has_worked = False  # since the books were checked
        self._books_due_us = 0
        self._missing_since_us: dict[str, int] = {}
        self._sender = Sender(bus, clock, lambda gateway_id: self.inbox.put(DeafGateway(gateway_id)))
        listener = Listener(bus, clock, self._pulse, self.inbox)
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name=work.__name__, daemon=True)
            for work in (listener.listen, self._sender.send)
        ]

    def start(self) -> None:
        self._bus.publish_load(self._pulse.load)
        for thread in self._threads:
            thread.start()

    def _run(self, work: Callable[[threading.Event], None]) -> None:
        ended = False
        try:
            work(self._over)
            ended = True
        except Fenced:
            self.is_fenced = ended = True
        finally:
            if not ended:
                self._died = work.__name__
            if self.is_fenced or not ended:
                self._over.set()
                self.inbox.put(Wake())

    @property
    def is_over(self) -> bool:
        """Raises ThreadDied."""
        if self._died is not None:
            raise ThreadDied(f"the thread that does {self._died} has died")
        return self.is_fenced

    def finish(self) -> bool:
        """Send what is left and end both threads. False when it could not be sent."""
        self._over.set()
        self._sender.put(None, self._over)
        for thread in self._threads:
            thread.join(JOIN_LIMIT_S)
        self.loop.abandon()
        return not self._sender.gave_up

    def turn(self) -> Turn:
        """Take in all that has arrived, run one step, hand over what it said."""
        while not self.inbox.empty():
            self._take(self.inbox.get())
        self._pulse.step_started_at_us = self._clock.now_us()
        turn = self.loop.turn()
        self._pulse.step_started_at_us = None
        if not turn.is_idle:
            self._pulse.last_step_at_us = self._clock.now_us()
        if not turn.output.is_empty:
            self._sender.put(turn.output, self._over)
        self._refresh_load(turn)
        return turn

    def _refresh_load(self, turn: Turn) -> None:
        now_us = self._clock.now_us()
        self._has_worked |= not turn.is_idle
        if turn.is_idle and self._has_worked and now_us >= self._books_due_us:
            self.loop.check_books()
            self._has_worked, self._books_due_us = False, now_us + BOOKS_INTERVAL_US
        self._load_is_stale |= not turn.is_idle
        if now_us - self._load_taken_at_us >= LOAD_INTERVAL_US:
            self._pulse.load = self.loop.snapshot()
            self._load_taken_at_us, self._load_is_stale = now_us, not turn.is_idle

    def wait(self, *timers_us: int | None) -> None:
        """Block until there is input or a timer is due; no CPU is used meanwhile."""
        load_due_us = self._load_taken_at_us + LOAD_INTERVAL_US if self._load_is_stale else None
        moments = [at_us for at_us in (*timers_us, load_due_us) if at_us is not None]
        timeout_s = None
        if moments:
            timeout_s = max(SHORTEST_WAIT_US, min(moments) - self._clock.now_us()) / 1_000_000
        try:
            self._take(self.inbox.get(timeout=timeout_s))
        except queue.Empty:
            return

    def _take(self, item: Input) -> None:
        match item:
            case Arrived(message=message, at_us=at_us):
                self.loop.take_in(message, at_us)
            case LiveGateways(gateway_ids=alive):
                self._lose_missing(alive)
            case DeafGateway(gateway_id=gateway_id):
                say(f"gateway {gateway_id} has not read its outbox for too long; its responses are cancelled")
                self.loop.lose_gateway(gateway_id)
            case Wake():
                pass
            case _:
                assert_never(item)

    def _lose_missing(self, alive: frozenset[str]) -> None:
        now_us = self._clock.now_us()
        owners = self.loop.gateways()
        missing = {name: self._missing_since_us.get(name, now_us) for name in owners if name not in alive}
        for gateway_id, since_us in list(missing.items()):
            if now_us - since_us >= GATEWAY_GRACE_US:
                say(f"gateway {gateway_id} is gone; its {owners[gateway_id]} responses are cancelled")
                self.loop.lose_gateway(gateway_id)
                del missing[gateway_id]
        self._missing_since_us = missing


class WorkerService:
    """Serves epoch after epoch until told to drain. Always: a fenced epoch leaves nothing behind for the next."""

    def __init__(
        self,
        *,
        bus: WorkerBus,
        make_loop: Callable[[int], WorkerLoop],
        clock: Clock,
        drain_limit_s: float = 30.0,
        on_ready: Callable[[int], None] = lambda epoch: None,
    ) -> None:
        self._bus = bus
        self._make_loop = make_loop
        self._clock = clock
        self._drain_limit_us = int(drain_limit_s * 1_000_000)
        self._on_ready = on_ready
        self._session: Session | None = None
        self._sweeper = Sweeper(clock.now_us())
        self._drain_asked = threading.Event()
        self._dump_asked = threading.Event()

    def ask_drain(self) -> None:
        """Let nothing new in, finish what is here within the limit, then return from ``run``.

        Safe in a signal handler.
        """
        self._drain_asked.set()
        self._wake()

    def ask_dump(self) -> None:
        """Write the books and the last plans at the next step boundary. Safe in a signal handler."""
        self._dump_asked.set()
        self._wake()

    def _wake(self) -> None:
        if self._session is not None:
            self._session.inbox.put(Wake())

    def run(self) -> bool:
        """Until drained; False when the last words could not be sent.

        Raises ThreadDied, and whatever the engine raises when its books are broken.
        """
        all_sent = True
        while not self._drain_asked.is_set():
            session = self._open()
            if session is None:
                break
            try:
                self._serve(session)
            finally:
                all_sent = session.finish()
            if session.is_fenced:
                say("this epoch was declared dead; starting again under a new one")
        self._bus.close()
        return all_sent

    def _open(self) -> Session | None:
        """A session under a fresh epoch; waits for the Bus to be there. None when asked to drain meanwhile."""
        outage = Outage("opening")
        while not self._drain_asked.is_set():
            try:
                epoch = self._bus.open()
                self._session = Session(self._bus, self._make_loop(epoch), self._clock)
                self._session.start()
            except BusError as error:
                self._drain_asked.wait(outage.pause_s(error))
                continue
            outage.is_over()
            self._on_ready(epoch)
            return self._session
        return None

    def _serve(self, session: Session) -> None:
        while not (session.is_over or self._drain_asked.is_set()):
            self._turn(session, None)
            if session.loop.is_told_to_drain:
                say("told to drain by an operator")
                self._drain_asked.set()
        if session.is_over:
            return
        session.loop.drain()
        give_up_at_us = self._clock.now_us() + self._drain_limit_us
        gave_up = False
        while not session.is_over and (session.loop.has_work or not session.inbox.empty()):
            if not gave_up and self._clock.now_us() >= give_up_at_us:
                session.loop.give_up()
                gave_up = True
            self._turn(session, give_up_at_us)

    def _turn(self, session: Session, wait_until_us: int | None) -> None:
        if self._dump_asked.is_set():
            self._dump_asked.clear()
            say(session.loop.dump())
        turn = session.turn()
        self._sweeper.sweep(self._clock.now_us(), is_idle=turn.is_idle)
        if turn.is_idle:
            session.wait(turn.wake_at_us, wait_until_us)
