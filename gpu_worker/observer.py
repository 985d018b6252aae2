"""What the clients of a simulation saw: first tokens, gaps between tokens, ends. Reads messages; changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from gpu_worker.stories import Arrival
from scheduler_engine.policy import PriorityClass
from wire.bus import BadEntry
from wire.messages import Accepted, Finished, Rejected, ToGateway, Tokens

QUANTILES = {"p50": 500, "p95": 950, "p99": 990}


@dataclass(slots=True)
class ClassView:
    """One class as its clients saw it; durations in microseconds, counted by value."""

    requests: int = 0
    completed: int = 0
    shed: int = 0
    tokens: int = 0
    ttft: Counter[int] = field(default_factory=Counter)
    gaps: Counter[int] = field(default_factory=Counter)
    queue_wait: Counter[int] = field(default_factory=Counter)


class _Stream:
    __slots__ = ("arrived_at_us", "last_token_at_us", "view")

    def __init__(self, arrived_at_us: int, view: ClassView) -> None:
        self.arrived_at_us = arrived_at_us
        self.last_token_at_us: int | None = None
        self.view = view


class Observer:
    """Always: a response counts once as completed or shed."""

    def __init__(self) -> None:
        self.classes = {priority_class: ClassView() for priority_class in PriorityClass}
        self.num_open = 0
        self._streams: dict[str, _Stream] = {}

    def expect(self, arrival: Arrival) -> None:
        view = self.classes[arrival.submit.priority_class]
        view.requests += 1
        self.num_open += 1
        self._streams[arrival.submit.response_id] = _Stream(arrival.at_us, view)

    def take(self, messages: Iterable[ToGateway | BadEntry], now_us: int) -> None:
        for message in messages:
            match message:
                case Tokens():
                    self._take_tokens(message, now_us)
                case Finished():
                    view = self._end(message.response_id)
                    view.completed += 1
                    view.queue_wait[message.counters.queue_us] += 1
                case Rejected():
                    self._end(message.response_id).shed += 1
                case Accepted():
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
                view.ttft[now_us - stream.arrived_at_us] += 1
            else:
                view.gaps[now_us - last_us] += 1
            stream.last_token_at_us = now_us

    def _end(self, response_id: str) -> ClassView:
        self.num_open -= 1
        return self._streams.pop(response_id).view


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
