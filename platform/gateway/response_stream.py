"""One response as this gateway sees it: a log of token ids for each choice, and those who read it from anywhere.

Knows tokens and ends; refuses to know text and sockets. A log holds at most ``max_tokens`` ids per choice, so a reader
that does not read costs little, and is dropped after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.admission import Grant
from gateway.errors import Reason, Refusal
from gateway.ownership import Card
from wire.messages import ChoiceEnd, Finished, Rejected, Submit, TokenLogprob

log = logging.getLogger(__name__)

STALLED_AFTER_S = 30.0  # unread tokens this old: the reader is taken for gone
ABANDONED_LEASE_S = 10.0  # a cancelled response keeps its lease this long, also when its worker hangs
LINGER_S = 15.0  # how long a response that was taken over, and is not in the background, waits for a reader
_GAP = Refusal(reason=Reason.WORKER_LOST, message="Tokens of this response were lost on their way.")


@dataclass(frozen=True, slots=True)
class Lost:
    """The response will not go on here: its worker died, this gateway goes, or another one took it over."""

    refusal: Refusal


End = Finished | Rejected | Lost


@dataclass(frozen=True, slots=True)
class Piece:
    """What is new of one choice. ``logprobs`` are aligned with ``token_ids``, or empty where none were asked for."""

    choice: int
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprob | None]
    end: ChoiceEnd | None


@dataclass(frozen=True, slots=True)
class Delivery:
    """What came since the last time, by choice. ``end`` is the end of the response as a whole."""

    pieces: Sequence[Piece]
    end: End | None


@dataclass(slots=True)
class _Choice:
    """Always: ``logprobs`` is empty or as long as ``token_ids``."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    end: ChoiceEnd | None = None


class Reader:
    """One place in one response's log. Always: every token is handed out once, in order, and nothing after the end."""

    def __init__(self, stream: ResponseStream, task: asyncio.Task[object] | None) -> None:
        self.task = task
        self.is_gone = False
        self._stream = stream
        self._positions = [0] * len(stream.choices)
        self._told_ends = [False] * len(stream.choices)
        self._ready = asyncio.Event()
        self._unread_since_s: float | None = None

    async def next(self) -> Delivery:
        """Wait for tokens or the end. Also returns, perhaps empty, once the reader has gone."""
        await self._ready.wait()
        return self.so_far()

    def so_far(self) -> Delivery:
        """What there is to read now, without waiting."""
        stream = self._stream
        pieces = [piece for index in range(len(self._positions)) if (piece := self._new(index)) is not None]
        self._unread_since_s = None
        if stream.end is None and not self.is_gone:
            self._ready.clear()
        return Delivery(pieces, stream.end)

    def _new(self, index: int) -> Piece | None:
        choice, start = self._stream.choices[index], self._positions[index]
        num_tokens = len(choice.token_ids)
        ended = choice.end is not None and not self._told_ends[index]
        if start == num_tokens and not ended:
            return None
        self._positions[index] = num_tokens
        self._told_ends[index] = choice.end is not None
        return Piece(index, choice.token_ids[start:], choice.logprobs[start:], choice.end)

    def abandon(self) -> None:
        """The client has gone: wake whoever reads for it."""
        self.is_gone = True
        self._ready.set()

    def wake(self, now_s: float) -> None:
        """There is something to read."""
        if self._unread_since_s is None:
            self._unread_since_s = now_s
        self._ready.set()

    def is_stalled(self, now_s: float) -> bool:
        return self._unread_since_s is not None and now_s - self._unread_since_s > STALLED_AFTER_S


