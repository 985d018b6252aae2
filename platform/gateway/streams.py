"""From this gateway's outbox to the responses it serves, and which of them a dead worker leaves behind.

Knows messages and workers; refuses to know who reads (``response_stream``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import assert_never

from gateway.admission import Grant
from gateway.errors import Reason, Refusal
from gateway.response_stream import End, Lost, Reader, ResponseStream
from wire.bus import BadEntry
from wire.messages import (
    Accepted,
    ChoiceFinished,
    Explained,
    Finished,
    LoadSnapshot,
    Moved,
    Rejected,
    Submit,
    ToGateway,
    Tokens,
)

log = logging.getLogger(__name__)

LOST_AFTER_S = 3.0  # a worker without a fresh snapshot
NOWHERE = ("", 0)  # the worker of a response that waits for one to go on with it

_LOST = Refusal(reason=Reason.WORKER_LOST, message="The worker that served this response was lost.")
MOVED = Refusal(reason=Reason.MOVED, message="Another connection reads this response now; it can be resumed there.")


class Streams:
    """Every response of this gateway that has not ended.

    Always: a message of an older attempt or of an unknown response changes nothing. A response that its client has
    left stays here until its end, so that a worker that dies meanwhile does not leave its reservation open.
    """

    def __init__(self, clock_s: Callable[[], float]) -> None:
        self._clock_s = clock_s
        self._streams: dict[str, ResponseStream] = {}
        self._seen_at_s: dict[str, float] = {}
        self.num_bad_entries = 0
        self.to_store: list[ResponseStream] = []  # ended, and not yet on the durable shelf

    def open(
        self, grant: Grant, submit: Submit, worker_id: str, epoch: int, *, outlives_readers: bool = False
    ) -> ResponseStream:
        stream = ResponseStream(grant, submit, (worker_id, epoch), self._clock_s, outlives_readers=outlives_readers)
        self._streams[grant.response_id] = stream
        self._seen_at_s.setdefault(worker_id, self._clock_s())
        return stream

    def get(self, response_id: str) -> ResponseStream | None:
        return self._streams.get(response_id)

    def leave(self, stream: ResponseStream, reader: Reader) -> bool:
        """A reader is done with it. True when the response goes on for nobody and has to be cancelled."""
        if reader in stream.readers:
            stream.readers.remove(reader)
        if stream.readers:
            return False
        if stream.end is not None:
            self._drop(stream)
            return False
        if stream.outlives_readers or stream.lingers:
            stream.linger()
            return False
        stream.abandon()
        return True

    def forget(self, stream: ResponseStream) -> None:
        """It never reached a worker."""
        self._drop(stream)

    def _drop(self, stream: ResponseStream) -> None:
        if self._streams.get(stream.response_id) is stream:
            del self._streams[stream.response_id]

    def __iter__(self) -> Iterator[ResponseStream]:
        return iter(tuple(self._streams.values()))

    def __len__(self) -> int:
        return len(self._streams)

    def deliver(self, messages: Iterable[ToGateway | BadEntry]) -> None:
        """One batch from the outbox. No reader wakes before the whole batch is in, so an end meets its last tokens."""
        for message in messages:
            match message:
                case Tokens():
                    self._deliver_tokens(message)
                case ChoiceFinished() | Finished() | Rejected():
                    self._deliver_end(message)
                case Moved():
                    if (stream := self._streams.get(message.response_id)) is not None:
                        self.let_go(stream, Lost(MOVED))
                case Accepted() | Explained():
                    pass
                case BadEntry():
                    self.num_bad_entries += 1
                    log.error("an outbox entry was not understood: %s", message.reason)
                case _:
                    assert_never(message)

    def _deliver_end(self, message: ChoiceFinished | Finished | Rejected) -> None:
        stream = self._streams.get(message.response_id)
        if stream is None or stream.attempt != message.attempt:
            return
        if isinstance(message, ChoiceFinished):
            stream.end_choice(message.end)
        else:
            self.finish(stream, message)

    def _deliver_tokens(self, tokens: Tokens) -> None:
        columns = (tokens.response_ids, tokens.attempts, tokens.choices, tokens.first_indexes, tokens.token_ids)
        logprobs = tokens.logprobs or ((),) * len(tokens.response_ids)
        for response_id, attempt, choice, first_index, token_ids, row in zip(*columns, logprobs, strict=True):
            stream = self._streams.get(response_id)
            if stream is not None and stream.attempt == attempt:
                stream.take(choice, first_index, token_ids, row or ())

    def finish(self, stream: ResponseStream, end: End) -> None:
        """The end of a response, for its readers and for whoever reads it later."""
        if stream.end is None and stream.card is not None and stream.card.is_stored:
            self.to_store.append(stream)
        stream.finish(end)
        if not stream.readers:
            self._drop(stream)

    def let_go(self, stream: ResponseStream, end: End) -> None:
        """It is not this gateway's any more: whoever asks for it from now on is not shown what was known of it here."""
        self.finish(stream, end)
        self._drop(stream)

    def lost_workers(self, loads: Iterable[LoadSnapshot]) -> list[tuple[str, int]]:
        """(worker, epoch) with open responses that are dead by these snapshots: another epoch, or silent for long."""
        now_s = self._clock_s()
        epochs = {load.worker_id: load.epoch for load in loads}
        self._seen_at_s.update(dict.fromkeys(epochs, now_s))
        serving = dict.fromkeys((stream.worker_id, stream.epoch) for stream in self if stream.end is None)
        serving.pop(NOWHERE, None)
        return [
            (worker_id, epoch)
            for worker_id, epoch in serving
            if epochs.get(worker_id, epoch) != epoch or now_s - self._seen_at_s[worker_id] > LOST_AFTER_S
        ]

    def pardon(self) -> None:
        """Snapshots could not be read: nobody's silence counts."""
        self._seen_at_s = dict.fromkeys(self._seen_at_s, self._clock_s())

    def orphan(self, worker_id: str, epoch: int) -> list[ResponseStream]:
        """Open responses of a dead worker: they belong to no worker from now on."""
        orphans = [s for s in self if (s.worker_id, s.epoch) == (worker_id, epoch) and s.end is None]
        for stream in orphans:
            stream.worker_id, stream.epoch = NOWHERE
            stream.homeless_since_s = self._clock_s()
            stream.is_unsent = False
        return orphans

    def homeless(self) -> list[ResponseStream]:
        """Open responses that wait for a worker, or for their Submit to reach it."""
        return [s for s in self if s.end is None and (s.homeless_since_s is not None or s.is_unsent)]

    def settle(self, stream: ResponseStream, worker_id: str, epoch: int, attempt: int) -> None:
        """A worker goes on with it, under the next attempt, once the Submit is sent."""
        stream.worker_id, stream.epoch, stream.attempt = worker_id, epoch, attempt
        stream.homeless_since_s, stream.is_unsent = None, True
        self._seen_at_s.setdefault(worker_id, self._clock_s())

    def lose(self, stream: ResponseStream) -> None:
        """No worker came."""
        self.finish(stream, Lost(_LOST))
