"""The clients of a simulation: when they ask, what they see, when they come back. Knows messages, never the engine."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import assert_never

from gpu_worker.simulation.traffic import SECOND_US, Arrival
from scheduler_engine.policy import ClassPolicy, PriorityClass
from wire.bus import BadEntry
from wire.messages import Accepted, ChoiceFinished, Explained, Finished, Moved, Rejected, ToGateway, Tokens

QUANTILES = {"p50": 500, "p95": 950, "p99": 990}


@dataclass(slots=True)
class View:
    """What clients saw; durations in microseconds, counted by value. Always: ``requests`` ends as completed plus shed.

    A request that comes back after a refusal is the same request; its time to the first token counts from its last try.
    """

    requests: int = 0
    completed: int = 0
    shed: int = 0  # refused, and did not come back
    tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    gaps: Counter[int] = field(default_factory=Counter)
    queue_wait: Counter[int] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # by reason, every try
    no_hint: int = 0  # refusals that did not say when to come back
    returns: int = 0
    returns_kept: int = 0  # came back when told to, and was served
    on_time: Counter[int] = field(default_factory=Counter)  # first tokens as promised, by the second they came in: by
    # the request's own deadline, else by its class's target
    late: int = 0  # let in and served after its hard deadline
    first_at_us: int | None = None
    last_end_us: int = 0

    def add(self, other: View) -> None:
        """Count another's in."""
        first = [at_us for at_us in (self.first_at_us, other.first_at_us) if at_us is not None]
        last_us = max(self.last_end_us, other.last_end_us)
        for each in fields(self):
            if each.name not in ("first_at_us", "last_end_us"):
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.first_at_us, self.last_end_us = min(first, default=None), last_us


class _Stream:
    __slots__ = ("arrival", "last_token_at_us", "promise_us", "view")

    def __init__(self, arrival: Arrival, promise_us: int | None, view: View) -> None:
        self.arrival = arrival
        self.promise_us = promise_us
        self.last_token_at_us: int | None = None
        self.view = view


