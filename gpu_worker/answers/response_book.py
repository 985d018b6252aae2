"""Between the Bus and the engine: a Submit becomes requests, the engine's events become messages and one Usage per
response.

Knows responses, choices and stop strings; refuses to know threads, Redis and devices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import cast

from gpu_worker.answers.charging import usage_of
from gpu_worker.answers.prefix_keys import GrowingPrefix, PrefixKeys
from gpu_worker.answers.response import Choice, Response, request_of
from gpu_worker.answers.step_draft import StepDraft
from gpu_worker.executor import Constraint
from gpu_worker.telling.telemetry import Telemetry
from scheduler_engine import events
from scheduler_engine.events import FinishReason, RejectReason, StepEvents, TokenColumns
from scheduler_engine.plan import StepPlan, StepResult
from scheduler_engine.request import Request, RequestId
from wire.bus import FinishedOutput
from wire.messages import (
    Accepted,
    Attach,
    Cancel,
    ChoiceEnd,
    ChoiceFinished,
    Finished,
    Rejected,
    Submit,
    TokenLogprob,
    Usage,
    Wait,
)

# A gateway whose connection was cut sends a Submit once more; this many are remembered to tell the second from a new
# one.
NUM_REMEMBERED = 10_000


class ResponseBook:
    """All responses in the worker. Always: every Submit taken in leaves exactly one Usage, when its last choice
    ends.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        token_bytes: Sequence[bytes],
        bytes_per_block: int,
        prefix_keys: PrefixKeys | None = None,
    ) -> None:
        """Without ``prefix_keys`` no request shares blocks with another."""
        self._telemetry = telemetry
        self._token_bytes = token_bytes
        self._bytes_per_block = bytes_per_block
        self._prefix_keys = prefix_keys
        self._responses: dict[str, Response] = {}
        self._choices: dict[RequestId, Choice] = {}
        self._num_matched = 0  # choices with stop strings: without any, results need not be looked at
        self._remembered: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._attached: list[Response] = []

    def __len__(self) -> int:
        return len(self._responses)

    def gateways(self) -> dict[str, int]:
        """Gateways that own something here, and how much."""
        counts: dict[str, int] = {}
        for response in self._responses.values():
            counts[response.gateway_id] = counts.get(response.gateway_id, 0) + 1
        return counts

    def request_ids(self) -> list[RequestId]:
        """Requests that have not ended."""
        return list(self._choices)

    def response_id_of(self, request_id: str) -> str:
        return request_id.rpartition("/")[0]

    def submit(self, submit: Submit, received_at_us: int, constraints: Sequence[Constraint] = ()) -> list[Request]:
        """The requests to hand to the engine; none for a Submit that has been here already.

        ``constraints``: one for each choice, or none.
        """
        key = (submit.response_id, submit.attempt)
        if key in self._remembered or submit.response_id in self._responses:
            return []
        self._remembered[key] = None
        if len(self._remembered) > NUM_REMEMBERED:
            self._remembered.popitem(last=False)
        response = self._responses[submit.response_id] = Response(submit, received_at_us)
        going_on = [choice for choice in response.choices if choice.end is None]
        for choice in going_on:
            self._choices[choice.request_id] = choice
            self._num_matched += choice.matcher is not None
            self._feed_delivered(choice)
        keys = self._name_prompt(submit, going_on)
        return [request_of(choice, constraints[choice.index] if constraints else None, keys) for choice in going_on]

    def _name_prompt(self, submit: Submit, choices: Sequence[Choice]) -> tuple[bytes, ...]:
        if self._prefix_keys is None or not submit.cache_salt:
            return ()
        keys = self._prefix_keys.of(submit.cache_salt, submit.prompt_token_ids)
        for choice in choices:
            choice.prefix = GrowingPrefix(self._prefix_keys, submit.cache_salt, keys)
        return keys

    def filled(self, step: StepEvents) -> Iterator[tuple[RequestId, tuple[bytes, ...]]]:
        """Keys of the blocks that a step's tokens have filled; ask once the step is digested."""
        for request_id in step.filled:
            choice = self._choices[request_id]
            if choice.prefix is not None:
                prompt, output = choice.response.submit.prompt_token_ids, choice.token_ids
                keys = choice.prefix.grow(prompt, output, len(prompt) + len(output) - 1)
                if keys:
                    yield request_id, keys

    def _feed_delivered(self, choice: Choice) -> None:
        if choice.matcher is not None:
            for token_id in choice.token_ids:
                choice.matcher.push(self._token_bytes[token_id], may_stop=False)

    def cancel(self, cancel: Cancel) -> list[RequestId]:
        """The requests the engine has to cancel: those of this attempt that have not ended."""
        response = self._responses.get(cancel.response_id)
        if response is None or response.submit.attempt != cancel.attempt:
            return []
        return self._cancel(response, cancel.reason)

    def cancel_of_gateway(self, gateway_id: str) -> list[RequestId]:
        """The requests of a gateway that is lost."""
        owned = [response for response in self._responses.values() if response.gateway_id == gateway_id]
        return [request_id for response in owned for request_id in self._cancel(response, "gateway_lost")]

    def cancel_all(self, reason: str) -> list[RequestId]:
        responses = list(self._responses.values())
        return [request_id for response in responses for request_id in self._cancel(response, reason)]

    def _cancel(self, response: Response, reason: str) -> list[RequestId]:
        response.cancel_reason = response.cancel_reason or reason
        return [choice.request_id for choice in response.choices if choice.end is None]

    def attach(self, attach: Attach) -> None:
        """Another gateway owns the stream from now on; with the next step it gets the tokens from its index on."""
        response = self._responses.get(attach.response_id)
        if response is None or response.submit.attempt != attach.attempt:
            return
        response.gateway_id = attach.gateway_id
        for choice in response.choices:
            choice.num_sent = min(choice.num_sent, attach.from_index)
        self._attached.append(response)

    def stopped(self, plan: StepPlan, result: StepResult) -> frozenset[RequestId]:
        """Requests whose text met a stop string with the token just drawn."""
        if not self._num_matched:
            return frozenset()
        return frozenset(self._matches(plan, result))

    def _matches(self, plan: StepPlan, result: StepResult) -> Iterator[RequestId]:
        for row, token_id in zip(plan.rows, result.sampled_token_ids, strict=True):
            if not row.samples or token_id < 0:
                continue
            choice = self._choices[row.request_id]
            if choice.matcher is None:
                continue
            submit = choice.response.submit
            text = b"" if token_id in submit.stop_token_ids else self._token_bytes[token_id]
            if choice.matcher.push(text, may_stop=len(row.output_ids) + 1 >= submit.min_tokens):
                yield row.request_id

    def take_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        """Keep those of the tokens just drawn; ``digest`` of the same step brings the tokens."""
        if not result.logprobs:
            return
        for row, logprob in zip(plan.rows, result.logprobs, strict=True):
            if logprob is not None:
                self._choices[row.request_id].logprobs.append(cast("TokenLogprob", logprob))

    def digest(self, step: StepEvents, draft: StepDraft, now_us: int) -> list[RequestId]:
        """Turn a step's events into messages. Returns requests to cancel: siblings of a choice that was refused."""
        orphans: list[RequestId] = []
        for accepted in step.accepted:
            self._accept(accepted, draft)
        for rejected in step.rejected:
            orphans.extend(self._reject(rejected, draft, now_us))
        for preempted in step.preempted:
            choice = self._choices[preempted.request_id]
            counters = self._telemetry.classes[choice.response.submit.priority_class]
            counters.preemptions[preempted.lever.value, preempted.resource.value] += 1
        self._take_tokens(step.tokens, draft, now_us)
        for finished in step.finished:
            self._finish(finished, draft)
        for response in self._attached:
            for choice in response.choices:
                draft.send_tokens(choice, choice.num_ready)
                if choice.end is not None and not response.has_ended:
                    self._tell_end(choice, draft)
        self._attached.clear()
        return orphans

    def _accept(self, accepted: events.Accepted, draft: StepDraft) -> None:
        response = self._choices[accepted.request_id].response
        if response.accepted:
            return
        response.accepted = True
        message = Accepted(
            response_id=response.submit.response_id,
            attempt=response.submit.attempt,
            position=accepted.position,
            estimated_start_us=accepted.estimated_start_us,
        )
        draft.reply(response.gateway_id, message)

    def _reject(self, rejected: events.Rejected, draft: StepDraft, now_us: int) -> list[RequestId]:
        choice = self._choices[rejected.request_id]
        response = choice.response
        response.refusal = response.refusal or rejected
        waited_us = now_us - response.received_at_us
        waits = _whole(rejected, waited_us)
        self._end_choice(
            choice,
            events.Finished(
                request_id=rejected.request_id,
                reason=FinishReason.SHED,
                prompt_tokens=0,
                cached_tokens=0,
                output_tokens=0,
                counters=events.RequestCounters(queue_us=waited_us, total_us=waited_us, waits=waits),
                detail=rejected.reason.value,
            ),
            draft,
        )
        return [other.request_id for other in response.choices if other.end is None and not other.token_ids]

    def _take_tokens(self, columns: TokenColumns, draft: StepDraft, now_us: int) -> None:
        choices, classes = self._choices, self._telemetry.classes
        for request_id, token_id in zip(columns.request_ids, columns.token_ids, strict=True):
            choice = choices[request_id]
            choice.token_ids.append(token_id)
            response = choice.response
            counters = classes[response.submit.priority_class]
            counters.output_tokens += 1
            if response.first_token_us is None:
                response.first_token_us = now_us - response.received_at_us
                counters.ttft.observe(response.first_token_us)
            num_ready = len(choice.token_ids) if choice.matcher is None else choice.matcher.num_decided
            draft.send_tokens(choice, num_ready)

    def _finish(self, finished: events.Finished, draft: StepDraft) -> None:
        self._end_choice(self._choices[finished.request_id], finished, draft)

    def _end_choice(self, choice: Choice, finished: events.Finished, draft: StepDraft) -> None:
        choice.end = finished
        draft.send_tokens(choice, len(choice.token_ids))
        del self._choices[choice.request_id]
        self._num_matched -= choice.matcher is not None
        if choice.response.has_ended:
            self._end(choice.response, draft)
        elif finished.reason is not FinishReason.SHED:
            self._tell_end(choice, draft)

    def _tell_end(self, choice: Choice, draft: StepDraft) -> None:
        submit = choice.response.submit
        message = ChoiceFinished(response_id=submit.response_id, attempt=submit.attempt, end=_choice_end(choice))
        draft.finish(choice.response.gateway_id, message)

    def _end(self, response: Response, draft: StepDraft) -> None:
        submit = response.submit
        del self._responses[submit.response_id]
        usage = usage_of(response, self._bytes_per_block)
        draft.usages.append(usage)
        self._record(usage, response)
        if usage.terminal == "shed":
            draft.reply(response.gateway_id, _rejected(response, usage.counters.waits))
            return
        finished = Finished(
            response_id=submit.response_id,
            attempt=submit.attempt,
            choices=tuple(_choice_end(choice) for choice in response.choices),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            counters=usage.counters,
        )
        draft.finish(response.gateway_id, finished)
        draft.outputs[submit.response_id] = FinishedOutput(finished, [choice.token_ids for choice in response.choices])

    def _record(self, usage: Usage, response: Response) -> None:
        counters = self._telemetry.classes[usage.priority_class]
        counters.prompt_tokens += usage.prompt_tokens
        counters.queue_wait.observe(usage.counters.queue_us)
        if usage.terminal == "shed":
            counters.shed[response.ends[0].detail or FinishReason.SHED.value] += 1
        else:
            counters.ended(response.ends, usage.counters)