class ResponseStream:
    """One response as this gateway sees it. Always: its log only grows, and nothing is added after the end."""

    def __init__(
        self,
        grant: Grant,
        submit: Submit,
        worker: tuple[str, int],
        clock_s: Callable[[], float],
        *,
        outlives_readers: bool = False,
    ) -> None:
        self.grant = grant
        self.submit = self.first_submit = submit
        self.attempt = submit.attempt
        self.worker_id, self.epoch = worker
        self.outlives_readers = outlives_readers
        self.choices = [_Choice() for _ in range(submit.num_choices)]
        self.end: End | None = None
        self.abandoned_at_s: float | None = None
        self.homeless_since_s: float | None = None
        self.is_unsent = False  # its worker has not been given the Submit yet
        self.awaits_attach = False  # taken over, and nothing has come yet
        self.lingers = False  # whoever lost its reader may come again
        self.unread_since_s: float | None = None  # while it lingers
        self.card: Card | None = None  # where one is kept
        self.key_public_id = ""  # of the key that asked; empty where nothing depends on it any more
        self.readers: list[Reader] = []
        self._clock_s = clock_s
        self._opened_at_s = clock_s()

    @property
    def response_id(self) -> str:
        return self.grant.response_id

    def read(self) -> Reader:
        """From the first token on. The task that calls is the one that reads, and is cancelled when it does not."""
        reader = Reader(self, asyncio.current_task())
        self.readers.append(reader)
        self.unread_since_s = None
        if self.end is not None or any(choice.token_ids or choice.end for choice in self.choices):
            reader.wake(self._clock_s())
        return reader

    def take(
        self,
        choice_index: int,
        first_index: int,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | None] = (),
    ) -> None:
        """Tokens that were seen before (a worker that repeats itself) are dropped; a hole ends the response."""
        if self.end is not None or not 0 <= choice_index < len(self.choices):
            return
        choice = self.choices[choice_index]
        num_seen = len(choice.token_ids) - first_index
        if num_seen < 0:
            log.error("response %s: tokens %s to %s are missing", self.response_id, len(choice.token_ids), first_index)
            self.finish(Lost(_GAP))
            return
        self.awaits_attach = False
        if num_seen >= len(token_ids):
            return
        choice.token_ids.extend(token_ids[num_seen:] if num_seen else token_ids)
        if self.submit.sampling.num_top_logprobs is not None:
            num_new = len(token_ids) - num_seen
            choice.logprobs.extend(logprobs[num_seen:] if logprobs else [None] * num_new)
        self._wake()

    def end_choice(self, end: ChoiceEnd) -> None:
        if self.end is None and 0 <= end.choice < len(self.choices):
            self.choices[end.choice].end = end
            self._wake()

    def finish(self, end: End) -> None:
        if self.end is not None:
            return
        if isinstance(end, Finished):
            for choice_end in end.choices:
                if choice_end.choice < len(self.choices):
                    self.choices[choice_end.choice].end = choice_end
        self.end = end
        self._wake()

    def linger(self) -> None:
        """Wait for a reader from now on; one that outlives its readers waits for nobody."""
        if not self.outlives_readers:
            self.lingers, self.unread_since_s = True, self._clock_s()

    @property
    def is_forgotten(self) -> bool:
        """It lingers, and nobody came."""
        if self.unread_since_s is None or self.end is not None or self.abandoned_at_s is not None:
            return False
        return self._clock_s() - self.unread_since_s > LINGER_S

    def abandon(self) -> None:
        """Nobody reads it any more, and it was not meant to go on without a reader."""
        if self.abandoned_at_s is None:
            self.abandoned_at_s = self._clock_s()

    def _wake(self) -> None:
        now_s = self._clock_s()
        for reader in self.readers:
            reader.wake(now_s)

    @property
    def ended_choices(self) -> tuple[ChoiceEnd, ...]:
        return tuple(choice.end for choice in self.choices if choice.end is not None)

    @property
    def age_us(self) -> int:
        return int((self._clock_s() - self._opened_at_s) * 1_000_000)

    @property
    def has_started(self) -> bool:
        return any(choice.token_ids for choice in self.choices)

    @property
    def stalled_readers(self) -> list[Reader]:
        now_s = self._clock_s()
        return [reader for reader in self.readers if reader.is_stalled(now_s)]

    @property
    def holds_lease(self) -> bool:
        """A slot is never kept for long by a worker that does not answer the cancel."""
        return self.abandoned_at_s is None or self._clock_s() - self.abandoned_at_s < ABANDONED_LEASE_S
