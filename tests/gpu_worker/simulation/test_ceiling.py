"""How much batch work is left beside chats, whoever schedules it."""

from __future__ import annotations

import pytest

from gpu_worker.simulated import DEVICES
from gpu_worker.simulation.ceiling import batch_ceiling
from gpu_worker.simulation.traffic import SECOND_US, Arrival, submit_of
from gpu_worker.simulation.watch import Second, Timeline
from scheduler_engine.policy import PriorityClass

BATCH, INTERACTIVE = PriorityClass.BATCH, PriorityClass.INTERACTIVE
BASE_US, GAP_US = 6_000, 50_000


def timeline(priority_class: PriorityClass, *, work_us: int, steps: int, busy_us: int = SECOND_US) -> Timeline:
    """One second."""
    found = Timeline({}, DEVICES["toy"].cost)
    found.seconds[0] = Second(busy_us=busy_us, steps=steps)
    found.seconds[0].work_ns[priority_class] = work_us * 1_000
    return found


def chat(name: str, at_us: int, num_gaps: int) -> Arrival:
    submit = submit_of(name, "aurora", INTERACTIVE, prompt_tokens=64, max_tokens=num_gaps + 1)
    return Arrival(at_us, submit)


def ceiling(*chats: Arrival, busy_us: int = SECOND_US) -> float | None:
    whole = timeline(INTERACTIVE, work_us=40_000, steps=15)
    alone = timeline(BATCH, work_us=940_000, steps=10, busy_us=busy_us)
    return batch_ceiling(chats, whole, alone, base_us=BASE_US, gap_us=GAP_US, end_us=SECOND_US)


def test_steps_are_as_short_as_the_gap_while_chats_decode_and_as_long_as_alone_else() -> None:
    """Half a second in steps of 50 ms, half in steps of 100: 15 fixed parts of 6 ms, and 40 ms for the chats."""
    left = (1_000_000 - 15 * 6_000 - 40_000) / 940_000
    assert ceiling(chat("one", 0, 10)) == pytest.approx(left)
    assert ceiling(chat("one", 0, 10), chat("beside it", 100_000, 4)) == pytest.approx(left)
    assert ceiling(chat("one", 0, 5), chat("after it", 500_000, 5)) == pytest.approx(left)
    assert ceiling(chat("beyond the end", 500_000, 90)) == pytest.approx(left)


def test_there_is_no_ceiling_where_batch_alone_would_not_fill_the_device() -> None:
    assert ceiling(chat("one", 0, 10), busy_us=900_000) is None