def _whole(rejected: events.Rejected, waited_us: int) -> tuple[events.Wait, ...]:
    """The causes of the whole wait: once it was decided, the news waited for the end of the step."""
    rest_us = waited_us - sum(wait.duration_us for wait in rejected.waits)
    return (*rejected.waits, events.Wait("queued", "step_under_way", "", rest_us)) if rest_us else rejected.waits


def _rejected(response: Response, waits: tuple[Wait, ...]) -> Rejected:
    submit, refusal = response.submit, response.refusal
    if refusal is not None:
        reason, retry_after_us = refusal.reason.value, refusal.retry_after_us
    else:
        reason, retry_after_us = response.ends[0].detail or RejectReason.LATE.value, None
    return Rejected(
        response_id=submit.response_id,
        attempt=submit.attempt,
        reason=reason,
        retry_after_us=retry_after_us,
        waits=waits,
    )


def _choice_end(choice: Choice) -> ChoiceEnd:
    end = choice.end
    if end is None:
        raise AssertionError("a response ends when its last choice has")
    if choice.ended_before is not None:
        return choice.ended_before
    visible_bytes = None if choice.matcher is None else choice.matcher.visible_bytes
    detail = end.detail
    if end.reason is FinishReason.CANCELLED:
        detail = choice.response.cancel_reason or "sibling_refused"
    return ChoiceEnd(choice=choice.index, reason=end.reason.value, visible_bytes=visible_bytes, detail=detail)
