"""What a client's parameters come to over the whole way: Submit, engine, real model, messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

from gpu_worker.device.model_executor import ModelExecutor
from tests.gpu_worker.model.worker import ModelWorker
from wire.messages import SamplingParameters

PROMPT = [(7 * index + 3) % 259 for index in range(37)]
GREEDY = SamplingParameters(temperature=0.0)


@pytest.fixture
def worker(tiny_executor: ModelExecutor) -> ModelWorker:
    return ModelWorker(tiny_executor)


def test_logprobs_are_those_of_transformers_for_every_token_alone_and_in_a_batch(
    worker: ModelWorker, tiny_logits: Callable[[Sequence[int]], Tensor]
) -> None:
    asking = SamplingParameters(temperature=0.0, num_top_logprobs=5, presence_penalty=0.5)
    worker.submit("alone", PROMPT, sampling=asking)
    worker.run()
    for index in range(6):
        worker.submit(f"other {index}", [index] * (9 * index + 1), sampling=SamplingParameters(seed=index))
    worker.submit("batched", PROMPT, sampling=asking)
    worker.run()
    output = worker.tokens["alone", 0]
    assert worker.tokens["batched", 0] == output
    expected = tiny_logits([*PROMPT, *output]).log_softmax(dim=1)[len(PROMPT) - 1 :]
    for name in ("alone", "batched"):
        told = worker.logprobs[name, 0]
        assert len(told) == len(output) == 8
        for row, token_id, logprob in zip(expected, output, told, strict=False):
            assert logprob is not None
            assert logprob.token_id == token_id
            assert logprob.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
            best = row.topk(5)
            assert [name for name, _ in logprob.top] == best.indices.tolist()
            assert [value for _, value in logprob.top] == pytest.approx(best.values.tolist(), abs=1e-3)
    assert worker.logprobs["other 1", 0] == []


def test_choices_of_one_seeded_submit_differ_and_each_comes_again(worker: ModelWorker) -> None:
    sampling = SamplingParameters(temperature=1.0, seed=5, num_top_logprobs=0)
    worker.submit("first", PROMPT, num_choices=3, sampling=sampling)
    worker.run()
    worker.submit("other", PROMPT[:9], sampling=SamplingParameters(seed=6))
    worker.submit("again", PROMPT, num_choices=3, sampling=sampling)
    worker.run()
    texts = [worker.tokens["first", choice] for choice in range(3)]
    assert len(set(map(tuple, texts))) == 3
    assert [worker.tokens["again", choice] for choice in range(3)] == texts
    usage = worker.usages["first"]
    assert (usage.prompt_tokens, usage.output_tokens) == (len(PROMPT), 24)
    assert [len(worker.logprobs["first", choice]) for choice in range(3)] == [8, 8, 8]


def test_a_stop_token_ends_the_text_but_not_before_min_tokens(worker: ModelWorker) -> None:
    worker.submit("free", PROMPT, sampling=GREEDY)
    worker.run()
    text = worker.tokens["free", 0]
    stop = text[-1]
    end = text.index(stop) + 1
    worker.submit("stopped", PROMPT, sampling=GREEDY, stop_token_ids=(stop,))
    worker.submit("longer", PROMPT, sampling=GREEDY, stop_token_ids=(stop,), min_tokens=6)
    worker.run()
    assert worker.tokens["stopped", 0] == text[:end]
    assert (worker.ends["stopped"].choices[0].reason, worker.usages["stopped"].output_tokens) == ("stop", end)
    assert stop not in worker.tokens["longer", 0][:6]
    assert len(worker.tokens["longer", 0]) >= 6


def test_penalties_and_bias_reach_the_draw(worker: ModelWorker) -> None:
    worker.submit("free", PROMPT, sampling=GREEDY)
    biased = SamplingParameters(temperature=0.0, logit_bias=((7, 100.0),))
    worker.submit("biased", PROMPT, sampling=biased)
    worker.submit("never twice", PROMPT, sampling=SamplingParameters(temperature=0.0, frequency_penalty=2.0, **MANY))
    worker.run()
    assert worker.tokens["biased", 0] == [7] * 8
    assert worker.tokens["free", 0] != worker.tokens["never twice", 0]
    assert not set(worker.tokens["never twice", 0]) & set(PROMPT)


MANY: dict[str, Any] = {"repetition_penalty": 10.0}
