"""The charging table: what an ended response counts for. The worker's count is the only one there is.

Shed, and failed before the first token: nothing. Cancelled: the prompt as far as it was computed, and every token made.
n choices: one prompt, all outputs. What a count costs is billing's business.
"""

from __future__ import annotations

from collections.abc import Sequence

from gpu_worker.answers.response import Response
from scheduler_engine.events import Finished, FinishReason
from wire.messages import EngineCounters, Usage

_TERMINAL_OF_CANCEL = {"client": "cancelled_client", "admin": "cancelled_admin", "expired": "expired"}


def terminal_of(response: Response) -> str:
    """How the response as a whole ended.

    A cancel that is nobody's wish (gateway lost, drain) is the platform's failure.
    """
    reasons = {end.reason for end in response.ends}
    if FinishReason.FAILED in reasons:
        return "failed_platform"
    if response.cancel_reason is not None and FinishReason.CANCELLED in reasons:
        return _TERMINAL_OF_CANCEL.get(response.cancel_reason, "failed_platform")
    if reasons.isdisjoint((FinishReason.STOP, FinishReason.LENGTH)):
        return "shed"
    return "completed"


def usage_of(response: Response, bytes_per_block: int) -> Usage:
    """The one Usage of a response whose choices have all ended."""
    submit, ends, terminal = response.submit, response.ends, terminal_of(response)
    output_tokens = sum(end.output_tokens for end in ends)
    counts = terminal != "shed" and (output_tokens > 0 or terminal != "failed_platform")
    return Usage(
        response_id=submit.response_id,
        attempt=submit.attempt,
        tenant_id=submit.tenant_id,
        project_id=submit.project_id,
        key_id=submit.key_id,
        priority_class=submit.priority_class,
        model=submit.model,
        prompt_tokens=max(end.prompt_tokens for end in ends) if counts else 0,
        cached_tokens=max(end.cached_tokens for end in ends) if counts else 0,
        output_tokens=output_tokens if counts else 0,
        terminal=terminal,
        policy_version=submit.policy_version,
        price_version=submit.price_version,
        counters=_counters(response, ends, bytes_per_block),
        requested_class=submit.requested_class,
    )


def _counters(response: Response, ends: Sequence[Finished], bytes_per_block: int) -> EngineCounters:
    each = [end.counters for end in ends]
    return EngineCounters(
        queue_us=max(counters.queue_us for counters in each),
        ttft_us=response.first_token_us,
        total_us=max(counters.total_us for counters in each),
        num_steps=sum(counters.num_steps for counters in each),
        num_holds=sum(counters.num_holds for counters in each),
        num_swaps=sum(counters.num_swaps for counters in each),
        num_recomputes=sum(counters.num_recomputes for counters in each),
        recomputed_tokens=sum(counters.recomputed_tokens for counters in each),
        swapped_bytes=sum(counters.swapped_blocks for counters in each) * bytes_per_block,
        gpu_us=sum(counters.gpu_us for counters in each),
        waits=max(each, key=lambda counters: counters.queue_us).waits,
    )
