"""A device made of a cost model: its pace, its tokens, its patience with any plan."""

from __future__ import annotations

import pytest

from gpu_worker.clock import VirtualClock
from gpu_worker.simulated import BYTE_TOKENS, DEVICES, SimulatedExecutor, readable_tokens
from scheduler_engine.plan import BlockCopy, ScheduledRow, StepPlan
from scheduler_engine.request import RequestId

TOY = DEVICES["toy"]


def prefill(name: str, num_tokens: int, *, start: int = 0, samples: bool = True) -> ScheduledRow:
    return ScheduledRow(RequestId(name), range(num_tokens), start, [0], samples, [], None)


def decode(name: str, position: int, output_ids: list[int]) -> ScheduledRow:
    return ScheduledRow(RequestId(name), [0], position, [0], True, output_ids, None)


def plan(*rows: ScheduledRow, swap_out: tuple[BlockCopy, ...] = ()) -> StepPlan:
    return StepPlan(step=3, chunks=rows, swap_out=swap_out, swap_in=(), token_budget=1_000, wake_at_us=None)


def test_a_step_takes_what_the_cost_model_says_on_the_clock_it_was_given() -> None:
    clock = VirtualClock()
    result = SimulatedExecutor(TOY, clock).execute(plan(prefill("a", 100), decode("b", 49, [1])))
    assert result.duration_us == clock.now_us() == 6_000 + 100 * 45 + 30 + 10  # 150 tokens attended at 65 ns


def test_copies_take_their_time_before_the_forward() -> None:
    clock = VirtualClock()
    copies = tuple(BlockCopy(RequestId("a"), block, block) for block in range(10))
    SimulatedExecutor(TOY, clock).execute(plan(swap_out=copies))
    assert clock.now_us() == 6_000 + 10 * 5 + -(-10 * 65_536 // 10_000)


def test_a_scale_stretches_every_step() -> None:
    slow, fast = VirtualClock(), VirtualClock()
    SimulatedExecutor(TOY, slow, scale=2.0).execute(plan(prefill("a", 100)))
    SimulatedExecutor(TOY, fast).execute(plan(prefill("a", 100)))
    assert slow.now_us() == 2 * fast.now_us()


def test_noise_comes_from_its_seed() -> None:
    def durations(seed: int) -> list[int]:
        executor = SimulatedExecutor(TOY, VirtualClock(), noise_percent=20, seed=seed)
        return [executor.execute(plan(prefill("a", 100))).duration_us for _ in range(20)]

    assert durations(1) == durations(1)
    assert durations(1) != durations(2)
    assert all(8_400 <= duration <= 12_600 for duration in durations(1))


def test_a_text_does_not_depend_on_what_the_request_went_through() -> None:
    alone, crowded = (SimulatedExecutor(TOY, VirtualClock()) for _ in range(2))
    first: list[int] = []
    second: list[int] = []
    for position in range(20):
        first.append(alone.execute(plan(decode("a", position, first))).sampled_token_ids[0])
        crowd = plan(prefill("x", 7), decode("a", position, second), decode("b", 3, [1]))
        second.append(crowded.execute(crowd).sampled_token_ids[1])
        crowded.forget(RequestId("b"))
    assert first == second
    assert len(set(first)) > 5


def test_a_row_that_does_not_reach_its_newest_token_draws_nothing() -> None:
    result = SimulatedExecutor(TOY, VirtualClock()).execute(plan(prefill("a", 8, samples=False), prefill("b", 8)))
    assert result.sampled_token_ids[0] == -1
    assert result.sampled_token_ids[1] >= 0


def test_made_up_text_is_readable_and_never_stops_by_itself() -> None:
    token_bytes = [b"<", b"the", b" cat", b"\xe2\x98", b"", b" ", b"dog"]
    assert readable_tokens(token_bytes, stop_token_ids=(6,)) == (1, 2)
    text = bytes(BYTE_TOKENS[token_id][0] for token_id in readable_tokens(BYTE_TOKENS))
    assert text.isalpha()


@pytest.mark.parametrize("name", sorted(DEVICES))
def test_every_device_can_hold_a_whole_context(name: str) -> None:
    shape = DEVICES[name].shape
    assert shape.num_blocks * shape.block_size >= shape.max_model_len
