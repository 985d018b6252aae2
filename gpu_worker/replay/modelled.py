"""A run that might have been: the traffic of a log, an engine, and a device that is a fitted model.

Knows inputs and step times; refuses to compare.
"""

from __future__ import annotations

from collections.abc import Callable

from gpu_worker.replay.fitting import Load, Weather, decodes_load, load_of
from gpu_worker.replay.reality import Reality
from gpu_worker.replay.record_log import Boot, Policy, Submitted
from gpu_worker.replay.rerun import request_of, tell
from gpu_worker.replay.tally import Stretch, Tally
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.policy import PolicySnapshot
from scheduler_engine.quiet import QuietSteps
from scheduler_engine.request import RequestId
from scheduler_engine.scheduler import Scheduler

_ENDLESS = 1 << 62
_REPORT_STEPS = 200


class ModelledRun:
    """Always: requests that came to their own end are as long as they were; others are as long as the median of their
    tenant's in their class, or as they were allowed to be.
    """

    def __init__(
        self, boot: Boot, engine: Scheduler, reality: Reality, policy: PolicySnapshot | None, weather: Weather
    ) -> None:
        self.tally = Tally(reality.tally.elsewhere)
        self.num_assumed = 0  # requests whose length had to be assumed
        self._engine = engine
        self._quiet = QuietSteps(engine, keeps_digest=False)
        if policy is not None:
            self._engine.set_policy(policy)
        self._inputs = [each for each in reality.inputs if policy is None or not isinstance(each.entry, Policy)]
        self._lengths = dict(reality.tally.lengths)
        self._typical = reality.typical_lengths
        self._model, self._weather = reality.model, weather
        busy = max(1, reality.tally.num_steps)
        self._within_us, self._between_us = reality.within_us // busy, reality.between_us // busy
        self._until_us = reality.tally.ended_us
        self._now_us = boot.now_us or (reality.began_us[0] if reality.began_us else 0)
        self._began_us = self._now_us
        self._next = 0

    def run(self, show: Callable[[float], None]) -> Tally:
        """To the moment at which the log ends."""
        self._run_until(self._until_us, show)
        self.tally.ended_us = self._until_us  # rates of both are over the same span
        return self.tally

    def run_on(self) -> Tally:
        """Without new traffic, until nobody is left, at most as long again as the log is."""
        self.tally.is_over = True
        self._inputs = self._inputs[: self._next]
        self._run_until(2 * self._until_us - self._began_us, lambda done: None)
        return self.tally

    def _run_until(self, until_us: int, show: Callable[[float], None]) -> None:
        span_us = max(1, self._until_us - self._began_us)
        num_turns = 0
        while self._now_us < until_us and (self._engine.has_work or self._next < len(self._inputs)):
            self._hear()
            plan = self._engine.plan_step(self._now_us)
            is_empty, result = plan.is_empty, self._execute(plan)
            planned_us, self._now_us = self._now_us, self._now_us + result.duration_us
            self._now_us += 0 if is_empty else self._within_us
            events = self._engine.apply_step(result, self._now_us)
            self.tally.stepped(is_empty, result.duration_us, events, self._engine, planned_us, self._now_us)
            self._now_us += 0 if is_empty else self._between_us
            if is_empty and not (events.rejected or events.finished):
                self._sleep(plan.wake_at_us, until_us)
            self._decode_on(until_us)
            num_turns += 1
            if num_turns % _REPORT_STEPS == 0:
                show((self._now_us - self._began_us) / span_us)

    def _decode_on(self, until_us: int) -> None:
        """Steps in which everybody only decodes on, as they would be one by one."""
        decodes = self._quiet.begin()
        if decodes is None:
            return
        lengths, num_rows, num_attended = self._lengths, len(decodes), decodes.num_attended
        outputs = zip(decodes.request_ids, decodes.num_outputs, strict=True)
        most = min([lengths.get(request_id, _ENDLESS) - num for request_id, num in outputs]) - 1
        num_steps = busy_us = applied_us = 0
        planned_us, first_us = self._now_us, 0
        while num_steps < most and self._now_us < until_us:
            self._hear()
            if not self._quiet.plan(self._now_us):
                break
            duration_us = self._duration_us(decodes_load(num_rows, num_attended))
            applied_us = self._now_us + duration_us + self._within_us
            self._quiet.apply(duration_us, applied_us)
            first_us = first_us or applied_us
            self._now_us = applied_us + self._between_us
            num_attended += num_rows
            num_steps += 1
            busy_us += duration_us
        if num_steps:
            self.tally.decoded(Stretch(decodes.request_ids, num_steps, busy_us, planned_us, first_us, applied_us))

    def _duration_us(self, load: Load) -> int:
        return max(1, round(self._model.predict_us(load) * self._weather.at(self._now_us)))

    def _hear(self) -> None:
        inputs = self._inputs
        while self._next < len(inputs) and inputs[self._next].at_us <= self._now_us:
            entry = inputs[self._next].entry
            if isinstance(entry, Submitted):
                request = request_of(entry)
                self.tally.submitted(request, entry.at_us)
                if request.request_id not in self._lengths:
                    self.num_assumed += 1
                    key = (request.priority_class, request.tenant_id)
                    self._lengths[request.request_id] = self._typical.get(key, request.max_tokens)
            tell(self._engine, entry)
            self._next += 1

    def _execute(self, plan: StepPlan) -> StepResult:
        if plan.is_empty:
            return StepResult(step=plan.step, duration_us=0, completed_copies=self._copied(plan))
        lengths = self._lengths
        outputs = [*zip(plan.decodes.request_ids, plan.decodes.num_outputs, strict=True)]
        outputs += [(chunk.request_id, len(chunk.output_ids)) for chunk in plan.chunks if chunk.samples]
        stopped = [request_id for request_id, num in outputs if num + 1 >= lengths.get(request_id, _ENDLESS)]
        sampled = [0] * len(plan.decodes) + [0 if chunk.samples else -1 for chunk in plan.chunks]
        return StepResult(
            step=plan.step,
            duration_us=self._duration_us(load_of(plan)),
            sampled_token_ids=sampled,
            stopped=frozenset(stopped),
            completed_copies=self._copied(plan),
        )

    def _copied(self, plan: StepPlan) -> tuple[RequestId, ...]:
        """Copies that are not in order are taken to be complete at the end of their step."""
        if self._engine.config.copies_in_order:
            return ()
        return tuple(dict.fromkeys(copy.request_id for copy in plan.swap_out))

    def _sleep(self, wake_at_us: int | None, until_us: int) -> None:
        """To the next input or timer, or to the end where only an edit of the policy could wake anybody."""
        moments = [] if wake_at_us is None else [wake_at_us]
        if self._next < len(self._inputs):
            moments.append(self._inputs[self._next].at_us)
        self._now_us = max(self._now_us + 1, min(moments, default=until_us))
