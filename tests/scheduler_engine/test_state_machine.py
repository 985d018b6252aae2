"""Whatever comes, in whatever order, on whatever device: the books balance after every step and everybody ends once.

The invariants J1 to J7 are asserted by ``World`` after each step; this file only makes trouble.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from scheduler_engine.events import FinishReason
from scheduler_engine.plan import RowFailure
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from scheduler_engine.request import RequestId
from tests.scheduler_engine.contents import SharingWorld, prefix
from tests.scheduler_engine.world import World, policy

TENANTS = ("Aurora", "Bulk", "Nova")
classes = st.sampled_from(list(PriorityClass))


class Trouble(RuleBasedStateMachine):
    """Submits, cancels, failures, stops, late copies, policy edits and time, on a small device of any shape."""

    world: World

    @initialize(
        num_blocks=st.integers(8, 48),
        num_host_blocks=st.integers(0, 64),
        num_slots=st.integers(1, 6),
        token_budget=st.sampled_from([16, 64, 512]),
        copies_in_order=st.booleans(),
        copy_steps=st.integers(0, 3),
        slow_link=st.booleans(),
    )
    def start(self, *, slow_link: bool, num_blocks: int, num_slots: int, token_budget: int, **fields: Any) -> None:
        self.world = SharingWorld(
            num_blocks,
            num_slots,
            token_budget,
            policy=policy(chunk_min=8, quantum_steps=3, fairness_gap_ms=40),
            bytes_per_block=500_000_000 if slow_link else 2_097_152,
            **fields,
        )
        self.seed = 0

    @rule(
        priority_class=classes,
        tenant=st.sampled_from(TENANTS),
        prompt=st.integers(1, 300),
        output=st.integers(1, 120),
        count=st.integers(1, 4),
        reproducible=st.booleans(),
        hard_deadline_us=st.none() | st.integers(1, 400_000),
        max_queue_wait_us=st.none() | st.integers(0, 400_000),
        completion_deadline_us=st.none() | st.integers(1, 3_000_000),
        value_micros=st.sampled_from([1, 1, 10]),
        is_return=st.booleans(),
        num_delivered=st.sampled_from([0, 0, 0, 5]),
        response_has_started=st.sampled_from([False, False, True]),
        text=st.sampled_from(["", "", "system", "story"]),
    )
    def submit(
        self,
        *,
        priority_class: PriorityClass,
        prompt: int,
        output: int,
        count: int,
        num_delivered: int,
        text: str,
        **fields: Any,
    ) -> None:
        fields["delivered_token_ids"] = tuple(range(num_delivered))
        fields["prefix_keys"] = prefix(text, prompt // 16) if text else ()
        for _ in range(count):
            self.world.submit(priority_class, prompt, output, **fields)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        unfinished = self.world.unfinished()
        if unfinished:
            self.world.cancel(data.draw(st.sampled_from(unfinished)))

    @rule(data=st.data(), poison=st.booleans())
    def fail_rows(self, data: st.DataObject, *, poison: bool) -> None:
        unfinished = self.world.unfinished()
        if unfinished:
            for request_id in data.draw(st.lists(st.sampled_from(unfinished), max_size=3)):
                self.world.fail_next[request_id] = RowFailure(RequestId(request_id), "not_finite", poison)

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        unfinished = self.world.unfinished()
        if unfinished:
            self.world.stop_next.add(data.draw(st.sampled_from(unfinished)))

    @rule(
        floor=st.integers(0, 30),
        slots=st.integers(1, 100),
        memory=st.integers(1, 100),
        weight=st.integers(1, 9),
        concurrency=st.none() | st.integers(0, 3),
    )
    def edit_policy(self, *, floor: int, slots: int, memory: int, weight: int, concurrency: int | None) -> None:
        """``memory`` is how large the pool is to newcomers: it grows and shrinks under those who run."""
        cell = TenantClassPolicy(
            tenant_id="Nova", priority_class=PriorityClass.BATCH, weight=weight, concurrency=concurrency
        )
        self.world.engine.set_policy(
            policy(cell, floor_percent=floor, cap_slots_percent=slots, cap_memory_percent=memory, chunk_min=8)
        )

    @rule(copy_steps=st.integers(0, 6))
    def change_the_link(self, *, copy_steps: int) -> None:
        """Copies that are under way keep their time: those that start now may overtake them."""
        self.world.copy_steps = copy_steps

    @rule(priority_class=classes, tenant=st.sampled_from(TENANTS), gpu_us=st.integers(0, 10_000_000))
    def hear_of_other_workers(self, *, priority_class: PriorityClass, tenant: str, gpu_us: int) -> None:
        self.world.engine.set_service_elsewhere(priority_class, tenant, gpu_us)

    @rule(num_steps=st.integers(1, 25))
    def run(self, num_steps: int) -> None:
        self.world.run(num_steps)

    @precondition(lambda self: self.world.unfinished())
    @rule(wait_us=st.integers(1, 2_000_000))
    def let_time_pass(self, wait_us: int) -> None:
        self.world.now_us += wait_us

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        engine = self.world.engine
        engine.set_policy(replace(engine.policy, tenants=()))  # whoever is barred would wait for ever
        self.world.finish(limit=30_000)
        for story in self.world.stories.values():
            if story.finished is None or story.finished.reason not in (FinishReason.LENGTH, FinishReason.STOP):
                continue
            first = len(story.request.delivered_token_ids)
            assert story.token_ids == [1_000 + first + i for i in range(len(story.token_ids))]
            assert story.finished.prompt_tokens == len(story.request.prompt_token_ids)


class LongTrouble(Trouble):
    """The same for longer."""


_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

TestTrouble = Trouble.TestCase
TestTrouble.settings = settings(max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=_CHECKS)

TestLongTrouble = pytest.mark.soak(LongTrouble.TestCase)
TestLongTrouble.settings = settings(
    max_examples=1_500, stateful_step_count=60, deadline=None, suppress_health_check=_CHECKS
)
