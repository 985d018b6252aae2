"""One turn of the worker: take in, plan, execute, apply, say. Knows the order; refuses to know threads and Redis."""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from gpu_worker.answers.anteroom import BUSY_RETRY_US, LOOK_AGAIN_US, Anteroom, Guest
from gpu_worker.answers.grammars import GrammarCompiler
from gpu_worker.answers.prefix_keys import PrefixKeys
from gpu_worker.answers.response_book import ResponseBook
from gpu_worker.answers.step_draft import StepDraft
from gpu_worker.clock import Clock
from gpu_worker.executor import Executor
from gpu_worker.telling.explaining import explained
from gpu_worker.telling.telemetry import Telemetry, WorkerIdentity
from scheduler_engine import events
from scheduler_engine.errors import EngineError
from scheduler_engine.events import RejectReason
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.request import RequestId
from scheduler_engine.scheduler import Scheduler
from wire.bus import StepOutput
from wire.messages import Attach, Cancel, Drain, Explain, Explained, LoadSnapshot, PolicyChanged, Submit, ToWorker

NUM_PLANS_KEPT = 8


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn came to. ``is_idle``: nothing was computed and nothing said, so the next turn may wait for
    input.
    """

    output: StepOutput
    is_idle: bool
    wake_at_us: int | None


class WorkerLoop:
    """The engine, its executor and its responses under one roof, for one epoch; used from one thread.

    Always: ``plan_step`` and ``apply_step`` alternate, and what a step made true is said in that step's output.
    """

    def __init__(
        self,
        *,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        token_bytes: Sequence[bytes],
        telemetry: Telemetry,
        policy_version: int = 0,
        grammars: GrammarCompiler | None = None,
        prefix_keys: PrefixKeys | None = None,
    ) -> None:
        self.identity = identity
        self.is_draining = False
        self.is_told_to_drain = False  # by a message; whoever runs the loop sees to it
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._telemetry = telemetry
        self._policy_version = policy_version
        self._book = ResponseBook(telemetry, token_bytes, executor.shape.bytes_per_block, prefix_keys)
        self._anteroom = Anteroom(grammars)
        self._refused: list[events.Rejected] = []
        self._answers: list[tuple[str, Explained]] = []
        self._plans: deque[StepPlan] = deque(maxlen=NUM_PLANS_KEPT)

    @property
    def has_work(self) -> bool:
        return bool(len(self._book) or len(self._anteroom))

    def take_in(self, message: ToWorker, received_at_us: int) -> None:
        """Note what the message asks; it takes effect in the next turn."""
        match message:
            case Submit(worker_epoch=epoch) if epoch not in (0, self.identity.epoch):
                pass  # meant for one that died: its gateway knows, and has sent it on
            case Submit() if message.sampling.grammar is not None:
                self._anteroom.enter(message, received_at_us)
            case Submit():
                self._let_in(Guest(message, received_at_us, None))
            case Cancel():
                self._let_in(*self._anteroom.leave(message.response_id, message.attempt))
                self._cancel(self._book.cancel(message), message.reason)
            case Attach():
                self._anteroom.attach(message)
                self._book.attach(message)
            case PolicyChanged(snapshot=snapshot):
                self._policy_version = snapshot.version
                self._scheduler.set_policy(snapshot)
            case Explain():
                self._answers.append((message.gateway_id, explained(self._scheduler, message)))
            case Drain():
                self.is_told_to_drain |= message.worker_epoch == self.identity.epoch
            case _:
                assert_never(message)

    def _let_in(self, *guests: Guest) -> None:
        for guest in guests:
            for request in self._book.submit(guest.submit, guest.received_at_us, guest.constraints):
                if guest.refusal is not None:
                    retry_after_us = None if guest.refusal is RejectReason.GRAMMAR else BUSY_RETRY_US
                    self._refused.append(events.Rejected(request.request_id, guest.refusal, retry_after_us))
                else:
                    self._scheduler.submit(request, guest.received_at_us)

    def lose_gateway(self, gateway_id: str) -> None:
        """Cancel all that a gateway owned: nobody is left to read it."""
        self._let_in(*self._anteroom.leave_of_gateway(gateway_id))
        self._cancel(self._book.cancel_of_gateway(gateway_id), "gateway_lost")

    def drain(self) -> None:
        """Let nothing new in; what is here goes on."""
        self.is_draining = True
        self._scheduler.drain()

    def give_up(self) -> None:
        """End everything as the platform's failure: the time to drain is over."""
        self._let_in(*self._anteroom.leave_all())
        self._cancel(self._book.cancel_all("draining"), "draining")

    def _cancel(self, request_ids: Sequence[RequestId], reason: str) -> None:
        for request_id in request_ids:
            self._scheduler.cancel(request_id, reason, self._clock.now_us())

    def turn(self) -> Turn:
        """One step from plan to output. Blocks as long as the executor does."""
        self._let_in(*self._anteroom.ready(self._clock.now_us()))
        began_us = self._clock.now_us()
        plan = self._scheduler.plan_step(began_us)
        planned_us = self._clock.now_us()
        result = self._execute(plan)
        now_us = self._clock.now_us()
        step = self._scheduler.apply_step(result, now_us)
        self._telemetry.stepped(
            scheduling_us=planned_us - began_us + self._clock.now_us() - now_us,
            duration_us=result.duration_us,
            is_empty=plan.is_empty,
        )
        if self._refused:
            step = dataclasses.replace(step, rejected=(*step.rejected, *self._refused))
            self._refused.clear()
        draft = StepDraft()
        for gateway_id, answer in self._answers:
            draft.reply(gateway_id, answer)
        self._answers.clear()
        self._cancel(self._book.digest(step, draft, now_us), "sibling_refused")
        for request_id, keys in self._book.filled(step):
            self._scheduler.name_blocks(request_id, keys)
        for finished in step.finished:
            self._executor.forget(finished.request_id)
        output = draft.output(self.identity.worker_id, self.identity.epoch, plan.step)
        return Turn(output, is_idle=plan.is_empty and output.is_empty, wake_at_us=self._wake_at_us(plan, now_us))

    def _wake_at_us(self, plan: StepPlan, now_us: int) -> int | None:
        moments = [] if plan.wake_at_us is None else [plan.wake_at_us]
        if len(self._anteroom):
            moments.append(now_us + LOOK_AGAIN_US)
        return min(moments, default=None)

    def _execute(self, plan: StepPlan) -> StepResult:
        if plan.is_empty:
            return StepResult(step=plan.step, duration_us=0)
        self._plans.append(plan)
        result = self._executor.execute(plan)
        self._book.take_logprobs(plan, result)
        stopped = self._book.stopped(plan, result)
        return dataclasses.replace(result, stopped=stopped) if stopped else result

    def gateways(self) -> dict[str, int]:
        """Gateways that own responses here, and how many."""
        counts = Counter(self._book.gateways())
        counts.update(self._anteroom.gateways())
        return counts

    def check_totals(self) -> None:
        """The part of the books that costs nothing, for every step. Raises BrokenBooks."""
        self._scheduler.check_totals()

    def check_books(self) -> None:
        """All of them. Raises BrokenBooks."""
        self._scheduler.check_books()

    def snapshot(self) -> LoadSnapshot:
        """How busy the worker is now, at a step boundary."""
        return self._telemetry.snapshot(
            self.identity,
            self._scheduler,
            self._book.response_id_of,
            now_us=self._clock.now_us(),
            policy_version=self._policy_version,
            draining=self.is_draining,
        )

    def dump(self) -> str:
        """The books and the last plans, for a person who asks why nothing moves."""
        try:
            self._scheduler.check_books()
            books = "books: balanced"
        except EngineError as error:
            books = f"books: BROKEN: {error}"
        load = self._scheduler.load(self._clock.now_us())
        lines = [
            f"worker {self.identity.worker_id}, epoch {self.identity.epoch}, step {load.step}",
            f"{len(self._book)} responses",
            books,
            f"blocks: {load.num_free_blocks} of {load.num_blocks} free, host {load.num_free_host_blocks} of "
            f"{load.num_host_blocks}, slots {load.num_free_slots} of {load.num_slots}",
        ]
        lines.extend(
            f"{row.priority_class.label}: {row.num_waiting} waiting, {row.num_running} running, "
            f"{row.num_suspended} suspended, closed={row.closed}"
            for row in load.classes
        )
        lines.extend(_plan_line(plan) for plan in self._plans)
        return "\n".join(lines)

    def abandon(self) -> None:
        """This epoch is over: let the executor forget every request that is still here."""
        for request_id in self._book.request_ids():
            self._executor.forget(request_id)


def _plan_line(plan: StepPlan) -> str:
    rows = " ".join(f"{row.request_id}@{row.start}+{len(row.token_ids)}" for row in plan.rows[:16])
    more = f" … {plan.num_rows - 16} more" if plan.num_rows > 16 else ""
    return f"step {plan.step}: out {len(plan.swap_out)}, in {len(plan.swap_in)}, rows {plan.num_rows}: {rows}{more}"
