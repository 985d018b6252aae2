"""The interpreter's looks for dead cycles keep out of the worker's steps."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpu_worker.serving.garbage import BUSY_INTERVAL_US, IDLE_INTERVAL_US, Sweeper

_LOOKS = """
import gc
from gpu_worker.serving.garbage import keep_out_of_steps
looks = []
keep_out_of_steps()
gc.callbacks.append(lambda phase, about: looks.append(about["generation"]))
kept = [[] for _ in range(2_000_000)]
print(max(looks))
"""


class Knot:
    """Ends only by a look for cycles."""

    num_alive = 0

    def __init__(self) -> None:
        self.itself = self
        Knot.num_alive += 1

    def __del__(self) -> None:
        Knot.num_alive -= 1


@pytest.fixture
def untouched() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(("is_idle", "interval_us"), [(True, IDLE_INTERVAL_US), (False, BUSY_INTERVAL_US)])
def test_all_is_looked_through_a_minute_apart_while_idle_and_ten_while_never_idle(
    is_idle: bool, interval_us: int
) -> None:
    sweeper = Sweeper(now_us=5)
    Knot()
    assert not sweeper.sweep(5 + interval_us - 1, is_idle=is_idle)
    assert Knot.num_alive == 1
    assert sweeper.sweep(5 + interval_us, is_idle=is_idle)
    assert Knot.num_alive == 0
    assert not sweeper.sweep(5 + interval_us + 1, is_idle=is_idle)


def test_two_million_objects_that_stay_bring_about_no_look_at_all_of_them() -> None:
    done = subprocess.run([sys.executable, "-c", _LOOKS], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "1"
