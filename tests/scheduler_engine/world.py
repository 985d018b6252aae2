"""The small world of the engine's tests: a device that obeys every plan in the toy's fake time, and checks the books
after it.

After every step the invariants J1 to J7 of the case list are asserted: see ``World._check``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants
from scheduler_engine.events import Finished, Preempted, Rejected, Resource, StepEvents
from scheduler_engine.plan import RowFailure, StepPlan, StepResult
from scheduler_engine.policy import PolicySnapshot, PriorityClass, TenantClassPolicy, gpu_classes
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler

TOY = CostConstants(
    base_ns=6_000_000,
    prefill_token_ns=45_000,
    prefill_context_ns=0,
    decode_row_ns=30_000,
    kv_token_ns=65,
    copy_operation_us=5,
    copy_bytes_per_us=50_000,
)
INTERACTIVE, DEFAULT, BATCH = PriorityClass.INTERACTIVE, PriorityClass.DEFAULT, PriorityClass.BATCH


def policy(
    *tenants: TenantClassPolicy,
    version: int = 1,
    classes: dict[PriorityClass, dict[str, Any]] | None = None,
    **every: Any,
) -> PolicySnapshot:
    """GPU defaults with edits: ``every`` in all classes, ``classes`` in one."""
    edits = classes or {}
    rows = [replace(row, **every, **edits.get(row.priority_class, {})) for row in gpu_classes()]
    return PolicySnapshot(version=version, classes=(rows[0], rows[1], rows[2]), tenants=tenants)


@dataclass
class Story:
    """What the engine told about one request."""

    request: Request
    arrived_us: int
    token_ids: list[int] = field(default_factory=list)
    token_us: list[int] = field(default_factory=list)
    first_planned_step: int | None = None
    preempted: list[tuple[int, Preempted]] = field(default_factory=list)
    resumed_steps: list[int] = field(default_factory=list)
    finished: Finished | None = None
    rejected: Rejected | None = None

    @property
    def ttft_us(self) -> int:
        return self.token_us[0] - self.arrived_us

    @property
    def has_ended(self) -> bool:
        return self.finished is not None or self.rejected is not None


class World:
    """One engine, one obedient device, one clock."""

    def __init__(
        self,
        num_blocks: int = 256,
        num_slots: int = 8,
        token_budget: int | None = 512,
        *,
        num_host_blocks: int | None = None,
        cost: CostConstants = TOY,
        policy: PolicySnapshot | None = None,
        max_model_len: int = 100_000,
        bytes_per_block: int = 2_097_152,
        copies_in_order: bool = True,
        copy_steps: int = 1,
        check: bool = True,
        **config: int,
    ) -> None:
        self.cost = cost
        self.check = check
        self.policy = policy or make_policy()
        if token_budget is not None:
            rows = tuple(
                replace(row, token_budget_max=token_budget, chunk_max=min(row.chunk_max, token_budget))
                for row in self.policy.classes
            )
            self.policy = replace(self.policy, classes=rows)
        self.config = EngineConfig(
            num_blocks=num_blocks,
            num_host_blocks=4 * num_blocks if num_host_blocks is None else num_host_blocks,
            num_slots=num_slots,
            max_model_len=max_model_len,
            bytes_per_block=bytes_per_block,
            copies_in_order=copies_in_order,
            **config,
        )
        self.engine = Scheduler(self.config, self.policy, cost)
        self.copy_steps = copy_steps
        self.now_us = 0
        self.step = 0
        self.busy_us = 0
        self.stories: dict[str, Story] = {}
        self.plans: list[StepPlan] = []
        self.events: list[StepEvents] = []
        self.fail_next: dict[str, RowFailure] = {}
        self.stop_next: set[str] = set()
        self.token: Callable[[str, int], int] = lambda request_id, index: 1_000 + index
        self._num_requests = 0
        self._copies_under_way: list[tuple[int, RequestId]] = []

    # doing

    def submit(
        self,
        priority_class: PriorityClass,
        prompt: int,
        output: int,
        *,
        tenant: str = "Bulk",
        name: str | None = None,
        **fields: Any,
    ) -> str:
        """A request of ``prompt`` tokens that may produce ``output``."""
        self._num_requests += 1
        request_id = name or f"{priority_class.label[0].upper()}{self._num_requests}"
        request = Request(
            request_id=RequestId(request_id),
            tenant_id=tenant,
            priority_class=priority_class,
            prompt_token_ids=range(prompt),
            max_tokens=output,
            **fields,
        )
        self.stories[request_id] = Story(request, self.now_us)
        self.engine.submit(request, self.now_us)
        return request_id

    def many(self, count: int, priority_class: PriorityClass, prompt: int, output: int, **fields: Any) -> list[str]:
        return [self.submit(priority_class, prompt, output, **fields) for _ in range(count)]

    def cancel(self, request_id: str, reason: str = "client") -> None:
        self.engine.cancel(RequestId(request_id), reason, self.now_us)

    def run_step(self) -> StepEvents:
        """Plan, obey, apply, check."""
        plan = self.engine.plan_step(self.now_us)
        if self.check:
            self.engine.check_books()
        self.obey(plan)
        duration_us = self.duration_us(plan)
        result = StepResult(
            step=plan.step,
            duration_us=duration_us,
            sampled_token_ids=[self._sample(row.request_id, row.samples, len(row.output_ids)) for row in plan.rows],
            stopped=frozenset(RequestId(i) for i in self.stop_next),
            failed=tuple(self.fail_next[row.request_id] for row in plan.rows if row.request_id in self.fail_next),
            completed_copies=self._completed_copies(plan),
        )
        self.fail_next, self.stop_next = {}, set()
        self.now_us += duration_us or 1_000
        self.busy_us += duration_us
        rows = [(row.request_id, len(row.token_ids), row.start) for row in plan.rows]
        events = self.engine.apply_step(result, self.now_us)
        self.plans.append(plan)
        self.events.append(events)
        self._tell(plan, events)
        if self.check:
            self._check(plan, rows, events)
        self.step += 1
        return events

    def obey(self, plan: StepPlan) -> None:
        """For a device that has contents."""

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.run_step()

    def run_until(self, done: Callable[[], bool], limit: int = 20_000) -> None:
        for _ in range(limit):
            if done():
                return
            self.run_step()
        raise AssertionError(f"not done after {limit} steps: {self.unfinished()[:10]}")

    def finish(self, limit: int = 20_000) -> None:
        """Run until nobody is left, and see that everything came back (J7)."""
        self.run_until(lambda: not self.engine.has_work, limit)
        load = self.engine.load(self.now_us)
        assert (load.num_free_blocks, load.num_free_host_blocks) == (load.num_blocks, load.num_host_blocks)
        assert load.num_free_slots == load.num_slots
        assert not self.unfinished()

    def teach(self, priority_class: PriorityClass, *, output: int) -> None:
        """Let the engine learn that outputs of a class are ``output`` tokens long."""
        for _ in range(6):
            self.submit(priority_class, 8, output, tenant="Teacher")
            self.finish()
        self.stories.clear()

    # looking

    def story(self, request_id: str) -> Story:
        return self.stories[request_id]

    def unfinished(self) -> list[str]:
        return [request_id for request_id, story in self.stories.items() if not story.has_ended]

    def duration_us(self, plan: StepPlan) -> int:
        """The step model: rows, and copies that hold up the forward."""
        if plan.is_empty:
            return 0
        copies = len(plan.swap_out) + len(plan.swap_in)
        copies_ns = self.cost.copy_ns(copies, self.config.bytes_per_block)
        rows_ns = sum(self.cost.row_ns(row.start, len(row.token_ids)) for row in plan.rows)
        return (self.cost.base_ns + rows_ns + copies_ns) // 1_000

    def board(self) -> dict[str, str]:
        return {row.request_id: row.state for row in self.engine.load(self.now_us).board}

    def levers(self) -> Counter[str]:
        """Preemptions that took a slot or memory, by lever; step-time holds are counted apart."""
        return Counter(p.lever.value for e in self.events for p in e.preempted if p.resource is not Resource.STEP_TIME)

    def gpu_us(self) -> Counter[str]:
        """Device time by tenant, over ended requests."""
        spent: Counter[str] = Counter()
        for story in self.stories.values():
            if story.finished is not None:
                spent[story.request.tenant_id] += story.finished.counters.gpu_us
        return spent

    # inside

    def _sample(self, request_id: str, samples: bool, index: int) -> int:
        return self.token(request_id, index) if samples and request_id not in self.fail_next else -1

    def _completed_copies(self, plan: StepPlan) -> tuple[RequestId, ...]:
        if self.config.copies_in_order:
            return ()
        starting = dict.fromkeys(copy.request_id for copy in plan.swap_out)
        self._copies_under_way += [(self.step + self.copy_steps, request_id) for request_id in starting]
        done = tuple(request_id for step, request_id in self._copies_under_way if step <= self.step)
        self._copies_under_way = [entry for entry in self._copies_under_way if entry[0] > self.step]
        return done

    def _tell(self, plan: StepPlan, events: StepEvents) -> None:
        for row in plan.rows:
            story = self.stories[row.request_id]
            if story.first_planned_step is None:
                story.first_planned_step = self.step
        columns = events.tokens
        for request_id, index, token_id in zip(columns.request_ids, columns.indexes, columns.token_ids, strict=True):
            story = self.stories[request_id]
            assert index == len(story.token_ids) + len(story.request.delivered_token_ids), f"{request_id} lost a token"
            story.token_ids.append(token_id)
            story.token_us.append(self.now_us)
        for preempted in events.preempted:
            self.stories[preempted.request_id].preempted.append((self.step, preempted))
        for request_id in events.resumed:
            self.stories[request_id].resumed_steps.append(self.step)
        for finished in events.finished:
            story = self.stories[finished.request_id]
            assert not story.has_ended, f"{finished.request_id} ended twice"
            queued_us = sum(wait.duration_us for wait in finished.counters.waits if wait.phase == "queued")
            assert queued_us == finished.counters.queue_us, f"{finished.request_id}: the causes are not the wait"
            story.finished = finished
        for rejected in events.rejected:
            story = self.stories[rejected.request_id]
            assert not story.has_ended, f"{rejected.request_id} ended twice"
            assert not story.token_ids, f"{rejected.request_id} was shed after its first token"
            assert not story.preempted, f"{rejected.request_id} was preempted and then shed as if new (J4)"
            story.rejected = rejected

    def _check(self, plan: StepPlan, rows: list[tuple[RequestId, int, int]], events: StepEvents) -> None:
        self.engine.check_books()  # J1, and every other book
        load = self.engine.load(self.now_us)
        assert load.charged_us == load.busy_us == self.busy_us, "J6: charges are not the busy time"
        assert len({request_id for request_id, _, _ in rows}) == len(rows), "a request has two rows in one step"
        for request_id, num_tokens, start in rows:
            assert num_tokens > 0
            assert start >= 0
            assert request_id in self.stories
        self._check_preemptions(plan, events)
        self._check_progress(plan, load.num_free_blocks)

    def _check_preemptions(self, plan: StepPlan, events: StepEvents) -> None:
        planned = {row.request_id for row in plan.rows}
        fenced = {copy.request_id for copy in plan.swap_out} if not self.config.copies_in_order else set()
        for preempted in events.preempted:
            if preempted.by is None:
                continue
            victim = self.stories[preempted.request_id].request.priority_class
            preemptor = self.stories[preempted.by].request.priority_class
            admitted = preempted.by in planned or bool(fenced)
            assert admitted, f"J2: {preempted.request_id} gave way to {preempted.by}, which does not run"
            is_lower = victim > preemptor
            is_equal = victim == preemptor and preempted.resource is Resource.FAIRNESS
            assert is_lower or is_equal, f"J3: {preempted}"

    def _check_progress(self, plan: StepPlan, num_free: int) -> None:
        if plan.is_empty and self.config.copies_in_order:
            assert not self.board(), "J5: a request is on the device and the plan is empty"
            barred = {
                (cell.tenant_id, cell.priority_class)
                for cell in self.engine.policy.tenants
                if not cell.allowed or cell.concurrency == 0
            }
            waiting = [
                story
                for story in self.stories.values()
                if not story.has_ended and (story.request.tenant_id, story.request.priority_class) not in barred
            ]
            assert not waiting, f"J5: {len(waiting)} wait, {num_free} blocks free, and the plan is empty"


make_policy = policy  # ``World`` has a parameter of that name
