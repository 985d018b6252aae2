"""Answers that must follow a grammar, on the real model: it holds for every draw, and the neighbours do not notice."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pytest

from gpu_worker.answers.grammars import GrammarCompiler
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.executor import ConstraintError, DrawRules
from gpu_worker.simulated import BYTE_TOKENS
from tests.gpu_worker.model.worker import ModelWorker
from wire.grammars import MAX_PROPERTIES, GrammarError
from wire.messages import Finished, Grammar, Rejected, SamplingParameters

STOPS = (257, 258)
SCHEMA = {
    "type": "object",
    "properties": {"verdict": {"enum": ["yes", "no"]}, "score": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["verdict", "score"],
    "additionalProperties": False,
}


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(BYTE_TOKENS, STOPS)
    yield compiler
    compiler.close()


@pytest.fixture
def worker(tiny_executor: ModelExecutor, compiler: GrammarCompiler) -> ModelWorker:
    return ModelWorker(tiny_executor, grammars=compiler)


def follow(kind: str, source: str = "", **parameters: Any) -> SamplingParameters:
    return SamplingParameters(grammar=Grammar(kind=kind, source=source), **parameters)


def text_of(worker: ModelWorker, response_id: str, choice: int = 0) -> str:
    """What a reader sees: the stop token shows nothing."""
    return b"".join(BYTE_TOKENS[token_id] for token_id in worker.tokens[response_id, choice]).decode()


def end_of(worker: ModelWorker, response_id: str) -> str:
    end = worker.ends[response_id]
    assert isinstance(end, Finished)
    return end.choices[0].reason


def test_every_answer_under_a_schema_is_what_the_schema_says_and_neighbours_are_undisturbed(
    worker: ModelWorker,
) -> None:
    worker.submit("free", [9] * 40, sampling=SamplingParameters(temperature=0.0))
    worker.run()
    free = worker.tokens["free", 0]
    for seed in range(6):
        sampling = follow("json_schema", json.dumps(SCHEMA), seed=seed, temperature=1.5)
        worker.submit(f"r{seed}", [seed] * (5 * seed + 1), sampling=sampling, stop_token_ids=STOPS, max_tokens=120)
    worker.submit("free again", [9] * 40, sampling=SamplingParameters(temperature=0.0))
    worker.run()
    assert worker.tokens["free again", 0] == free
    answers = [json.loads(text_of(worker, f"r{seed}")) for seed in range(6)]
    assert all(set(answer) == {"verdict", "score"} and 0 <= answer["score"] <= 99 for answer in answers)
    assert len({json.dumps(answer) for answer in answers}) > 1
    assert {end_of(worker, f"r{seed}") for seed in range(6)} == {"stop"}


@pytest.mark.parametrize(
    ("kind", "source", "pattern"),
    [
        ("regex", "[ab]{3,5}c", "[ab]{3,5}c"),
        ("lark", 'start: ("ping" | "pong") "!"+\n', "(ping|pong)!+"),
        ("json_object", "", r"\{.*"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_kind_of_grammar_is_followed(
    worker: ModelWorker, kind: str, source: str, pattern: str, temperature: float
) -> None:
    worker.submit("r", sampling=follow(kind, source, temperature=temperature, seed=3), max_tokens=40)
    worker.run()
    assert re.fullmatch(pattern, text_of(worker, "r"), re.DOTALL)


def test_a_grammar_ends_the_text_also_when_no_stop_token_was_named_and_min_tokens_asks_for_more(
    worker: ModelWorker,
) -> None:
    worker.submit("r", sampling=follow("regex", "ab", temperature=0.0), min_tokens=9, max_tokens=20)
    worker.run()
    assert (text_of(worker, "r"), end_of(worker, "r")) == ("ab", "stop")
    assert worker.tokens["r", 0][-1] in STOPS


def test_choices_of_one_submit_follow_the_grammar_each_for_itself(worker: ModelWorker) -> None:
    worker.submit("r", sampling=follow("regex", "[a-z]{6}", seed=1), num_choices=4, max_tokens=20)
    worker.run()
    texts = [text_of(worker, "r", choice) for choice in range(4)]
    assert all(re.fullmatch("[a-z]{6}", text) for text in texts)
    assert len(set(texts)) > 1


def test_the_grammar_goes_on_where_an_earlier_attempt_was_cut_off(worker: ModelWorker) -> None:
    sampling = follow("regex", "[a-z]{4}[0-9]{4}", seed=1)
    worker.submit("whole", sampling=sampling, max_tokens=20)
    worker.run()
    whole = worker.tokens["whole", 0]
    worker.tokens["cut", 0] = whole[:5]
    worker.submit("cut", sampling=sampling, max_tokens=20, attempt=2, delivered_token_ids=(tuple(whole[:5]),))
    worker.run()
    assert worker.tokens["cut", 0] == whole


def test_a_grammar_that_is_none_is_rejected_free_of_charge_and_nobody_else_is_touched(worker: ModelWorker) -> None:
    worker.submit("bad", sampling=follow("regex", "(a"), num_choices=2)
    worker.submit("worse", sampling=follow("json_schema", "{"))
    worker.submit("good", sampling=SamplingParameters(temperature=0.0))
    worker.run()
    for response_id in ("bad", "worse"):
        end, usage = worker.ends[response_id], worker.usages[response_id]
        assert isinstance(end, Rejected)
        assert (end.reason, end.retry_after_us) == ("grammar", None)
        assert (usage.terminal, usage.prompt_tokens, usage.output_tokens) == ("shed", 0, 0)
    assert len(worker.tokens["good", 0]) == 8


def test_a_grammar_that_fails_in_the_middle_ends_its_own_row(tiny_executor: ModelExecutor, drive: Any) -> None:
    class Failing:
        def allowed(self, output_ids: Sequence[int]) -> bytes:
            if output_ids:
                raise ConstraintError("too complex")
            return bytes(33 * [255])

    driver = drive(tiny_executor)
    expected = list(driver.run(driver.add("alone", [5, 6]), 4))
    good, bad = driver.add("good", [5, 6]), driver.add("bad", [5, 6])
    bad.sampling = DrawRules(SamplingParameters(temperature=0.0), constraint=Failing())
    assert driver.step([bad, good]).failed == ()
    (failure,) = driver.step([bad, good]).failed
    assert (failure.request_id, failure.reason, failure.poison) == ("bad", "grammar", True)
    assert driver.run(good, 4) == expected


def test_a_mask_is_computed_beside_the_forward_and_no_row_waits_for_both(
    tiny_executor: ModelExecutor, drive: Any
) -> None:
    """Each begins before the other ends: one after the other, in whatever order, they would wait for ever."""
    mask_began, forward_began, run = threading.Event(), threading.Event(), tiny_executor._runner.run
    met = []

    class Slow:
        def allowed(self, output_ids: Sequence[int]) -> bytes:
            mask_began.set()
            met.append(forward_began.wait(20.0))
            return bytes(33 * [255])

    class Runner:
        def run(self, rows: Any) -> Any:
            forward_began.set()
            met.append(mask_began.wait(20.0))
            return run(rows)

    driver = drive(tiny_executor)
    expected = list(driver.run(driver.add("alone", [5, 6]), 1))
    mask_began.clear()
    tiny_executor._runner = Runner()  # type: ignore[assignment]
    free, held = driver.add("free", [5, 6]), driver.add("held", [5, 6])
    held.sampling = DrawRules(SamplingParameters(temperature=0.0), constraint=Slow())
    driver.step([held, free])
    assert met == [True, True]
    assert free.output == held.output == expected


def test_a_grammar_that_takes_long_to_compile_keeps_nobody_else_waiting(
    worker: ModelWorker, compiler: GrammarCompiler
) -> None:
    worker.submit("alone", [9] * 40, sampling=SamplingParameters(temperature=0.0))
    worker.run()
    compiled = threading.Event()
    compiler._thread.submit(compiled.wait, 20.0)  # the compiler is at somebody else's
    worker.submit("held", sampling=follow("regex", "(yes|no)!", seed=1), max_tokens=20)
    worker.submit("beside", [9] * 40, sampling=SamplingParameters(temperature=0.0))
    while "beside" not in worker.ends:
        worker.turn()
    assert worker.tokens["beside", 0] == worker.tokens["alone", 0]
    assert "held" not in worker.ends
    compiled.set()
    while "held" not in worker.ends:
        worker.turn()
    assert re.fullmatch("(yes|no)!", text_of(worker, "held"))


def test_a_constraint_is_a_function_of_the_output_however_often_it_is_asked(compiler: GrammarCompiler) -> None:
    (constraint,) = compiler.compile(Grammar(kind="regex", source="ab?"), 1).result()
    output: list[int] = []

    def allowed() -> set[int]:
        mask = constraint.allowed(output)
        return {token_id for token_id in range(259) if mask[token_id >> 3] >> (token_id & 7) & 1}

    assert allowed() == allowed() == {ord("a")}
    output.append(ord("a"))
    assert allowed() == allowed() == {ord("b"), *STOPS}
    output.append(ord("b"))
    assert allowed() == {*STOPS}
    output.append(ord("b"))
    with pytest.raises(ConstraintError):
        allowed()


def test_json_cannot_drown_in_blanks(compiler: GrammarCompiler) -> None:
    (constraint,) = compiler.compile(Grammar(kind="json_object"), 1).result()
    output = [ord("{")]
    for _ in range(60):
        mask = constraint.allowed(output)
        if not mask[ord(" ") >> 3] >> (ord(" ") & 7) & 1:
            break
        output.append(ord(" "))
    assert 8 < len(output) < 60


def test_a_grammar_that_is_none_says_why(compiler: GrammarCompiler) -> None:
    with pytest.raises(GrammarError, match="invalid regex"):
        compiler.compile(Grammar(kind="regex", source="(a"), 1).result()


@pytest.mark.parametrize("source", ['start: "a" & /b/', "start: start"])
def test_a_grammar_that_nothing_can_begin_is_told_when_it_is_compiled(compiler: GrammarCompiler, source: str) -> None:
    with pytest.raises(GrammarError):
        compiler.compile(Grammar(kind="lark", source=source), 1).result()


WORDS = ["".join(word).encode() for word in product('ap19":{},', repeat=5)]  # a vocabulary as wide as a model's


@pytest.mark.parametrize("more", [{}, {"additionalProperties": False}], ids=["open", "closed"])
def test_an_object_may_have_as_many_properties_as_is_said_and_no_more(more: dict[str, Any]) -> None:
    compiler = GrammarCompiler([*BYTE_TOKENS, *WORDS], STOPS)
    properties: dict[str, Any] = {f"p{number}": {} for number in range(MAX_PROPERTIES)}
    source = json.dumps({"type": "object", "properties": properties, **more})
    (constraint,) = compiler.compile(Grammar(kind="json_schema", source=source), 1).result()
    output: list[int] = []
    for character in b'{"p7":1,"p9":{}}':
        assert constraint.allowed(output)[character >> 3] >> (character & 7) & 1
        output.append(character)
    wider = json.dumps({"items": {"type": "object", "properties": properties | {"one more": {}}}})
    with pytest.raises(GrammarError, match="more than 400 properties"):
        compiler.compile(Grammar(kind="json_schema", source=wider), 1).result()
    compiler.close()
