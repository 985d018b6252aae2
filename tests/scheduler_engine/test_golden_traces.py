"""Traces that lie in the tree decide the same again, bit for bit. One that does not: a decision has changed.

Was it meant? Then record them anew (``python -m tests.gpu_worker.replay.golden``) and say in the commit what changed.
"""

from __future__ import annotations

import pytest

from gpu_worker.replay.record_log import LogFile
from gpu_worker.replay.rerun import Diverged, replay
from tests.gpu_worker.replay.golden import FOLDER, NUM_STEPS, TRACES


@pytest.mark.parametrize("name", TRACES)
def test_a_golden_trace_replays_bit_for_bit(name: str) -> None:
    try:
        found = replay([LogFile(FOLDER / f"{name}.rlog")])
    except Diverged as error:
        pytest.fail(f"{error}\nMeant? Then: .venv/bin/python -m tests.gpu_worker.replay.golden")
    assert found.num_steps >= NUM_STEPS
    assert not found.is_cut
    found.engine.check_books()
