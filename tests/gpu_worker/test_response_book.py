"""From a Submit to its messages and its one Usage, told with hand-made engine events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_worker.answers.response_book import ResponseBook
from gpu_worker.answers.step_draft import StepDraft
from gpu_worker.executor import DrawRules
from gpu_worker.simulated import BYTE_TOKENS
from gpu_worker.telling.telemetry import Telemetry
from scheduler_engine import events as engine
from scheduler_engine.events import FinishReason, Lever, RejectReason, Resource, StepEvents, TokenColumns
from scheduler_engine.plan import ScheduledRow, StepPlan, StepResult
from scheduler_engine.policy import PriorityClass
from scheduler_engine.request import RequestId
from wire.bus import FinishedOutput, StepOutput
from wire.messages import (
    Accepted,
    Attach,
    Cancel,
    ChoiceEnd,
    ChoiceFinished,
    Finished,
    Rejected,
    SamplingParameters,
    Submit,
    TokenLogprob,
    Tokens,
    Usage,
)


def submit(response_id: str = "r1", **changes: Any) -> Submit:
    fields: dict[str, Any] = {
        "response_id": response_id,
        "attempt": 1,
        "gateway_id": "g1",
        "tenant_id": "aurora",
        "project_id": "p1",
        "key_id": "k1",
        "priority_class": PriorityClass.INTERACTIVE,
        "model": "toy",
        "prompt_token_ids": tuple(b"hello"),
    }
    return Submit(**{**fields, **changes})


def tokens(*entries: tuple[str, int, str]) -> TokenColumns:
    """(request id, index, one character) each."""
    ids, indexes, characters = zip(*entries, strict=True)
    return TokenColumns([RequestId(name) for name in ids], indexes, [ord(character) for character in characters])


def finished(request_id: str, reason: FinishReason, prompt: int, output: int, detail: str = "") -> engine.Finished:
    counters = engine.RequestCounters(queue_us=1_000, gpu_us=500, recomputed_tokens=3, swapped_blocks=2)
    return engine.Finished(RequestId(request_id), reason, prompt, 0, output, counters, detail)


class Desk:
    """A book with a clock and a short way to speak to it."""

    def __init__(self) -> None:
        self.telemetry = Telemetry()
        self.book = ResponseBook(self.telemetry, BYTE_TOKENS, bytes_per_block=1_024)
        self.now_us = 0

    def digest(self, **events: Any) -> StepOutput:
        self.orphans, draft = [], StepDraft()
        self.orphans = self.book.digest(StepEvents(step=1, **events), draft, self.now_us)
        return draft.output("w1", 1, 1)

    def draw(self, text: str, request_id: str = "r1/0") -> tuple[list[str], bool]:
        """One token per character, as the loop does it. (texts sent in each step, whether a stop string was met)"""
        sent, start = [], len(self.book._choices[RequestId(request_id)].token_ids)
        for index, character in enumerate(text, start=start):
            output_ids = self.book._choices[RequestId(request_id)].token_ids
            row = ScheduledRow(RequestId(request_id), [0], 0, [0], True, output_ids, None)
            plan = StepPlan(1, (row,), (), (), 1, None)
            stopped = self.book.stopped(plan, StepResult(1, 1, [ord(character)]))
            end = (finished(request_id, FinishReason.STOP, 5, index + 1),) if stopped else ()
            output = self.digest(tokens=tokens((request_id, index, character)), finished=end)
            sent.append("".join(text_of(message) for message in output.to_gateways.get("g1", ())))
            self.last = output
            if stopped:
                return sent, True
        return sent, False


def text_of(message: Any) -> str:
    return "".join(map(chr, message.token_ids[0])) if isinstance(message, Tokens) else ""


@pytest.fixture
def desk() -> Desk:
    return Desk()


def only_usage(output: StepOutput) -> Usage:
    (usage,) = output.usages
    return usage


def test_a_submit_becomes_one_request_per_choice_with_a_stream_of_its_own(desk: Desk) -> None:
    sampling = SamplingParameters(seed=7)
    requests = desk.book.submit(submit(num_choices=3, sampling=sampling, max_tokens=9), received_at_us=0)
    assert [request.request_id for request in requests] == ["r1/0", "r1/1", "r1/2"]
    assert [request.max_tokens for request in requests] == [9, 9, 9]
    rules = [request.sampling for request in requests]
    assert len({rule.parameters.seed for rule in rules if isinstance(rule, DrawRules)}) == 3
    assert rules[0] == DrawRules(sampling)


def test_what_a_draw_depends_on_goes_with_the_request(desk: Desk) -> None:
    plain = submit(stop_token_ids=(9,), min_tokens=3, prompt_token_ids=(4, 2, 4))
    (request,) = desk.book.submit(plain, 0)
    assert request.sampling == DrawRules(plain.sampling, (), (9,), 3)
    sampling = SamplingParameters(repetition_penalty=1.2)
    (request,) = desk.book.submit(replace(plain, response_id="r2", sampling=sampling), 0)
    assert request.sampling == DrawRules(sampling, (2, 4), (9,), 3)


def test_a_submit_that_comes_twice_is_taken_once_even_after_its_end(desk: Desk) -> None:
    assert desk.book.submit(submit(), 0)
    assert desk.book.submit(submit(), 0) == []
    desk.digest(finished=(finished("r1/0", FinishReason.LENGTH, 5, 0),))
    assert desk.book.submit(submit(), 0) == []


def test_tokens_of_one_step_travel_in_one_entry_per_gateway(desk: Desk) -> None:
    for name, gateway_id in (("a", "g1"), ("b", "g2"), ("c", "g1")):
        desk.book.submit(submit(name, gateway_id=gateway_id), 0)
    output = desk.digest(tokens=tokens(("a/0", 0, "x"), ("b/0", 0, "y"), ("c/0", 0, "z")))
    assert set(output.to_gateways) == {"g1", "g2"}
    (entry,) = output.to_gateways["g1"]
    assert isinstance(entry, Tokens)
    assert (entry.response_ids, entry.token_ids) == (("a", "c"), ((ord("x"),), (ord("z"),)))


def test_a_response_that_completes_says_tokens_then_finished_and_leaves_one_usage(desk: Desk) -> None:
    desk.book.submit(submit(), 0)
    desk.digest(accepted=(engine.Accepted(RequestId("r1/0"), 2, 7_000),))
    output = desk.digest(
        tokens=tokens(("r1/0", 0, "h")), finished=(finished("r1/0", FinishReason.LENGTH, prompt=5, output=1),)
    )
    said = output.to_gateways["g1"]
    assert [type(message) for message in said] == [Tokens, Finished]
    usage = only_usage(output)
    assert (usage.terminal, usage.prompt_tokens, usage.output_tokens) == ("completed", 5, 1)
    assert usage.counters.swapped_bytes == 2_048
    assert output.outputs == {"r1": FinishedOutput(said[-1], [[ord("h")]])}
    assert len(desk.book) == 0


def test_a_prompt_counts_once_however_many_choices_it_has(desk: Desk) -> None:
    desk.book.submit(submit(num_choices=2), 0)
    accepted = tuple(engine.Accepted(RequestId(f"r1/{index}"), index, 0) for index in range(2))
    output = desk.digest(accepted=accepted)
    assert [type(message) for message in output.to_gateways["g1"]] == [Accepted]
    output = desk.digest(tokens=tokens(("r1/0", 0, "a"), ("r1/1", 0, "b")))
    assert not desk.digest(finished=(finished("r1/1", FinishReason.STOP, 5, 1),)).usages
    usage = only_usage(desk.digest(finished=(finished("r1/0", FinishReason.STOP, 5, 1),)))
    assert (usage.prompt_tokens, usage.output_tokens) == (5, 2)


def test_a_refused_response_is_rejected_and_costs_nothing(desk: Desk) -> None:
    desk.book.submit(submit(), 0)
    desk.now_us = 40_000
    waits = (engine.Wait("queued", "memory", "batch", 30_000),)
    output = desk.digest(rejected=(engine.Rejected(RequestId("r1/0"), RejectReason.LATE, 2_000_000, waits),))
    (message,) = output.to_gateways["g1"]
    told = (*waits, ("queued", "step_under_way", "", 10_000))  # the step that ran until it could be told
    assert message == Rejected(response_id="r1", attempt=1, reason="late", retry_after_us=2_000_000, waits=told)
    usage = only_usage(output)
    assert (usage.terminal, usage.prompt_tokens, usage.output_tokens) == ("shed", 0, 0)
    assert desk.telemetry.classes[PriorityClass.INTERACTIVE].shed == {"late": 1}


def test_siblings_of_a_refused_choice_are_cancelled_unless_they_have_begun_to_speak(desk: Desk) -> None:
    desk.book.submit(submit(num_choices=3), 0)
    desk.digest(tokens=tokens(("r1/0", 0, "a")))
    desk.digest(rejected=(engine.Rejected(RequestId("r1/1"), RejectReason.LATE, None),))
    assert desk.orphans == ["r1/2"]
    desk.digest(finished=(finished("r1/2", FinishReason.CANCELLED, 0, 0),))
    usage = only_usage(desk.digest(finished=(finished("r1/0", FinishReason.LENGTH, 5, 1),)))
    assert (usage.terminal, usage.output_tokens) == ("completed", 1)


@pytest.mark.parametrize(
    ("reason", "terminal"),
    [
        ("client", "cancelled_client"),
        ("admin", "cancelled_admin"),
        ("expired", "expired"),
        ("gateway_lost", "failed_platform"),
    ],
)
def test_a_cancelled_response_counts_what_was_computed(desk: Desk, reason: str, terminal: str) -> None:
    desk.book.submit(submit(), 0)
    desk.digest(tokens=tokens(("r1/0", 0, "h")))
    assert desk.book.cancel(Cancel(response_id="r1", attempt=1, reason=reason)) == ["r1/0"]
    output = desk.digest(finished=(finished("r1/0", FinishReason.CANCELLED, prompt=5, output=1),))
    usage = only_usage(output)
    assert (usage.terminal, usage.prompt_tokens, usage.output_tokens) == (terminal, 5, 1)
    end = output.to_gateways["g1"][-1]
    assert isinstance(end, Finished)
    assert end.choices[0].detail == reason


def test_a_cancel_in_the_middle_of_a_prompt_counts_the_part_that_was_computed(desk: Desk) -> None:
    desk.book.submit(submit(), 0)
    desk.book.cancel(Cancel(response_id="r1", attempt=1, reason="client"))
    usage = only_usage(desk.digest(finished=(finished("r1/0", FinishReason.CANCELLED, prompt=3, output=0),)))
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 0)


def test_a_cancel_that_comes_too_late_leaves_the_response_completed(desk: Desk) -> None:
    desk.book.submit(submit(), 0)
    desk.book.cancel(Cancel(response_id="r1", attempt=1, reason="client"))
    usage = only_usage(desk.digest(finished=(finished("r1/0", FinishReason.STOP, 5, 2),)))
    assert usage.terminal == "completed"


def test_a_cancel_of_another_attempt_or_of_nobody_does_nothing(desk: Desk) -> None:
    desk.book.submit(submit(attempt=2), 0)
    assert desk.book.cancel(Cancel(response_id="r1", attempt=1, reason="client")) == []
    assert desk.book.cancel(Cancel(response_id="nobody", attempt=1, reason="client")) == []


@pytest.mark.parametrize(("output_tokens", "counted"), [(0, (0, 0)), (2, (5, 2))])
def test_a_platform_failure_counts_only_what_came_after_a_first_token(
    desk: Desk, output_tokens: int, counted: tuple[int, int]
) -> None:
    desk.book.submit(submit(), 0)
    usage = only_usage(desk.digest(finished=(finished("r1/0", FinishReason.FAILED, 5, output_tokens, "not_finite"),)))
    assert usage.terminal == "failed_platform"
    assert (usage.prompt_tokens, usage.output_tokens) == counted


def test_a_stop_string_ends_the_response_in_its_step_and_cuts_the_text(desk: Desk) -> None:
    desk.book.submit(submit(stop_strings=(b"END",)), 0)
    sent, stopped = desk.draw("a b END never")
    assert stopped
    assert sent == ["a", " ", "b", " ", "", "", "END"]
    end = desk.last.to_gateways["g1"][-1]
    assert isinstance(end, Finished)
    assert (end.choices[0].reason, end.choices[0].visible_bytes) == ("stop", 4)
    assert only_usage(desk.last).output_tokens == 7  # the stop text was made and is billed


def test_held_back_tokens_come_together_once_no_stop_string_can_follow(desk: Desk) -> None:
    desk.book.submit(submit(stop_strings=(b"END",)), 0)
    sent, stopped = desk.draw("aENx")
    assert not stopped
    assert sent == ["a", "", "", "ENx"]


def test_held_back_tokens_are_sent_when_the_response_ends_for_another_reason(desk: Desk) -> None:
    desk.book.submit(submit(stop_strings=(b"END",)), 0)
    desk.draw("aE")
    output = desk.digest(finished=(finished("r1/0", FinishReason.LENGTH, 5, 2),))
    assert [text_of(message) for message in output.to_gateways["g1"]] == ["E", ""]
    end = output.to_gateways["g1"][-1]
    assert isinstance(end, Finished)
    assert end.choices[0].visible_bytes is None


def test_a_stop_string_before_the_minimum_length_does_not_stop(desk: Desk) -> None:
    desk.book.submit(submit(stop_strings=(b".",), min_tokens=3), 0)
    sent, stopped = desk.draw("..a.b")
    assert stopped
    assert len(sent) == 4


def test_a_gateway_that_attaches_gets_the_tokens_from_its_index_on(desk: Desk) -> None:
    desk.book.submit(submit(), 0)
    desk.draw("hello")
    desk.book.attach(Attach(response_id="r1", attempt=1, gateway_id="g2", from_index=2))
    output = desk.digest(tokens=tokens(("r1/0", 5, "!")))
    (entry,) = output.to_gateways["g2"]
    assert (text_of(entry), entry.first_indexes) == ("llo!", (2,))
    assert "g1" not in output.to_gateways


def logprob_of(character: str) -> TokenLogprob:
    return TokenLogprob(token_id=ord(character), logprob=-ord(character) / 100)


def draw_with_logprobs(desk: Desk, text: str) -> list[StepOutput]:
    """One token per character for r1, none of them asked for by r2, which draws beside it."""
    outputs = []
    for character in text:
        index = len(desk.book._choices[RequestId("r1/0")].token_ids)
        rows = tuple(ScheduledRow(RequestId(name), [0], 0, [0], True, [], None) for name in ("r2/0", "r1/0"))
        result = StepResult(1, 1, [ord("z"), ord(character)], logprobs=[None, logprob_of(character)])
        plan = StepPlan(1, rows, (), (), 1, None)
        desk.book.take_logprobs(plan, result)
        desk.book.stopped(plan, result)
        outputs.append(desk.digest(tokens=tokens(("r2/0", index, "z"), ("r1/0", index, character))))
    return outputs


def test_logprobs_travel_beside_their_tokens_also_when_these_are_held_back_or_sent_again(desk: Desk) -> None:
    asking = SamplingParameters(num_top_logprobs=0)
    desk.book.submit(submit("r1", sampling=asking, stop_strings=(b"END",)), 0)
    desk.book.submit(submit("r2"), 0)
    outputs = draw_with_logprobs(desk, "aENx")
    entries = [entry for output in outputs for entry in output.to_gateways["g1"] if isinstance(entry, Tokens)]
    told = [entry.logprobs for entry in entries]
    assert told == [
        (None, (logprob_of("a"),)),
        (),  # nobody's logprobs: only r2 speaks
        (),
        (None, tuple(map(logprob_of, "ENx"))),
    ]
    desk.book.attach(Attach(response_id="r1", attempt=1, gateway_id="g2", from_index=2))
    (again,) = desk.digest().to_gateways["g2"]
    assert isinstance(again, Tokens)
    assert again.logprobs == (tuple(map(logprob_of, "Nx")),)


def test_a_token_that_an_earlier_attempt_delivered_has_no_logprob(desk: Desk) -> None:
    asking = SamplingParameters(num_top_logprobs=0)
    desk.book.submit(submit(attempt=2, sampling=asking, delivered_token_ids=(tuple(b"ab"),)), 0)
    desk.book.submit(submit("r2"), 0)
    (output,) = draw_with_logprobs(desk, "c")
    (entry,) = output.to_gateways["g1"]
    assert isinstance(entry, Tokens)
    assert entry.logprobs == (None, (logprob_of("c"),))
    desk.book.attach(Attach(response_id="r1", attempt=2, gateway_id="g2", from_index=1))
    (again,) = desk.digest().to_gateways["g2"]
    assert isinstance(again, Tokens)
    assert again.logprobs == ((None, logprob_of("c")),)


def test_a_lost_gateway_takes_only_its_own_responses_with_it(desk: Desk) -> None:
    desk.book.submit(submit("a", gateway_id="g1"), 0)
    desk.book.submit(submit("b", gateway_id="g2"), 0)
    assert desk.book.cancel_of_gateway("g1") == ["a/0"]
    assert desk.book.gateways() == {"g1": 1, "g2": 1}


def test_counters_agree_with_the_usages_once_nothing_is_in_flight(desk: Desk) -> None:
    desk.book.submit(submit("a"), 0)
    desk.book.submit(submit("b"), 0)
    preempted = engine.Preempted(RequestId("a/0"), Lever.SWAP, Resource.MEMORY, None)
    desk.now_us = 40_000
    outputs = [
        desk.digest(tokens=tokens(("a/0", 0, "x"), ("b/0", 0, "y")), preempted=(preempted,)),
        desk.digest(finished=(finished("a/0", FinishReason.STOP, 5, 1), finished("b/0", FinishReason.FAILED, 5, 1))),
    ]
    usages = [usage for output in outputs for usage in output.usages]
    counters = desk.telemetry.classes[PriorityClass.INTERACTIVE]
    assert counters.output_tokens == sum(usage.output_tokens for usage in usages) == 2
    assert counters.prompt_tokens == sum(usage.prompt_tokens for usage in usages) == 10
    assert counters.preemptions == {("swap", "memory"): 1}
    assert counters.ttft.value().sum_us == 80_000
    assert sum(counters.ttft.value().counts) == 2


def test_a_choice_that_ends_before_its_siblings_says_so_at_once(desk: Desk) -> None:
    desk.book.submit(submit(num_choices=2), 0)
    ends = (finished("r1/1", FinishReason.LENGTH, prompt=5, output=1),)
    output = desk.digest(tokens=tokens(("r1/0", 0, "a"), ("r1/1", 0, "b")), finished=ends)
    _, said = output.to_gateways["g1"]
    assert said == ChoiceFinished(response_id="r1", attempt=1, end=ChoiceEnd(choice=1, reason="length"))
    assert output.usages == []
    output = desk.digest(finished=(finished("r1/0", FinishReason.STOP, prompt=5, output=1),))
    (end,) = output.to_gateways["g1"]
    assert [choice.reason for choice in end.choices] == ["stop", "length"]
    assert only_usage(output).output_tokens == 2


def test_a_choice_that_ended_in_an_earlier_attempt_is_counted_and_not_computed_again(desk: Desk) -> None:
    ended = ChoiceEnd(choice=0, reason="stop", visible_bytes=2)
    delivered = (tuple(b"abc"), tuple(b"x"))
    requests = desk.book.submit(
        submit(num_choices=2, attempt=2, delivered_token_ids=delivered, ended_choices=(ended,)), 0
    )
    assert [request.request_id for request in requests] == ["r1/1"]
    output = desk.digest(finished=(finished("r1/1", FinishReason.LENGTH, prompt=5, output=4),))
    (end,) = output.to_gateways["g1"]
    assert end.choices[0] == ended
    assert only_usage(output).output_tokens == 3 + 4
    assert output.outputs["r1"].token_ids[0] == list(b"abc")


def test_an_attach_repeats_the_ends_of_choices_that_the_new_owner_has_not_heard(desk: Desk) -> None:
    desk.book.submit(submit(num_choices=2), 0)
    desk.digest(
        tokens=tokens(("r1/0", 0, "a"), ("r1/1", 0, "b")),
        finished=(finished("r1/1", FinishReason.LENGTH, prompt=5, output=1),),
    )
    desk.book.attach(Attach(response_id="r1", attempt=1, gateway_id="g2", from_index=0))
    sent, said = desk.digest().to_gateways["g2"]
    assert sent.token_ids == ((ord("a"),), (ord("b"),))
    assert isinstance(said, ChoiceFinished)
