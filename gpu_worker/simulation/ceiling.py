"""How much batch work a device has left beside chats, whoever schedules it.

Knows arrivals and a cost model; refuses to know how anybody decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker.simulation.traffic import SECOND_US, Arrival
from gpu_worker.simulation.watch import Timeline
from scheduler_engine.policy import PriorityClass

_BUSY_PERCENT = 99


def batch_ceiling(
    chats: Sequence[Arrival], whole: Timeline, alone: Timeline, *, base_us: int, gap_us: int, end_us: int
) -> float | None:
    """The most batch work until ``end_us``, as a share of batch alone; None where batch alone leaves the device idle.

    A chat makes one token a step: while one decodes, steps are no longer than the gap its tokens may have, and each
    pays the fixed part. Longer steps are not allowed and shorter ones are more of them, though chats are then over
    sooner: n tokens take n steps at any pace, which chats that overlap share, and the slower they are the more they do.
    """
    seconds = [second for number, second in alone.seconds.items() if number * SECOND_US < end_us]
    num_steps, busy_us = sum(second.steps for second in seconds), sum(second.busy_us for second in seconds)
    if 100 * busy_us < _BUSY_PERCENT * end_us:
        return None
    decoding_us = _covered_us(
        [(each.at_us, each.at_us + (each.submit.max_tokens - 1) * gap_us) for each in chats], end_us
    )
    num_steps_beside = decoding_us / gap_us + (end_us - decoding_us) / (busy_us / num_steps)
    chat_us = whole.work_us(PriorityClass.INTERACTIVE, 0, end_us)
    return (end_us - base_us * num_steps_beside - chat_us) / alone.work_us(PriorityClass.BATCH, 0, end_us)


def _covered_us(spans: Sequence[tuple[int, int]], end_us: int) -> int:
    """Length of the union of spans, up to the end."""
    covered_us = until_us = 0
    for first_us, last_us in sorted(spans):
        first_us, last_us = max(first_us, until_us), min(last_us, end_us)
        if last_us > first_us:
            covered_us += last_us - first_us
            until_us = last_us
    return covered_us
