"""Quiet steps for replays: everybody decodes on, and nobody comes, goes or has to wait.

Made of what ``plan_step`` and ``apply_step`` are made of, without the values that those hand out and without looking
for what cannot be there. Refuses a step in which anything is to be decided.
"""

from __future__ import annotations

from scheduler_engine.budget import StepBudget
from scheduler_engine.chain import NoDigest
from scheduler_engine.charging import charge_step
from scheduler_engine.draft import Draft
from scheduler_engine.errors import Misuse
from scheduler_engine.intake import Naming
from scheduler_engine.overload import Rung
from scheduler_engine.plan import DecodeColumns
from scheduler_engine.policy import PriorityClass
from scheduler_engine.rows import decodes_of
from scheduler_engine.save_ahead import is_short
from scheduler_engine.scheduler import Scheduler


class QuietSteps:
    """``plan`` and ``apply`` in turn, in place of the engine's verbs. Always: after each step the engine is what those
    would have made of it, if each row drew token 0 and none stopped. A part of the engine, in a module of its own.
    """

    def __init__(self, engine: Scheduler, *, keeps_digest: bool = True) -> None:
        """Without a digest the engine has none from here on, in no step: for a run that is compared with no log."""
        if type(engine) is not Scheduler:
            raise Misuse(f"a {type(engine).__name__} would not see steps that pass its verbs by")
        self._engine = engine
        self._state = engine._state
        self._draft = Draft(step=0, now_us=0)  # nothing is ever put into it
        self._outputs: tuple[list[int], ...] = ()
        self._next_step = self._last_step = -1  # of the stretch that has begun
        if not keeps_digest:
            self._state.journal.chain = NoDigest()

    def begin(self) -> DecodeColumns | None:
        """Who decodes from here on, before the first step of a quiet stretch; None where there is something to decide.
        O(rows).
        """
        state, running = self._state, self._state.running
        is_quiet = (
            self._engine._plan is None
            and not state.fences
            and state.owed_rank is None
            and state.overload.rung is Rung.CALM
            and not any(queue.num_waiting for queue in state.queues)
            and running.is_quiet
        )
        if not is_quiet:
            return None
        self._next_step = state.step
        self._last_step = state.step + running.num_steps_to_check()
        self._outputs = running.batch().outputs
        return decodes_of(state, self._draft)

    def plan(self, now_us: int) -> bool:
        """False where something is to be decided after all: use the engine's verbs. Only after ``begin``."""
        engine, state, draft = self._engine, self._state, self._draft
        running = state.running
        if not self._may_be_quiet(now_us):
            return False
        state.now_us = state.journal.now_us = now_us
        engine._take_in(now_us)
        token_budget = self._token_budget()
        if token_budget is None:
            return False
        for at_edge in running.at_block_edge:
            for live in tuple(at_edge.values()):
                running.grow(live, state.device.take_one())
                live.granted_step = state.step
        draft.step, draft.now_us = state.step, now_us
        state.journal.close_plan(draft, token_budget=token_budget, wake_at_us=engine._wake_at_us(now_us))
        return True

    def _token_budget(self) -> int | None:
        """Of the step; None where the promises of a class make decodes below it wait. Nothing binds those at the top:
        where nobody asks for the number either, it is 0.
        """
        state, decoding = self._state, self._state.running.decoding
        if not state.journal.chain.is_kept and not any(decoding[1:]):
            return 0
        budget = StepBudget(state, first_token_hold_allowed=False)
        for rank, members in enumerate(decoding):
            if members:
                num_tokens = state.running.decode_tokens[rank]
                if state.cost.decode_ns(len(members), num_tokens) > budget.decode_room_ns(rank):
                    return None
                budget.grant_decodes(len(members), num_tokens)
        return budget.allowed_tokens

    def _may_be_quiet(self, now_us: int) -> bool:
        engine, state = self._engine, self._state
        if not self._next_step == state.step < self._last_step or engine._next_policy is not None:
            return False
        if engine._inputs and not all(type(each) is Naming for each in engine._inputs):
            return False
        if state.timers and state.timers[0][0] <= now_us:
            return False
        num_left = state.device.num_free - sum(map(len, state.running.at_block_edge))
        return num_left >= 0 and not is_short(state, num_left)

    def apply(self, duration_us: int, now_us: int) -> None:
        """What the step meant, as ``apply_step``."""
        state = self._state
        state.journal.now_us = now_us
        charge_step(state, self._draft, duration_us, now_us)
        state.peak.tick()
        for output_ids in self._outputs:
            output_ids.append(0)
        state.running.advance()
        self._engine._hold_allowance.earn(state.classes[PriorityClass.INTERACTIVE], duration_us)
        state.journal.close_step(state.step, duration_us)
        state.step += 1
        self._next_step = state.step
