"""A finished draft as the rows an executor sees."""

from __future__ import annotations

from scheduler_engine.draft import Chunk, Draft
from scheduler_engine.plan import NO_DECODES, DecodeColumns, ScheduledRow
from scheduler_engine.state import EngineState


def decodes_of(state: EngineState, draft: Draft) -> DecodeColumns:
    """Decodes that get a row. O(1), and one pass over their outputs' lengths, while they are those of the last step."""
    running = state.running
    running.sit_out(draft.idle)
    batch = running.batch()
    if not batch.owners:
        return NO_DECODES
    num_outputs = list(map(len, batch.outputs))
    return DecodeColumns(
        batch.request_ids, batch.sequences, num_outputs, sum([seats.num_tokens for seats in running.taking_part()])
    )


def row_of(chunk: Chunk) -> ScheduledRow:
    """A prefill chunk."""
    live, count = chunk
    end = live.computed + count
    return ScheduledRow(
        live.request_id,
        live.tokens_between(live.computed, end),
        live.computed,
        live.block_table,
        end == live.total,
        live.output_ids,
        live.sampling,
    )
