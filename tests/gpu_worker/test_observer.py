"""What clients of a simulation saw, and the stories they are in."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.observer import Observer, quantiles_ms
from gpu_worker.stories import Arrival, flood
from scheduler_engine.policy import PriorityClass
from wire.messages import EngineCounters, Finished, Rejected, Submit, Tokens


def arrival(response_id: str, at_us: int) -> Arrival:
    submit = Submit(
        response_id=response_id,
        attempt=1,
        gateway_id="g",
        tenant_id="aurora",
        project_id="p",
        key_id="k",
        priority_class=PriorityClass.INTERACTIVE,
        model="toy",
        prompt_token_ids=(1,),
    )
    return Arrival(at_us, submit)


def tokens(response_id: str, index: int) -> Tokens:
    return Tokens(
        worker_id="w",
        epoch=1,
        step=1,
        response_ids=(response_id,),
        attempts=(1,),
        choices=(0,),
        first_indexes=(index,),
        token_ids=((7,),),
    )


def test_a_first_token_is_timed_from_arrival_and_later_ones_from_each_other() -> None:
    observer = Observer()
    observer.expect(arrival("a", at_us=1_000))
    observer.take([tokens("a", 0)], now_us=31_000)
    observer.take([tokens("a", 1)], now_us=36_000)
    view = observer.classes[PriorityClass.INTERACTIVE]
    assert (view.ttft, view.gaps, view.tokens) == (Counter({30_000: 1}), Counter({5_000: 1}), 2)


def test_a_response_ends_completed_or_shed() -> None:
    observer = Observer()
    for name in ("a", "b"):
        observer.expect(arrival(name, 0))
    end = Finished(
        response_id="a",
        attempt=1,
        choices=(),
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        counters=EngineCounters(queue_us=4_000),
    )
    observer.take([end, Rejected(response_id="b", attempt=1, reason="late", retry_after_us=None)], 9_000)
    view = observer.classes[PriorityClass.INTERACTIVE]
    assert (view.requests, view.completed, view.shed, observer.num_open) == (2, 1, 1, 0)


def test_quantiles_of_nothing_are_none() -> None:
    assert quantiles_ms({}) == {"p50": None, "p95": None, "p99": None, "max": None}


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60))
def test_quantiles_are_the_nearest_rank(values: list[int]) -> None:
    found = quantiles_ms(Counter(values))
    ordered = sorted(values)
    for name, percent in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100)):
        assert found[name] == ordered[-(-len(values) * percent // 100) - 1] / 1_000


def test_the_flood_is_5000_long_prompts_at_once_and_chats_in_bursts_and_the_same_for_a_seed() -> None:
    arrivals = flood(1)
    bulk = [arrival for arrival in arrivals if arrival.submit.tenant_id == "bulk"]
    chats = [arrival for arrival in arrivals if arrival.submit.tenant_id in ("aurora", "nova")]
    assert len(bulk) == 5_000
    assert {arrival.at_us for arrival in bulk} == {0}
    assert all(3_072 <= len(arrival.submit.prompt_token_ids) <= 5_120 for arrival in bulk)
    assert len(chats) > 1_000
    assert len({arrival.submit.response_id for arrival in arrivals}) == len(arrivals)
    assert [arrival.at_us for arrival in flood(1)] == [arrival.at_us for arrival in arrivals]
    assert [arrival.at_us for arrival in flood(2)] != [arrival.at_us for arrival in arrivals]
