"""What a reply means for its line: written down, or asked again later.

Knows statuses and codes; refuses to know clocks and workers. Shortness of capacity never fails a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Struct

from gateway.batches.asking_lines import Reply
from gateway.batches.leases import Answer

MAX_FAILURES: Final = 3  # tries that the platform may break before the line is told so
FAILED_WAIT_S: Final = 1.0
BUDGET_WAIT_S: Final = 30.0  # a money window turns some time, or somebody raises the cap
CLASS_WAIT_S: Final = 2.0  # a paused class is resumed some time; where it was taken away, the batch is ended meanwhile
_NOT_GRANTED: Final = "service_tier_not_granted"
_WAITS_FOR_POLICY: Final = ("insufficient_quota", "deadline_unreachable")  # a cap of money, a deadline of the class


@dataclass(frozen=True, slots=True)
class Done:
    """The line has ended with this."""


@dataclass(frozen=True, slots=True)
class Again:
    """Ask again after so long."""

    wait_s: float


Verdict = Done | Again


def verdict(reply: Reply, num_failures: int) -> Verdict:
    """``num_failures``: how often the platform has broken this line's tries, this one included."""
    code = reply.code
    if code == _NOT_GRANTED:
        return Again(CLASS_WAIT_S)
    if reply.is_too_late:
        return Done()
    if code in _WAITS_FOR_POLICY:
        return Again(BUDGET_WAIT_S)
    if reply.status in (429, 503) and "retry-after-ms" in reply.headers:
        return Again(int(reply.headers["retry-after-ms"]) / 1_000)
    if reply.status == 500 and num_failures < MAX_FAILURES:
        return Again(FAILED_WAIT_S)
    return Done()


def stop_error(code: str, message: str) -> dict[str, Any]:
    """An entry of a batch's errors."""
    return {"code": code, "message": message, "param": None, "line": None}


def not_granted() -> dict[str, Any]:
    """No line of this tenant's batches can be asked any more."""
    return stop_error(_NOT_GRANTED, "The batch class is not granted to this tenant.")


class _CachedTokens(Struct):
    cached_tokens: int = 0


class _Usage(Struct):
    """The words of all endpoints."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _CachedTokens | None = None


class _Body(Struct):
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Body)


def answer_of(number: int, reply: Reply) -> Answer:
    """The reply as it is written down."""
    usage = (_decoder.decode(reply.body).usage if reply.status == 200 else None) or _Usage()
    cached = usage.prompt_tokens_details or usage.input_tokens_details or _CachedTokens()
    return Answer(
        number=number,
        status_code=reply.status,
        request_id=reply.request_id,
        body=reply.body,
        input_tokens=usage.prompt_tokens or usage.input_tokens,
        cached_tokens=cached.cached_tokens,
        output_tokens=usage.completion_tokens or usage.output_tokens,
    )
