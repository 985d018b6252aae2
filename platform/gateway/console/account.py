"""What a response took, for the person who asked: where its time went in words, and what it cost.

Knows the worker's counters and the engine's words for them; refuses to know sockets and pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from billing.documents import money
from billing.pricing import TokenCounts, TokenPrices, cost_micros
from gateway.response_stream import End
from gateway.v1.answers import WISHES
from scheduler_engine.events import FinishReason
from scheduler_engine.explain import milliseconds, words
from scheduler_engine.policy import PriorityClass
from scheduler_engine.record import Cause
from scheduler_engine.waits import WaitShare
from wire.messages import Finished, Rejected, Wait

KIND = "rubato.account"
_CAUSES = {cause.label: cause for cause in Cause}


def account(response_name: str, end: End, prices: TokenPrices | None) -> dict[str, Any]:
    """A frame behind the last event. ``prices`` None: its reader does not see money. The counters are those of the last
    worker: ``ttft_ms`` is None where an earlier one had the answer first.
    """
    frame: dict[str, Any] = {"type": KIND, "response_id": response_name, "waits": []}
    if isinstance(end, Rejected):
        return {**frame, "waits": told(end.waits)}
    if not isinstance(end, Finished):
        return frame
    counters = end.counters
    is_moved = end.attempt > 1
    counts = TokenCounts(end.prompt_tokens, end.cached_tokens, end.output_tokens)
    return {
        **frame,
        "waits": told(counters.waits),
        "is_moved": is_moved,
        "queue_ms": _ms(counters.queue_us),
        "ttft_ms": None if is_moved or counters.ttft_us is None else _ms(counters.ttft_us),
        "total_ms": _ms(counters.total_us),
        "num_pauses": counters.num_holds + counters.num_swaps + counters.num_recomputes,
        "cost": None if prices is None else money(cost_micros(counts, prices) if _is_owed(end) else 0),
    }


def _is_owed(end: Finished) -> bool:
    """What the platform broke off costs nothing."""
    return all(
        choice.detail in WISHES if choice.reason == FinishReason.CANCELLED else choice.reason != FinishReason.FAILED
        for choice in end.choices
    )


def told(waits: Sequence[Wait]) -> list[dict[str, Any]]:
    """Each cause with its milliseconds; of a phase they sum to the whole, and what is under half of one is left out."""
    found = []
    for phase in ("queued", "paused"):
        chosen = [wait for wait in waits if wait[0] == phase]
        shares = [_share(wait) for wait in chosen]
        for wait, share, ms in zip(chosen, shares, milliseconds(shares), strict=True):
            if ms:
                # a worker newer than this gateway may know more causes
                text = words(share) if share.cause else f"for {wait[1].replace('_', ' ')}"
                found.append({"phase": phase, "ms": ms, "words": text})
    return found


def _share(wait: Wait) -> WaitShare:
    _, cause, holder, duration_us = wait
    return WaitShare(_CAUSES.get(cause, Cause.NONE), PriorityClass.from_label(holder) if holder else None, duration_us)


def _ms(duration_us: int) -> int:
    return (duration_us + 500) // 1_000
