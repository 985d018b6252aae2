"""What clients of a simulation saw, and when they come back."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gpu_worker.simulation.clients import Clients, View, quantiles_ms
from gpu_worker.simulation.traffic import Arrival, submit_of
from scheduler_engine.policy import PriorityClass, gpu_classes
from wire.messages import EngineCounters, Finished, Rejected, Tokens


def arrival(response_id: str, at_us: int, *, deadline_us: int | None = None, num_tries: int = 1) -> Arrival:
    interactive = PriorityClass.INTERACTIVE
    submit = submit_of(response_id, "aurora", interactive, prompt_tokens=1, max_tokens=9, deadline_us=deadline_us)
    return Arrival(at_us, submit, num_tries)


def clients_of(*arrivals: Arrival) -> Clients:
    return Clients(arrivals, gpu_classes())


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


def finished(response_id: str) -> Finished:
    counters = EngineCounters(queue_us=4_000)
    return Finished(
        response_id=response_id,
        attempt=1,
        choices=(),
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        counters=counters,
    )


def rejected(response_id: str, retry_after_us: int | None) -> Rejected:
    return Rejected(response_id=response_id, attempt=1, reason="late", retry_after_us=retry_after_us)


def test_a_first_token_is_timed_from_arrival_and_later_ones_from_each_other() -> None:
    clients = clients_of(arrival("a", at_us=1_000))
    clients.send(1_000)
    clients.hear([tokens("a", 0)], now_us=31_000)
    clients.hear([tokens("a", 1)], now_us=36_000)
    view = clients.of_class(PriorityClass.INTERACTIVE)
    assert (view.ttft, view.gaps, view.tokens) == (Counter({30_000: 1}), Counter({5_000: 1}), 2)


def test_a_request_ends_completed_or_shed() -> None:
    clients = clients_of(arrival("a", 0), arrival("b", 0))
    clients.send(0)
    assert clients.num_open == 2
    clients.hear([finished("a"), rejected("b", None)], 9_000)
    view = clients.of_key("aurora")
    assert (view.requests, view.completed, view.shed, view.no_hint) == (2, 1, 1, 1)
    assert (clients.num_open, clients.num_ended, clients.next_at_us) == (0, 2, None)


def test_a_refused_client_comes_back_when_told_to_until_its_tries_are_used_up() -> None:
    clients = clients_of(arrival("a", 0, num_tries=3))
    clients.send(0)
    clients.hear([rejected("a", 2_000_000)], 50_000)
    assert (clients.next_at_us, clients.send(2_049_999)) == (2_050_000, [])
    assert [each.submit.response_id for each in clients.send(2_050_000)] == ["a~2"]
    clients.hear([rejected("a~2", 1_000_000)], 2_060_000)
    clients.send(3_060_000)
    clients.hear([rejected("a~3", 1_000_000)], 3_070_000)
    view = clients.all()
    assert clients.next_at_us is None
    assert (view.requests, view.shed, view.refusals["late"], view.returns, view.returns_kept) == (1, 1, 3, 2, 0)


def test_a_client_gives_up_when_it_is_told_to_come_back_later_than_its_patience_lasts() -> None:
    chat = arrival("a", 0, num_tries=3)
    clients = clients_of(chat, replace(chat, submit=replace(chat.submit, response_id="b"), patience_us=None))
    clients.send(0)
    clients.hear([rejected("a", 120_000_001), rejected("b", 120_000_001)], 0)
    assert clients.all().shed == 1
    assert [each.submit.response_id for each in clients.send(120_000_001)] == ["b~2"]


def test_a_promise_is_kept_when_the_one_that_came_back_gets_its_first_token_timed_from_its_return() -> None:
    clients = clients_of(arrival("a", 0, deadline_us=1_000_000, num_tries=2))
    clients.send(0)
    clients.hear([rejected("a", 5_000_000)], 0)
    clients.send(5_000_000)
    clients.hear([tokens("a~2", 0), finished("a~2")], 5_400_000)
    view = clients.all()
    assert (view.returns, view.returns_kept, view.ttft) == (1, 1, Counter({400_000: 1}))
    assert (view.on_time, view.late, view.completed) == (Counter({5: 1}), 0, 1)


def test_a_first_token_is_late_beyond_its_deadline_and_merely_not_on_time_beyond_its_classs_target() -> None:
    clients = clients_of(arrival("strict", 0, deadline_us=200_000), arrival("soft", 0), arrival("quick", 0))
    clients.send(0)
    clients.hear([tokens("quick", 0)], 300_000)
    clients.hear([tokens("strict", 0), tokens("soft", 0)], 301_000)
    view = clients.all()
    assert (view.on_time.total(), view.late) == (1, 1)


def test_views_add_up_in_every_field() -> None:
    one, other = View(requests=2, tokens=5, first_at_us=7, last_end_us=9), View(requests=1, first_at_us=3)
    one.ttft[4] += 1
    other.ttft[4] += 2
    one.add(other)
    assert (one.requests, one.tokens, one.ttft, one.first_at_us, one.last_end_us) == (3, 5, Counter({4: 3}), 3, 9)


def test_quantiles_of_nothing_are_none() -> None:
    assert quantiles_ms({}) == {"p50": None, "p95": None, "p99": None, "max": None}


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=60))
def test_quantiles_are_the_nearest_rank(values: list[int]) -> None:
    found = quantiles_ms(Counter(values))
    ordered = sorted(values)
    for name, percent in (("p50", 50), ("p95", 95), ("p99", 99), ("max", 100)):
        assert found[name] == ordered[-(-len(values) * percent // 100) - 1] / 1_000
