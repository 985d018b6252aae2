"""A Submit while it lives in the worker, and the requests it becomes. Knows its choices; refuses to know the Bus."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gpu_worker.answers.prefix_keys import GrowingPrefix
from gpu_worker.answers.stop_strings import StopAutomaton, StopMatcher
from gpu_worker.executor import Constraint, DrawRules
from scheduler_engine import events
from scheduler_engine.events import FinishReason
from scheduler_engine.request import Request, RequestId
from wire.messages import ChoiceEnd, SamplingParameters, Submit, TokenLogprob

_SEED_MASK = 2**63 - 1
_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: siblings draw from streams far apart


class Choice:
    """One sequence of a response. Always: ``num_sent <= len(token_ids)``, and what is sent is never taken back.

    ``logprobs`` is aligned with ``token_ids`` where they were asked for, else empty.
    """

    __slots__ = (
        "end",
        "ended_before",
        "index",
        "logprobs",
        "matcher",
        "num_sent",
        "prefix",
        "request_id",
        "response",
        "token_ids",
    )

    def __init__(self, response: Response, index: int, matcher: StopMatcher | None) -> None:
        delivered = response.submit.delivered_token_ids
        self.response = response
        self.index = index
        self.request_id = RequestId(f"{response.submit.response_id}/{index}")
        self.matcher = matcher
        self.token_ids: list[int] = list(delivered[index]) if delivered else []
        self.num_sent = len(self.token_ids)
        asks = response.submit.sampling.num_top_logprobs is not None
        self.logprobs: list[TokenLogprob | None] = [None] * len(self.token_ids) if asks else []
        self.ended_before: ChoiceEnd | None = None  # in an earlier attempt
        self.end: events.Finished | None = None
        self.prefix: GrowingPrefix | None = None  # where its blocks may be found by others

    def keep_ended(self, ended: ChoiceEnd) -> None:
        """An earlier attempt brought it to its end: only counted here."""
        self.ended_before = ended
        self.end = events.Finished(
            request_id=self.request_id,
            reason=FinishReason(ended.reason),
            prompt_tokens=len(self.response.submit.prompt_token_ids),
            cached_tokens=0,
            output_tokens=len(self.token_ids),
            counters=events.RequestCounters(),
            detail=ended.detail,
        )

    @property
    def num_ready(self) -> int:
        """Tokens that no stop string can cut any more."""
        if self.matcher is None or self.end is not None:
            return len(self.token_ids)
        return self.matcher.num_decided


class Response:
    """A Submit in the worker. Always: ends once, when its last choice has ended."""

    __slots__ = (
        "accepted",
        "cancel_reason",
        "choices",
        "first_token_us",
        "gateway_id",
        "received_at_us",
        "refusal",
        "submit",
    )

    def __init__(self, submit: Submit, received_at_us: int) -> None:
        self.submit = submit
        self.gateway_id = submit.gateway_id
        self.received_at_us = received_at_us
        self.accepted = False
        self.cancel_reason: str | None = None
        self.refusal: events.Rejected | None = None
        self.first_token_us: int | None = None
        automaton = StopAutomaton(submit.stop_strings) if submit.stop_strings else None
        self.choices = [
            Choice(self, index, StopMatcher(automaton) if automaton else None) for index in range(submit.num_choices)
        ]
        for ended in submit.ended_choices:
            self.choices[ended.choice].keep_ended(ended)

    @property
    def ends(self) -> list[events.Finished]:
        """How its choices ended, those that have."""
        return [choice.end for choice in self.choices if choice.end is not None]

    @property
    def has_ended(self) -> bool:
        return all(choice.end is not None for choice in self.choices)


def request_of(choice: Choice, constraint: Constraint | None = None, prefix_keys: Sequence[bytes] = ()) -> Request:
    """What the engine is asked for this choice; tokens delivered by an earlier attempt are history."""
    submit = choice.response.submit
    return Request(
        request_id=choice.request_id,
        tenant_id=submit.tenant_id,
        priority_class=submit.priority_class,
        prompt_token_ids=submit.prompt_token_ids,
        max_tokens=submit.max_tokens,
        min_tokens=submit.min_tokens,
        stop_token_ids=submit.stop_token_ids,
        deadline_us=submit.remaining_first_token_us,
        hard_deadline_us=submit.remaining_hard_deadline_us,
        completion_deadline_us=submit.remaining_completion_us,
        max_queue_wait_us=submit.max_queue_wait_us,
        reproducible=submit.reproducible,
        value_micros=submit.value_micros,
        is_return=submit.is_return,
        prefix_keys=prefix_keys,
        delivered_token_ids=tuple(choice.token_ids),
        response_has_started=submit.has_started,
        sampling=_rules(choice, constraint),
    )


def _rules(choice: Choice, constraint: Constraint | None) -> DrawRules:
    submit = choice.response.submit
    looks_back = submit.sampling.repetition_penalty != 1.0
    return DrawRules(
        parameters=_of_choice(submit.sampling, choice.index),
        prompt_token_ids=tuple(sorted(set(submit.prompt_token_ids))) if looks_back else (),
        stop_token_ids=submit.stop_token_ids,
        min_tokens=submit.min_tokens,
        constraint=constraint,
    )


def _of_choice(sampling: SamplingParameters, choice: int) -> SamplingParameters:
    if sampling.seed is None or choice == 0:
        return sampling
    return dataclasses.replace(sampling, seed=(sampling.seed + choice * _SEED_STRIDE) & _SEED_MASK)
