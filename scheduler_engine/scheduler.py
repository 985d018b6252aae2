"""The step scheduler: ``plan_step(now) -> StepPlan``, ``apply_step(result, now) -> StepEvents``, strictly in turn.

Pure and deterministic: the same inputs at the same times give the same plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from scheduler_engine import admission, books
from scheduler_engine.budget import HoldAllowance, StepBudget
from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants, to_us
from scheduler_engine.draft import Draft, Outbox
from scheduler_engine.errors import BrokenBooks, Misuse
from scheduler_engine.events import StepEvents
from scheduler_engine.explain import Explanation, explain
from scheduler_engine.fairness import SERVICE_UNITS_PER_US
from scheduler_engine.intake import Arrival, Cancellation, Input, Intake, Naming, ServiceElsewhere
from scheduler_engine.load import EngineLoad, TenantLoad
from scheduler_engine.measure import measure, measure_tenants
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.planning import StepPlanner
from scheduler_engine.policy import PolicySnapshot, PriorityClass
from scheduler_engine.request import Request, RequestId
from scheduler_engine.rows import decodes_of, row_of
from scheduler_engine.save_ahead import save_ahead
from scheduler_engine.settling import Settlement, check_result
from scheduler_engine.state import EngineState

_POLL_COPIES_US = 1_000


class Scheduler:
    """Decides at every step who runs, who pauses and who is let in. Always: between two steps all books balance."""

    def __init__(self, config: EngineConfig, policy: PolicySnapshot, cost: CostConstants) -> None:
        self._state = EngineState(config, policy, cost)
        self._intake = Intake(self._state)
        self._inputs: list[Input] = []
        self._next_policy: PolicySnapshot | None = None
        self._hold_allowance = HoldAllowance()
        self._draft: Draft | None = None
        self._plan: StepPlan | None = None

    # inputs: put on a list, in effect from the next plan on

    def submit(self, request: Request, now_us: int) -> None:
        """``now_us`` is the arrival, for good."""
        self._inputs.append(Arrival(request, now_us))

    def cancel(self, request_id: RequestId, reason: str, now_us: int) -> None:
        """Ends the request in the next plan, whatever its state; unknown ids are ignored, they ended first."""
        self._inputs.append(Cancellation(request_id, reason))

    def name_blocks(self, request_id: RequestId, keys: Sequence[bytes]) -> None:
        """Keys of the blocks that follow those which have one, full ones only: from the next plan on a request with the
        same keys finds them. Ignored where the request has ended.
        """
        self._inputs.append(Naming(request_id, keys))

    def set_policy(self, policy: PolicySnapshot) -> None:
        self._next_policy = policy

    def set_service_elsewhere(self, priority_class: PriorityClass, tenant_id: str, gpu_us: int) -> None:
        """Device time a tenant has had in a class on all other workers: from the next plan on it orders as if it had
        been had here. Cumulative; nobody is charged for it.
        """
        self._inputs.append(ServiceElsewhere(priority_class, tenant_id, gpu_us))

    def drain(self) -> None:
        """From the next plan on nobody is let in who has not started, here or in an earlier attempt; who waits without
        having started is handed back, the others run to their end.
        """
        self._state.draining = True

    # the two verbs

    def plan_step(self, now_us: int) -> StepPlan:
        """What the next step shall do. Raises Misuse when the last plan was not applied."""
        if self._plan is not None:
            raise Misuse(f"step {self._plan.step} was planned and not applied")
        state = self._state
        state.now_us = state.journal.now_us = now_us
        self._take_in(now_us)
        base_us = to_us(state.cost.base_ns)
        budget = StepBudget(state, first_token_hold_allowed=self._hold_allowance.covers(base_us))
        draft = Draft(step=state.step, now_us=now_us)
        StepPlanner(state, draft, budget).plan()
        self._intake.expire(now_us)
        save_ahead(state, draft)
        decodes = decodes_of(state, draft)
        if draft.first_token_hold:
            self._hold_allowance.spend(base_us)
        plan = StepPlan(
            step=state.step,
            chunks=tuple([row_of(chunk) for chunk in draft.chunks]),
            swap_out=tuple(draft.swap_out),
            swap_in=tuple(draft.swap_in),
            token_budget=budget.allowed_tokens,
            wake_at_us=self._wake_at_us(now_us),
            decodes=decodes,
        )
        state.journal.close_plan(draft, token_budget=plan.token_budget, wake_at_us=plan.wake_at_us)
        self._draft, self._plan = draft, plan
        return plan

    def apply_step(self, result: StepResult, now_us: int) -> StepEvents:
        """What the step meant. Raises Misuse, and changes nothing, when ``result`` cannot be the planned step's."""
        if self._plan is None or self._draft is None:
            raise Misuse("no step was planned")
        state = self._state
        check_result(state, self._plan, result)
        state.journal.now_us = now_us
        events = Settlement(state, self._draft, self._plan, now_us).settle(result)
        self._hold_allowance.earn(state.classes[PriorityClass.INTERACTIVE], result.duration_us)
        state.outbox = Outbox()
        state.journal.close_step(state.step, result.duration_us)
        state.step += 1
        self._plan = self._draft = None
        return events

    def _take_in(self, now_us: int) -> None:
        state = self._state
        if self._next_policy is not None:
            state.set_policy(self._next_policy)
            self._next_policy = None
        if self._inputs:
            inputs, self._inputs = self._inputs, []
            self._intake.take_in(inputs, now_us)
        if state.headroom.is_due(now_us):
            state.headroom.sample(state.held_blocks(), now_us)
        state.overload.settle(
            late_percent=admission.late_percent(state),
            batch_has_work=state.has_work(PriorityClass.BATCH),
            now_us=now_us,
        )
        if state.draining:
            self._intake.hand_back(now_us)
        for rank, num_lives in enumerate(state.num_lives):
            if num_lives:
                state.last_active_us[rank] = now_us

    def _wake_at_us(self, now_us: int) -> int | None:
        state = self._state
        timer_us = state.timers[0][0] if state.timers else None
        if not state.fences:
            return timer_us
        poll_us = now_us + _POLL_COPIES_US
        return poll_us if timer_us is None else min(timer_us, poll_us)

    # looking in

    @property
    def has_work(self) -> bool:
        """True while a request lives, an input waits, or events wait to be told."""
        return bool(self._state.lives or self._inputs or self._state.fences) or not self._state.outbox.is_empty

    def load(self, now_us: int) -> EngineLoad:
        """How busy the engine is, for the door and the boards. O(requests on the device and suspended)."""
        return measure(self._state, now_us)

    def tenants(self) -> list[TenantLoad]:
        """What each tenant has had, and whether it has anything here. O(tenants): for once a second."""
        return measure_tenants(self._state)

    @property
    def policy(self) -> PolicySnapshot:
        """The one in force."""
        return self._state.policy

    def explain(self, request_id: RequestId) -> Explanation | None:
        """Where the time of a live or recently ended request went; None for one that is not known (any more)."""
        return explain(self._state, request_id)

    @property
    def config(self) -> EngineConfig:
        return self._state.config

    @property
    def num_live(self) -> int:
        """Requests that have been let in and have not ended."""
        return len(self._state.lives)

    def prefix_keys_in_use(self) -> Iterator[bytes]:
        """All that a later request's keys may be compared with. O(blocks + prompts)."""
        yield from self._state.device.keys()
        for live in self._state.lives.values():
            yield from live.prefix_keys
        for item in self._inputs:
            if isinstance(item, Arrival):
                yield from item.request.prefix_keys
            elif isinstance(item, Naming):
                yield from item.keys

    @property
    def digest(self) -> str:
        """Of every plan and decision up to the step applied last, in hexadecimal."""
        return self.digest_bytes.hex()

    @property
    def digest_bytes(self) -> bytes:
        return self._state.journal.chain.digest

    @property
    def step_records(self) -> bytes:
        """The decisions of the step applied last; ``record.unpack_all`` reads them."""
        return self._state.journal.step_records

    def waiting_services(self, priority_class: PriorityClass) -> list[tuple[str, int]]:
        """(tenant, device time charged over weight, in microseconds) of those with somebody waiting in the class and
        no cap of their own reached: what fairness compares.
        """
        accounts = self._state.queues[priority_class].accounts()
        return [(account.tenant_id, account.service // SERVICE_UNITS_PER_US) for account in accounts]

    def charges_us(self) -> dict[tuple[PriorityClass, str], int]:
        """Device time charged to each tenant in each class. O(tenants)."""
        charges = self._state.accountant.charges_us()
        return {(account.priority_class, account.tenant_id): us for account, us in charges.items()}

    def check_totals(self) -> None:
        """O(1) part of the books, for every step. Raises BrokenBooks."""
        books.check_totals(self._state)

    def check_books(self) -> None:
        """All books, O(requests + blocks). Raises BrokenBooks."""
        books.check_books(self._state, self._draft)
        batch = self._state.running.batch()
        if self._plan is not None and len(batch.owners) != len(self._plan.decodes):
            raise BrokenBooks(f"{len(self._plan.decodes)} decodes planned for {len(batch.owners)} requests")
