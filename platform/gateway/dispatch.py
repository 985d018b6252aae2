"""Which worker takes a response, from what the workers last said of themselves (some 150 ms ago).

Knows LoadSnapshots; refuses to know prompts. It is never the only door: the engine decides again at its next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.errors import Reason, Refusal, from_reject
from scheduler_engine.events import RejectReason
from scheduler_engine.policy import PriorityClass
from wire.messages import GRAMMAR, LOGPROBS, ClassSnapshot, LoadSnapshot, SamplingParameters


@dataclass(frozen=True, slots=True)
class Choice:
    """A worker as it was when it was chosen; another epoch later means that it died meanwhile."""

    worker_id: str
    epoch: int
    max_model_len: int
    features: tuple[str, ...] = ()
    num_cache_tokens: int = 0


def choose(
    loads: Sequence[LoadSnapshot], model: str, priority_class: PriorityClass, *, also_closed: bool = False
) -> Choice | Refusal:
    """The open worker with the shortest estimated start, ties by name. Refuses where none serves or all are closed.

    ``also_closed``: for a response that has started elsewhere and is never refused any more, and for one that was told
    to come back now: the worker knows whether it promised that.
    """
    serving = [load for load in loads if load.model == model and load.ready and not load.draining]
    if not serving:
        return Refusal(reason=Reason.NO_WORKER, message=f"No worker serves model {model!r} right now.")
    rows = [(load, class_row(load, priority_class)) for load in serving]
    opened = [(load, row) for load, row in rows if also_closed or not row.closed]
    if not opened:
        retry_after_us = min((row.retry_after_us for _, row in rows if row.retry_after_us is not None), default=None)
        return from_reject(RejectReason.CLASS_CLOSED, priority_class, retry_after_us)
    best, _ = min(opened, key=lambda pair: (pair[1].estimated_start_q50_us, pair[0].worker_id))
    return Choice(best.worker_id, best.epoch, best.max_model_len, best.features, best.num_cache_tokens)


def beyond(choice: Choice, sampling: SamplingParameters, grammar_param: str) -> Refusal | None:
    """What this worker cannot do is refused, never left out in silence."""
    wanted = (
        (LOGPROBS, sampling.num_top_logprobs is not None, "logprobs"),
        (GRAMMAR, sampling.grammar is not None, grammar_param),
    )
    for feature, is_wanted, param in wanted:
        if is_wanted and feature not in choice.features:
            message = f"{param!r} is not supported here with this value."
            return Refusal(reason=Reason.UNSUPPORTED_PARAMETER, message=message, param=param)
    return None


def class_row(load: LoadSnapshot, priority_class: PriorityClass) -> ClassSnapshot:
    return next(row for row in load.classes if row.priority_class is priority_class)
