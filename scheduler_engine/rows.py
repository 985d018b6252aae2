"""A finished draft as the rows an executor sees."""

from __future__ import annotations

from scheduler_engine.draft import Draft
from scheduler_engine.live import LiveRequest
from scheduler_engine.plan import ScheduledRow
from scheduler_engine.state import EngineState


def rows_of(state: EngineState, draft: Draft) -> tuple[list[ScheduledRow], list[LiveRequest]]:
    """The rows of a finished draft, and whose they are, aligned. Decodes by class, then prefill chunks."""
    rows: list[ScheduledRow] = []
    owners: list[LiveRequest] = []
    step, any_idle = draft.step, draft.num_idle > 0
    for members in state.running.decoding:
        for live in members.values():
            if any_idle and live.idle_step == step:
                continue
            output_ids = live.output_ids
            tokens = output_ids[-1:] if output_ids else live.tokens_between(live.computed, live.total)
            rows.append(
                ScheduledRow(live.request_id, tokens, live.computed, live.block_table, True, output_ids, live.sampling)
            )
            owners.append(live)
    for live, count in draft.chunks:
        end = live.computed + count
        tokens = live.tokens_between(live.computed, end)
        samples = end == live.total
        rows.append(
            ScheduledRow(
                live.request_id, tokens, live.computed, live.block_table, samples, live.output_ids, live.sampling
            )
        )
        owners.append(live)
    return rows, owners
