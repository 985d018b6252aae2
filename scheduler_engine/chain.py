"""A digest of everything the engine has decided: each step's is made of the one before, the plan and the records.

Knows bytes and integers; refuses to know what they mean.
"""

from __future__ import annotations

import struct
from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

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

    is_kept = True

    def __init__(self) -> None:
        self.digest = bytes(DIGEST_BYTES)
        self._plan = b""

    def note_plan(self, state: EngineState, draft: Draft, *, token_budget: int, wake_at_us: int | None) -> None:
        """Call it before the step changes anything, once it is known who decodes: tables are live."""
        running, chunks = state.running, draft.chunks
        owners = running.batch().owners
        num_rows = len(owners) + len(chunks)
        totals = _TOTALS.pack(
            draft.now_us,
            num_rows,
            token_budget,
            -1 if wake_at_us is None else wake_at_us,
            state.device.num_free,
            state.host.num_free,
            running.num_slots_used,
            len(state.lives),
            state.accountant.busy_us & (2**63 - 1),
            len(draft.idle),
            *running.decode_tokens,
        )
        parts = [totals]
        if chunks or draft.swap_out or draft.swap_in:
            parts += [_PAIR.pack(chunk.live.sequence_number, chunk.num_tokens) for chunk in chunks]
            parts += [_PAIR.pack(copy.device_block, copy.host_block) for copy in (*draft.swap_out, *draft.swap_in)]
        if num_rows:
            place = draft.step % num_rows
            live = owners[place] if place < len(owners) else chunks[place - len(owners)].live
            parts += [_PAIR.pack(live.sequence_number, live.computed), array("q", live.block_table).tobytes()]
        self._plan = b"".join(parts)

    def close_step(self, step: int, duration_us: int, now_us: int, records: bytes) -> None:
        self.digest = blake2b(
            self.digest + _STEP.pack(step, duration_us, now_us) + self._plan + records, digest_size=DIGEST_BYTES
        ).digest()
        self._plan = b""


class NoDigest(DigestChain):
    """In place of one that nobody compares with anything."""

    is_kept = False

    def note_plan(self, state: EngineState, draft: Draft, *, token_budget: int, wake_at_us: int | None) -> None:
        pass

    def close_step(self, step: int, duration_us: int, now_us: int, records: bytes) -> None:
        pass
