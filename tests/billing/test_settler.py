"""The settler: translates, writes, acknowledges after commit, waits out outages."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from django.db import OperationalError

from billing import ledger, selectors
from billing.messages import Counters, Release, Reservation, Settlement
from billing.models import LedgerAlert, LedgerEntry, UsageRequest
from billing.pricing import Terminal, TokenCounts
from gateway import settler
from gateway.settler import Duty, Settler, UnreadableUsage, ledger_message
from scheduler_engine.policy import PriorityClass
from wire.bus import BadEntry, BusError, UsageEntry
from wire.messages import EngineCounters, Released, Reserved, Usage

IDS = {"tenant_id": str(uuid.UUID(int=3)), "project_id": str(uuid.UUID(int=4)), "key_id": str(uuid.UUID(int=5))}
SAME = {**IDS, "priority_class": PriorityClass.DEFAULT, "model": "m", "policy_version": 0, "price_version": 0}


def reserved(number: int = 1) -> Reserved:
    return Reserved(
        response_id=str(uuid.UUID(int=number)),
        source="rest",
        money_micros=0,
        reserved_tokens=612,
        window_id="2026-11",
        **SAME,
    )


def usage(number: int = 1) -> Usage:
    return Usage(
        response_id=str(uuid.UUID(int=number)),
        attempt=1,
        prompt_tokens=100,
        cached_tokens=16,
        output_tokens=20,
        terminal="completed",
        counters=EngineCounters(num_holds=1, num_swaps=2, num_recomputes=3, gpu_us=9, ttft_us=7),
        **SAME,
    )


class Stream:
    """A usage stream in a list. Raises what it is given to raise, once each, before it answers."""

    def __init__(self, messages: Sequence[Any] = (), failures: Sequence[Exception] = ()) -> None:
        self.entries = [UsageEntry(f"{number}-0", message) for number, message in enumerate(messages)]
        self.failures = list(failures)

    def read(self, count: int, timeout_s: float) -> Sequence[UsageEntry]:
        if self.failures:
            raise self.failures.pop(0)
        return self.entries[:count]

    def acknowledge(self, entry_ids: Sequence[str]) -> None:
        self.entries = [entry for entry in self.entries if entry.entry_id not in entry_ids]


class Clock:
    """Waiting is noted instead of done; time stands where it is put."""

    def __init__(self, num_turns: int = 0) -> None:
        self.now_s = 1_000.0
        self.waited_s: list[float] = []
        self._num_turns = num_turns

    def __call__(self) -> float:
        return self.now_s

    def stopped_after(self, seconds: float) -> bool:
        if len(self.waited_s) == self._num_turns:
            return True
        self.waited_s.append(seconds)
        return False


def settler_of(stream: Stream, clock: Clock | None = None, duties: Sequence[Duty] = ()) -> Settler:
    clock = clock or Clock()
    return Settler(stream, clock_s=clock, stopped_after=clock.stopped_after, duties=duties)


def test_each_message_of_the_bus_has_its_words_in_the_books() -> None:
    assert ledger_message(reserved()) == Reservation(
        operation_id=uuid.UUID(int=1),
        tenant_id=uuid.UUID(int=3),
        project_id=uuid.UUID(int=4),
        key_id=uuid.UUID(int=5),
        priority_class="default",
        model="m",
        source="rest",
        money_micros=0,
        reserved_tokens=612,
        window_id="2026-11",
        policy_version=0,
        price_version=0,
    )
    settlement = ledger_message(usage())
    assert isinstance(settlement, Settlement)
    assert settlement.counts == TokenCounts(prompt=100, cached=16, output=20)
    assert settlement.terminal is Terminal.COMPLETED
    assert settlement.counters == Counters(num_preemptions=6, gpu_us=9, ttft_us=7)
    released = Released(response_id=str(uuid.UUID(int=1)), tenant_id=IDS["tenant_id"], reason="worker_lost")
    assert ledger_message(released) == Release(
        operation_id=uuid.UUID(int=1), tenant_id=uuid.UUID(int=3), reason="worker_lost"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"response_id": ""},
        {"tenant_id": "aurora"},
        {"terminal": "vanished"},
        {"cached_tokens": 101},
        {"output_tokens": -1},
    ],
)
def test_content_that_is_none_of_ours_is_unreadable(change: dict[str, Any]) -> None:
    with pytest.raises(UnreadableUsage):
        ledger_message(replace(usage(), **change))


def test_what_was_read_is_in_the_books_and_acknowledged(db: None) -> None:
    stream = Stream([reserved(), usage()])
    assert settler_of(stream).settle_some() == 2
    assert UsageRequest.objects.get().state == "completed"
    assert stream.entries == []


def test_an_entry_of_garbage_is_an_alert_and_is_not_read_for_ever(db: None) -> None:
    stream = Stream([BadEntry("0-0", "version 9"), replace(usage(), response_id="nobody"), reserved()])
    working = settler_of(stream)
    working.settle_some()
    assert list(LedgerAlert.objects.values_list("reason", flat=True)) == ["unreadable", "unreadable"]
    assert (working.applied.num_refused, working.applied.num_reserved) == (2, 1)
    assert stream.entries == []


def test_nothing_is_acknowledged_when_the_books_could_not_be_written(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(messages: object) -> ledger.Applied:
        raise OperationalError("the database is shutting down")

    stream = Stream([reserved(), usage()])
    with monkeypatch.context() as patch:
        patch.setattr(settler.ledger, "apply_surely", down)
        with pytest.raises(OperationalError):
            settler_of(stream).settle_some()
    assert len(stream.entries) == 2
    settler_of(stream).settle_some()
    assert UsageRequest.objects.get().state == "completed"


def test_a_crash_after_the_commit_and_before_the_acknowledgement_books_nothing_twice(
    db: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Stream([reserved(), usage()])
    with monkeypatch.context() as patch:
        patch.setattr(stream, "acknowledge", _raise(BusError("gone")))
        with pytest.raises(BusError):
            settler_of(stream).settle_some()
    settler_of(stream).settle_some()
    assert LedgerEntry.objects.count() == 2
    assert selectors.rollup_sums().output_tokens == 20


def _raise(error: Exception) -> Callable[..., None]:
    def refuse(*_: object) -> None:
        raise error

    return refuse


def test_an_outage_is_waited_out_with_growing_pauses_and_said_once(
    transactional_db: None, caplog: pytest.LogCaptureFixture
) -> None:  # P30
    caplog.set_level("INFO")
    failures = [BusError("Redis is gone") for _ in range(8)]
    stream, clock = Stream([reserved(), usage()], failures), Clock(num_turns=10)
    settler_of(stream, clock).run()
    assert clock.waited_s == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, settler.GATHER_S]
    assert UsageRequest.objects.get().state == "completed"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_batch_that_was_not_full_is_followed_by_a_pause_in_which_the_next_one_gathers(
    transactional_db: None, long_stream: Stream
) -> None:
    clock = Clock(num_turns=6)
    settler_of(long_stream, clock).run()
    assert clock.waited_s == [0.0, 0.0, 0.0, 0.0, settler.GATHER_S, 0.0]  # of 500, 500, 500 and 98 entries, and none


def test_what_came_while_a_batch_gathered_is_in_the_books_when_the_settler_stops(transactional_db: None) -> None:
    class Arriving(Stream):
        def acknowledge(self, entry_ids: Sequence[str]) -> None:
            super().acknowledge(entry_ids)
            if "1-0" not in entry_ids:
                self.entries.append(UsageEntry("1-0", usage()))

    stream = Arriving([reserved()])
    settler_of(stream, Clock(num_turns=1)).run()
    assert UsageRequest.objects.get().state == "completed"
    assert stream.entries == []


def test_duties_are_done_on_time_and_only_while_the_stream_is_empty(db: None) -> None:
    done: list[float] = []
    clock, stream = Clock(num_turns=1), Stream([reserved()])
    working = settler_of(stream, clock, [Duty(10.0, lambda: done.append(clock.now_s))])
    for now_s in (1_000.0, 1_001.0, 1_009.0, 1_011.5):
        clock.now_s = now_s
        working._turn()
    assert done == [1_001.0, 1_011.5]


def test_a_duty_that_is_due_under_load_does_not_wait_for_an_empty_stream(db: None) -> None:
    done: list[float] = []
    clock, stream = Clock(num_turns=1), Stream([reserved()])
    settler_of(stream, clock, [Duty(10.0, lambda: done.append(clock.now_s), under_load=True)])._turn()
    assert done == [clock.now_s]


@pytest.fixture
def long_stream() -> Stream:
    return Stream([message for number in range(1, 800) for message in (reserved(number), usage(number))])


def test_a_long_backlog_is_booked_in_batches_of_at_most_five_hundred(db: None, long_stream: Stream) -> None:
    working, sizes = settler_of(long_stream), []
    while size := working.settle_some():
        sizes.append(size)
    assert sizes == [500, 500, 500, 98]
    assert selectors.ledger_sums().num_requests == 799
