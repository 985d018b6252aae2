"""How long a step may be, and what still fits into it.

Knows promises and predicted costs; refuses to know who asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler_engine.floors import WINDOW_US
from scheduler_engine.policy import RANKS, ClassPolicy, PriorityClass
from scheduler_engine.state import EngineState

_ACTIVE_WINDOW_US = 60_000_000
_UNLIMITED_NS = 1 << 62
_FIRST_TOKEN_STRETCH_PERCENT = 5  # what lower classes may add to a step that brings a first token: not worth a hold
_GAP_PERCENT = 99  # of the promised gap is planned for: a prediction may err a little
_CHEAP_PERCENT = 4  # throughput of lower classes that steps shorter than the policy's cap may cost
_DEAR_PERCENT = 20  # and that a cap may cost at all: beyond, steps are longer than it (a device slower than its policy)
_CONSIDERATE_PERCENT = 10  # and that a tenant with a class nearly to itself gives up for those who come seldom
_LEAST_DEBT_PERCENT = 25  # of the step that a class in debt gets, and twice its floor where that is more


class HoldAllowance:
    """Device time that holding lower classes for a first token may cost: ``governor_off`` percent, over the window.

    A held row loses nothing but its share of the step's fixed cost, which somebody pays once more. Always: 0 <= left <=
    cap.
    """

    def __init__(self) -> None:
        self._left = 0  # hundredths of a microsecond
        self._is_new = True

    def earn(self, policy: ClassPolicy, duration_us: int) -> None:
        cap = policy.governor_off_percent * WINDOW_US
        self._left = cap if self._is_new else min(cap, self._left + policy.governor_off_percent * duration_us)
        self._is_new = False

    def spend(self, base_us: int) -> None:
        self._left = max(0, self._left - 100 * base_us)

    def covers(self, base_us: int) -> bool:
        return self._is_new or self._left >= 100 * base_us


class StepBudget:
    """One step's room, in predicted nanoseconds and tokens. Always: ``spent_ns`` is the predicted cost of all that was
    granted.

    Limits have an origin: the promises of a class bind the classes below it, and its own prefills, never its own
    decodes. A class without promises above or beside it is bound by its token budget alone.
    """

    def __init__(self, state: EngineState, *, first_token_hold_allowed: bool) -> None:
        self._state = state
        self._cost = state.cost
        self.spent_ns = state.cost.base_ns
        self.num_tokens = 0
        self.first_token_hold_allowed = first_token_hold_allowed
        self._limits_ns: list[int] = []
        self._caps_ns: list[int] = []
        self._gap_ns = _UNLIMITED_NS
        for rank, policy in enumerate(state.classes):
            gap_ns = cap_ns = _UNLIMITED_NS
            if policy.tbt_target_ms is not None and state.running.decoding[rank]:
                gap_ns = policy.tbt_target_ms * 10_000 * _GAP_PERCENT  # the longest step that gap between tokens bears
                self._gap_ns = min(self._gap_ns, gap_ns)
            if policy.ttft_target_ms is not None:
                cap_ns = self._cap_ns(rank, policy.ttft_target_ms * 10_000 * policy.step_cap_percent)
            self._limits_ns.append(gap_ns if gap_ns < cap_ns else cap_ns)
            self._caps_ns.append(cap_ns)
        self._first_token_limit_ns = _UNLIMITED_NS
        self._has_prefill = [False for _ in RANKS]
        self._debts = state.floors.debts()

    def _cap_ns(self, rank: int, cap_ns: int) -> int:
        """How long a step may be while the class was active in the last minute: who arrives in the middle of one waits
        for its end. ``cap_ns``, the policy's share of the time to a first token; for the most urgent class less where
        that is cheap, and never so little that it is dear.
        """
        state = self._state
        last_active_us = state.last_active_us[rank]
        if last_active_us is None or state.now_us - last_active_us > _ACTIVE_WINDOW_US:
            return _UNLIMITED_NS
        if rank != PriorityClass.INTERACTIVE:
            return cap_ns
        lower = [lower for lower, num_lives in enumerate(state.num_lives) if lower != rank and num_lives]
        if not lower:
            return cap_ns
        work_ns = self._work_alone_ns(lower)
        return max(self._length_ns(work_ns, _DEAR_PERCENT), min(cap_ns, self._length_ns(work_ns, _CHEAP_PERCENT)))

    def _considerate_ns(self, rank: int) -> int:
        """How long prompts of a tenant that has a class nearly to itself may make a step: a tenth of the class's time
        to a first token, or more where that is dear. Whoever comes seldom waits for the end of such a step.
        """
        target_ms = self._state.classes[rank].ttft_target_ms or 0
        return max(target_ms * 100_000, self._length_ns(self._work_alone_ns([rank]), _CONSIDERATE_PERCENT))

    def _work_alone_ns(self, lower: Sequence[int]) -> int:
        """Work of the step that these classes would make without anybody else."""
        state, running = self._state, self._state.running
        num_rows = sum(len(running.decoding[rank]) for rank in lower)
        num_prefill = max(0, state.classes[lower[-1]].token_budget_max - num_rows)
        decodes_ns = self._cost.decode_ns(num_rows, sum(running.decode_tokens[rank] for rank in lower))
        return decodes_ns + self._cost.prefill_ns(0, num_prefill)

    def _length_ns(self, work_ns: int, lost_percent: int) -> int:
        """The step whose share of work is ``lost_percent`` below that of a step with ``work_ns`` of it.

        A step of length L with a fixed part b does L - b of work. With k the share that is kept and L0 = b + work:
        (L - b) / L = k (L0 - b) / L0, so L = b L0 / (L0 - k (L0 - b)).
        """
        base_ns = self._cost.base_ns
        alone_ns = base_ns + work_ns
        return 100 * base_ns * alone_ns // max(1, 100 * alone_ns - (100 - lost_percent) * work_ns)

    @property
    def tightest_ns(self) -> int:
        return min(self._limits_ns)

    @property
    def allowed_tokens(self) -> int:
        """Tokens the step may compute in all: those granted and the prefill that would still fit."""
        room_ns = max(0, self.tightest_ns - self.spent_ns)
        most = max(0, self._state.widest_step - self.num_tokens)
        more = self._cost.prefill_fitting(room_ns, start=0, most=most)
        return self.num_tokens + more

    def decode_room_ns(self, rank: int) -> int:
        """What decodes of the class may still take: the promises of the classes above bind them."""
        if rank == PriorityClass.BATCH and self._state.overload.is_suspended:
            return 0
        limit_ns = min([self._first_token_limit_ns, *self._limits_ns[:rank]])
        room_ns = limit_ns - self.spent_ns
        if self._debts[rank]:
            room_ns = max(room_ns, self._debt_ns(rank))
        return room_ns

    def chunk(self, rank: int, *, start: int, rest: int, is_considerate: bool = False) -> int:
        """Tokens of a prefill at ``start`` that fit, 0 for none; fewer for one that leaves others room. A class that
        promises a first token, a class in debt and a step that is empty so far get at least ``chunk_min``, once.
        """
        policy = self._state.classes[rank]
        tokens = policy.token_budget_max - self.num_tokens
        if self._debts[rank] and not self._has_prefill[rank]:
            tokens = max(tokens, policy.chunk_min)
        most = min(rest, policy.chunk_max, tokens)
        if most <= 0:
            return 0
        limit_ns = self._prefill_limit_ns(rank)
        if is_considerate:
            limit_ns = min(limit_ns, self._considerate_ns(rank))
        room_ns = limit_ns - self.spent_ns - self._reserved_below_ns(rank)
        fitting = self._cost.prefill_fitting(room_ns, start=start, most=most)
        least = min(most, policy.chunk_min)
        if fitting >= least:
            return most if self._is_small_rest(most - fitting, least, start, most) else fitting
        if self._first_token_limit_ns != _UNLIMITED_NS and not self._debts[rank]:
            return 0
        is_owed = policy.ttft_target_ms is not None or self._debts[rank] or self.num_tokens == 0
        return least if is_owed and not self._has_prefill[rank] else 0

    def _prefill_limit_ns(self, rank: int) -> int:
        """A prefill is bound by every gap between tokens and by the caps of the classes above; by the cap of its own
        class twice over: it is what the others of the class would wait for anyway, and each cut costs a step's fixed
        part.
        """
        return min([self._gap_ns, self._first_token_limit_ns, 2 * self._caps_ns[rank], *self._caps_ns[:rank]])

    def _is_small_rest(self, rest: int, least: int, start: int, most: int) -> bool:
        """Not worth a step of its own, and no gap between tokens grows over its promise by taking it along."""
        return rest < least and self.spent_ns + self._cost.prefill_ns(start, most) <= self._gap_ns

    def _reserved_below_ns(self, rank: int) -> int:
        """Room set apart for lower classes: their decodes where they may not be held, and their floors."""
        running = self._state.running
        reserved_ns = 0
        for lower in range(rank + 1, len(PriorityClass)):
            if not self.first_token_hold_allowed or self._state.classes[rank].ttft_target_ms is None:
                reserved_ns += self._cost.decode_ns(len(running.decoding[lower]), running.decode_tokens[lower])
            elif self._debts[lower]:
                reserved_ns += self._debt_ns(lower)
        return reserved_ns

    def _debt_ns(self, rank: int) -> int:
        """What a class in debt gets of the step, whatever the promises of those above it."""
        percent = min(100, max(_LEAST_DEBT_PERCENT, 2 * self._state.classes[rank].floor_percent))
        return self.tightest_ns * percent // 100

    def grant_prefill(self, rank: int, *, start: int, count: int) -> None:
        self.spent_ns += self._cost.prefill_ns(start, count)
        self.num_tokens += count
        self._has_prefill[rank] = True

    def grant_decodes(self, num_rows: int, num_tokens_attended: int) -> None:
        self.spent_ns += self._cost.decode_ns(num_rows, num_tokens_attended)
        self.num_tokens += num_rows

    def grant_copies(self, cost_ns: int) -> None:
        self.spent_ns += cost_ns

    def guard_first_token(self) -> None:
        """A first token is on its way: from here on, lower classes make the step hardly longer."""
        stretched_ns = self.spent_ns * (100 + _FIRST_TOKEN_STRETCH_PERCENT) // 100
        self._first_token_limit_ns = min(self._first_token_limit_ns, stretched_ns)
