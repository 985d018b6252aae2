"""A digest of everything the engine has decided: each step's is made of the one before, the plan and the records.

Knows bytes and integers; refuses to know what they mean.
"""

from __future__ import annotations

import struct
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

from scheduler_engine.plan import StepPlan

if TYPE_CHECKING:
    from scheduler_engine.draft import Draft
    from scheduler_engine.state import EngineState

DIGEST_BYTES = 16
_TOTALS = struct.Struct("<13q")
_PAIR = struct.Struct("<QQ")
_STEP = struct.Struct("<qqq")


class DigestChain:
    """Always: two engines have equal digests after a step only when they decided the same in every step up to it.

    A plan counts by its chunks and copies, by the sums over what it holds, and by one of its rows in full, another one
    in each step: a difference that the sums hide shows within as many steps as there are rows.
    """

    def __init__(self) -> None:
        self.digest = bytes(DIGEST_BYTES)
        self._plan = b""

    def note_plan(self, state: EngineState, draft: Draft, plan: StepPlan) -> None:
        """Call it before the step changes anything: rows are live views."""
        running = state.running
        totals = _TOTALS.pack(
            draft.now_us,
            plan.num_rows,
            plan.token_budget,
            -1 if plan.wake_at_us is None else plan.wake_at_us,
            state.device.num_free,
            state.host.num_free,
            running.num_slots_used,
            len(state.lives),
            state.accountant.busy_us & (2**63 - 1),
            len(draft.idle),
            *running.decode_tokens,
        )
        parts = [totals]
        parts += [_PAIR.pack(chunk.live.sequence_number, chunk.num_tokens) for chunk in draft.chunks]
        parts += [_PAIR.pack(copy.device_block, copy.host_block) for copy in (*draft.swap_out, *draft.swap_in)]
        owners = running.batch().owners
        if owners or draft.chunks:
            place = draft.step % plan.num_rows
            live = owners[place] if place < len(owners) else draft.chunks[place - len(owners)].live
            parts += [_PAIR.pack(live.sequence_number, live.computed), array("q", live.block_table).tobytes()]
        self._plan = b"".join(parts)

    def close_step(self, step: int, duration_us: int, now_us: int, records: bytes) -> None:
        self.digest = blake2b(
            self.digest + _STEP.pack(step, duration_us, now_us) + self._plan + records, digest_size=DIGEST_BYTES
        ).digest()
        self._plan = b""