class Clients:
    """Always: what was sent and has not ended is open; a refused client with tries left comes back, not earlier than
    told.
    """

    def __init__(self, arrivals: Sequence[Arrival], classes: Sequence[ClassPolicy]) -> None:
        self.views: dict[tuple[PriorityClass, str], View] = {}  # by class and key
        self.num_open = 0
        self.num_ended = 0
        self._targets_us = {
            row.priority_class: None if row.ttft_target_ms is None else row.ttft_target_ms * 1_000 for row in classes
        }
        self._arrivals = arrivals
        self._next = 0
        self._coming_back: list[tuple[int, int, Arrival]] = []
        self._num_returns = 0
        self._streams: dict[str, _Stream] = {}

    @property
    def next_at_us(self) -> int | None:
        """When somebody sends next; None when nobody will, unless somebody is refused."""
        moments = [self._arrivals[self._next].at_us] if self._next < len(self._arrivals) else []
        if self._coming_back:
            moments.append(self._coming_back[0][0])
        return min(moments, default=None)

    def send(self, now_us: int) -> list[Arrival]:
        """What is due, each once."""
        due = []
        while self._next < len(self._arrivals) and self._arrivals[self._next].at_us <= now_us:
            arrival = self._arrivals[self._next]
            self._next += 1
            view = self._view_of(arrival)
            view.requests += 1
            if view.first_at_us is None:
                view.first_at_us = arrival.at_us
            due.append(arrival)
        while self._coming_back and self._coming_back[0][0] <= now_us:
            due.append(heapq.heappop(self._coming_back)[2])
        for arrival in due:
            submit = arrival.submit
            promise_us = submit.remaining_hard_deadline_us or self._targets_us[submit.priority_class]
            self._streams[submit.response_id] = _Stream(arrival, promise_us, self._view_of(arrival))
        self.num_open += len(due)
        return due

    def _view_of(self, arrival: Arrival) -> View:
        return self.views.setdefault((arrival.submit.priority_class, arrival.submit.key_id), View())

    def hear(self, messages: Iterable[ToGateway | BadEntry], now_us: int) -> None:
        for message in messages:
            match message:
                case Tokens():
                    self._take_tokens(message, now_us)
                case Finished():
                    view = self._end(message.response_id, now_us).view
                    view.completed += 1
                    view.queue_wait[message.counters.queue_us] += 1
                    self.num_ended += 1
                case Rejected():
                    self._refused(message, now_us)
                case Accepted() | ChoiceFinished() | Moved() | Explained():
                    pass
                case BadEntry():
                    raise AssertionError(f"the memory bus made a bad entry: {message.reason}")
                case _:
                    assert_never(message)

    def _take_tokens(self, tokens: Tokens, now_us: int) -> None:
        for response_id, token_ids in zip(tokens.response_ids, tokens.token_ids, strict=True):
            stream = self._streams[response_id]
            view, last_us = stream.view, stream.last_token_at_us
            view.tokens += len(token_ids)
            if last_us is None:
                self._first_token(stream, now_us)
            else:
                view.gaps[now_us - last_us] += 1
            stream.last_token_at_us = now_us

    def _first_token(self, stream: _Stream, now_us: int) -> None:
        view, submit = stream.view, stream.arrival.submit
        ttft_us = now_us - stream.arrival.at_us
        view.ttft[ttft_us] += 1
        view.returns_kept += "~" in submit.response_id
        if stream.promise_us is not None and ttft_us <= stream.promise_us:
            view.on_time[now_us // SECOND_US] += 1
        elif submit.remaining_hard_deadline_us is not None:
            view.late += 1

    def _refused(self, message: Rejected, now_us: int) -> None:
        stream = self._end(message.response_id, now_us)
        view = stream.view
        view.refusals[message.reason] += 1
        view.no_hint += message.retry_after_us is None
        if message.retry_after_us is None or not _comes_back(stream.arrival, message.retry_after_us):
            view.shed += 1
            self.num_ended += 1
            return
        view.returns += 1
        self._num_returns += 1
        again = stream.arrival.again(now_us + message.retry_after_us)
        heapq.heappush(self._coming_back, (again.at_us, self._num_returns, again))

    def _end(self, response_id: str, now_us: int) -> _Stream:
        self.num_open -= 1
        stream = self._streams.pop(response_id)
        stream.view.last_end_us = now_us
        return stream

    def of_class(self, priority_class: PriorityClass) -> View:
        """All tenants of a class together."""
        return self._sum(view for (each, _), view in self.views.items() if each is priority_class)

    def of_key(self, key_id: str) -> View:
        """All classes of an API key together; a tenant of the stories has one, of its own name."""
        return self._sum(view for (_, each), view in self.views.items() if each == key_id)

    def of_other_keys(self, priority_class: PriorityClass, key_id: str) -> View:
        """All of a class but one."""
        return self._sum(
            view for (of_class, each), view in self.views.items() if of_class is priority_class and each != key_id
        )

    def all(self) -> View:
        return self._sum(self.views.values())

    @staticmethod
    def _sum(views: Iterable[View]) -> View:
        total = View()
        for view in views:
            total.add(view)
        return total


def _comes_back(arrival: Arrival, retry_after_us: int) -> bool:
    patience_us = arrival.patience_us
    return arrival.num_tries > 1 and (patience_us is None or retry_after_us <= patience_us)


def quantiles_ms(counts: Mapping[int, int]) -> dict[str, float | None]:
    """Nearest-rank quantiles and the largest, in milliseconds; None where nothing was counted."""
    total, ordered = sum(counts.values()), sorted(counts)
    if not total:
        return {**dict.fromkeys(QUANTILES), "max": None}
    found: dict[str, float | None] = {
        name: _at_rank(ordered, counts, -(-total * per_mille // 1_000)) / 1_000 for name, per_mille in QUANTILES.items()
    }
    return {**found, "max": ordered[-1] / 1_000}


def _at_rank(ordered: Sequence[int], counts: Mapping[int, int], rank: int) -> int:
    seen = 0
    for value in ordered:
        seen += counts[value]
        if seen >= rank:
            return value
    raise AssertionError("a rank beyond the number of values")
