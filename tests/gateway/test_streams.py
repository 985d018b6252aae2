"""From the outbox to one response: order, ends, workers that die, readers that do not read."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from gateway.admission import Grant, Limits
from gateway.errors import Reason
from gateway.response_stream import ABANDONED_LEASE_S, LINGER_S, STALLED_AFTER_S, Delivery, Lost, ResponseStream
from gateway.streams import LOST_AFTER_S, Streams
from scheduler_engine.policy import PriorityClass
from tests.loads import quiet_load
from wire.bus import BadEntry
from wire.messages import (
    ChoiceEnd,
    ChoiceFinished,
    EngineCounters,
    Finished,
    LoadSnapshot,
    Moved,
    SamplingParameters,
    Submit,
    TokenLogprob,
    Tokens,
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def streams(clock: Clock) -> Streams:
    return Streams(clock)


def grant(response_id: str = "r") -> Grant:
    return Grant(response_id, "aurora", "lease", Limits(PriorityClass.DEFAULT))


def submit(response_id: str = "r", attempt: int = 1, num_choices: int = 1) -> Submit:
    return Submit(
        response_id=response_id,
        attempt=attempt,
        gateway_id="g",
        tenant_id="aurora",
        project_id="p",
        key_id="k",
        priority_class=PriorityClass.DEFAULT,
        model="m",
        prompt_token_ids=(1,),
        num_choices=num_choices,
    )


def tokens(*token_ids: int, first: int = 0, response_id: str = "r", attempt: int = 1, choice: int = 0) -> Tokens:
    return Tokens(
        worker_id="w",
        epoch=1,
        step=1,
        response_ids=(response_id,),
        attempts=(attempt,),
        choices=(choice,),
        first_indexes=(first,),
        token_ids=(token_ids,),
    )


def token_ids(delivery: Delivery) -> list[int]:
    """Those of the only choice."""
    return [token_id for piece in delivery.pieces for token_id in piece.token_ids]


def finished(response_id: str = "r", attempt: int = 1) -> Finished:
    return Finished(
        response_id=response_id,
        attempt=attempt,
        choices=(ChoiceEnd(choice=0, reason="stop"),),
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        counters=EngineCounters(),
    )


def snapshot(worker_id: str, epoch: int) -> LoadSnapshot:
    return quiet_load(worker_id=worker_id, epoch=epoch, model="m", classes=())


async def test_tokens_come_in_order_and_several_steps_may_come_at_once(streams: Streams) -> None:
    reader = streams.open(grant(), submit(), "w", 1).read()
    streams.deliver([tokens(1, 2), tokens(3, first=2)])
    assert token_ids(await reader.next()) == [1, 2, 3]


async def test_a_worker_that_repeats_itself_changes_nothing(streams: Streams) -> None:
    reader = streams.open(grant(), submit(), "w", 1).read()
    streams.deliver([tokens(1, 2), tokens(1, 2), tokens(2, 3, first=1)])
    assert token_ids(await reader.next()) == [1, 2, 3]


async def test_the_end_arrives_together_with_the_last_tokens_of_its_batch(streams: Streams) -> None:
    reader = streams.open(grant(), submit(), "w", 1).read()
    reading = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    streams.deliver([tokens(1), finished()])
    delivery = await reading
    assert token_ids(delivery) == [1]
    assert delivery.end == finished()


async def test_what_is_not_of_this_attempt_or_of_no_response_here_is_ignored(streams: Streams) -> None:
    stream = streams.open(grant(), submit(attempt=2), "w", 1)
    streams.deliver([tokens(1), finished(), tokens(5, attempt=2), tokens(9, response_id="other")])
    delivery = await stream.read().next()
    assert (token_ids(delivery), delivery.end) == ([5], None)


def test_an_entry_that_is_not_understood_is_counted(streams: Streams) -> None:
    streams.deliver([BadEntry("1-1", "garbage")])
    assert streams.num_bad_entries == 1


async def test_a_reader_that_leaves_before_the_end_wakes_and_its_response_has_to_be_cancelled(streams: Streams) -> None:
    stream = streams.open(grant(), submit(), "w", 1)
    reader = stream.read()
    reading = asyncio.create_task(reader.next())
    await asyncio.sleep(0)
    reader.abandon()
    assert (await reading).end is None
    assert streams.leave(stream, reader)
    assert len(streams) == 1
    streams.deliver([finished()])
    assert len(streams) == 0


async def test_a_reader_that_leaves_after_the_end_leaves_nothing_behind(streams: Streams) -> None:
    stream = streams.open(grant(), submit(), "w", 1)
    reader = stream.read()
    streams.deliver([finished()])
    await reader.next()
    assert not streams.leave(stream, reader)
    assert len(streams) == 0


async def test_another_epoch_leaves_the_responses_of_the_old_one_without_a_worker(streams: Streams) -> None:
    stream = streams.open(grant(), submit(), "w", 1)
    assert streams.lost_workers([snapshot("w", 1)]) == []
    assert streams.lost_workers([snapshot("w", 2)]) == [("w", 1)]
    assert streams.orphan("w", 1) == streams.homeless() == [stream]
    assert streams.lost_workers([snapshot("w", 2)]) == []
    streams.lose(stream)
    end = (await stream.read().next()).end
    assert isinstance(end, Lost)
    assert end.refusal.reason is Reason.WORKER_LOST


async def test_a_response_that_another_worker_goes_on_with_takes_only_the_new_attempt(streams: Streams) -> None:
    stream = streams.open(grant(), submit(), "w", 1)
    reader = stream.read()
    streams.deliver([tokens(1, 2)])
    streams.orphan("w", 1)
    streams.settle(stream, "v", 7, attempt=2)
    streams.deliver([tokens(9, first=2), finished(), tokens(3, first=2, attempt=2), finished(attempt=2)])
    delivery = await reader.next()
    assert (token_ids(delivery), delivery.end) == ([1, 2, 3], finished(attempt=2))


async def test_a_hole_between_tokens_ends_the_response_instead_of_being_shown(streams: Streams) -> None:
    reader = streams.open(grant(), submit(), "w", 1).read()
    streams.deliver([tokens(1), tokens(3, first=2)])
    delivery = await reader.next()
    assert token_ids(delivery) == [1]
    assert isinstance(delivery.end, Lost)


async def test_a_second_reader_begins_with_the_first_token_and_neither_takes_from_the_other(streams: Streams) -> None:
    stream = streams.open(grant(), submit(), "w", 1)
    first = stream.read()
    streams.deliver([tokens(1, 2)])
    assert token_ids(await first.next()) == [1, 2]
    second = stream.read()
    streams.deliver([tokens(3, first=2)])
    assert token_ids(await second.next()) == [1, 2, 3]
    assert token_ids(await first.next()) == [3]
    assert not streams.leave(stream, first)
    assert streams.leave(stream, second)


async def test_choices_end_one_by_one_and_the_response_with_the_last(streams: Streams) -> None:
    reader = streams.open(grant(), submit(num_choices=2), "w", 1).read()
    early = ChoiceFinished(response_id="r", attempt=1, end=ChoiceEnd(choice=1, reason="stop", visible_bytes=0))
    streams.deliver([tokens(1), tokens(5, choice=1), early])
    delivery = await reader.next()
    assert [(piece.choice, list(piece.token_ids), piece.end) for piece in delivery.pieces] == [
        (0, [1], None),
        (1, [5], early.end),
    ]
    assert delivery.end is None
    streams.deliver([tokens(2, first=1), finished()])
    (piece,) = (await reader.next()).pieces
    assert (list(piece.token_ids), piece.end) == ([2], ChoiceEnd(choice=0, reason="stop"))


async def test_log_probabilities_stay_beside_their_tokens_where_a_worker_leaves_some_out(streams: Streams) -> None:
    asked = replace(submit(), sampling=SamplingParameters(num_top_logprobs=0))
    reader = streams.open(grant(), asked, "w", 1).read()
    one = TokenLogprob(token_id=1, logprob=-0.5)
    streams.deliver([replace(tokens(1), logprobs=((one,),)), tokens(2, first=1), tokens(2, 3, first=1)])
    (piece,) = (await reader.next()).pieces
    assert (list(piece.token_ids), list(piece.logprobs)) == ([1, 2, 3], [one, None, None])


async def test_a_response_taken_over_elsewhere_ends_here_and_says_where_it_can_be_had(streams: Streams) -> None:
    reader = streams.open(grant(), submit(), "w", 1).read()
    streams.deliver([Moved(response_id="r", gateway_id="g2")])
    end = (await reader.next()).end
    assert isinstance(end, Lost)
    assert end.refusal.reason is Reason.MOVED


async def test_a_worker_is_lost_after_a_silence_and_not_before(streams: Streams, clock: Clock) -> None:
    streams.open(grant(), submit(), "w", 1)
    streams.lost_workers([snapshot("w", 1)])
    clock.now_s = LOST_AFTER_S
    assert streams.lost_workers([]) == []
    clock.now_s = LOST_AFTER_S + 0.1
    assert streams.lost_workers([]) == [("w", 1)]


async def test_an_outage_of_the_bus_is_not_taken_for_the_death_of_its_workers(streams: Streams, clock: Clock) -> None:
    streams.open(grant(), submit(), "w", 1)
    clock.now_s = 60.0
    streams.pardon()
    assert streams.lost_workers([]) == []


async def test_a_response_that_ended_does_not_fall_with_its_worker(streams: Streams) -> None:
    stream = streams.open(grant(), submit(), "w", 1)
    reader = stream.read()
    streams.deliver([tokens(1), finished()])
    assert streams.orphan("w", 1) == []
    assert (await reader.next()).end == finished()


async def test_tokens_unread_for_long_are_a_stalled_reader(streams: Streams, clock: Clock) -> None:
    stream = streams.open(grant(), submit(), "w", 1)
    reader = stream.read()
    streams.deliver([tokens(1)])
    await reader.next()
    clock.now_s = 100.0
    assert stream.stalled_readers == []
    streams.deliver([tokens(2, first=1)])
    clock.now_s += STALLED_AFTER_S + 1
    assert stream.stalled_readers == [reader]


async def test_a_cancelled_response_gives_up_its_lease_even_when_its_worker_hangs(
    streams: Streams, clock: Clock
) -> None:
    stream: ResponseStream = streams.open(grant(), submit(), "w", 1)
    streams.leave(stream, stream.read())
    assert stream.holds_lease
    clock.now_s = ABANDONED_LEASE_S
    assert not stream.holds_lease


@pytest.mark.parametrize("is_background", [False, True])
def test_a_response_that_was_taken_over_is_forgotten_without_a_reader_unless_it_needs_none(
    streams: Streams, clock: Clock, is_background: bool
) -> None:
    stream = streams.open(grant(), submit(), "w", 1, outlives_readers=is_background)
    stream.linger()
    clock.now_s += LINGER_S
    assert not stream.is_forgotten
    clock.now_s += 1.0
    assert stream.is_forgotten != is_background
