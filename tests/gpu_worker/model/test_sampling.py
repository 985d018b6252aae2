"""Drawing tokens: what each parameter keeps, and that the draw is a function of seed and position alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker.device import sampling
from gpu_worker.device.noise import noise_table
from gpu_worker.device.sampling import NOT_DRAWN, Draw, Sampler, cut_to_candidates, stream_of
from gpu_worker.executor import DrawRules
from wire.messages import SamplingParameters

PROBABILITIES = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
LOGITS = PROBABILITIES.log()


def draw(parameters: SamplingParameters, position: int = 0, request_id: str = "a") -> Draw:
    return Draw(DrawRules(parameters), stream_of(parameters, request_id), range(position))


def after(parameters: SamplingParameters, output_ids: Sequence[int], **rules: Any) -> Draw:
    return Draw(DrawRules(parameters, **rules), 0, output_ids)


def sample(logits: Tensor, *draws: Draw) -> list[int]:
    return Sampler(logits.shape[1]).sample(logits.clone(), draws).token_ids


def survivors(**parameters: float) -> list[int]:
    scores = LOGITS.clone()[None]
    cut_to_candidates(scores, [SamplingParameters(**parameters)])
    return scores[0].isfinite().nonzero().flatten().tolist()


def test_temperature_zero_takes_the_largest_logit() -> None:
    assert sample(torch.tensor([[1.0, 3.0, 2.0]]), draw(SamplingParameters(temperature=0.0))) == [1]


def test_draws_follow_the_distribution() -> None:
    parameters, num_draws = SamplingParameters(seed=5), 20_000
    token_ids = sample(LOGITS.repeat(num_draws, 1), *(draw(parameters, position) for position in range(num_draws)))
    expected = PROBABILITIES * num_draws
    counts = torch.bincount(torch.tensor(token_ids), minlength=5)
    assert ((counts - expected) ** 2 / expected).sum() < 18.5  # chi-square, 4 degrees of freedom, p = 0.001
    pairs = torch.bincount(torch.tensor(token_ids[:-1]) * 5 + torch.tensor(token_ids[1:]), minlength=25)
    expected = (PROBABILITIES[:, None] * PROBABILITIES).flatten() * (num_draws - 1)
    assert ((pairs - expected) ** 2 / expected).sum() < 51.2  # neighbours are independent: 24 degrees, p = 0.001


def test_temperature_sharpens_the_distribution() -> None:
    parameters, num_draws = SamplingParameters(seed=5, temperature=0.5), 4_000
    token_ids = sample(LOGITS.repeat(num_draws, 1), *(draw(parameters, position) for position in range(num_draws)))
    sharp = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert token_ids.count(0) / num_draws == pytest.approx(float(sharp[0]), abs=0.03)


def test_the_noise_has_gumbels_moments() -> None:
    noise = noise_table(1 << 22)
    assert noise.isfinite().all()
    assert noise.mean() == pytest.approx(0.57722, abs=3e-3)
    assert noise.var() == pytest.approx(1.64493, abs=1e-2)


def test_a_seed_gives_the_same_tokens_in_any_batch_and_for_any_request() -> None:
    seeded = SamplingParameters(seed=42)
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    alone = sample(logits[1:2], draw(seeded, 7, "first"))
    others = draw(SamplingParameters(), 3, "x"), draw(SamplingParameters(temperature=0.0), 4, "y")
    assert sample(logits, others[0], draw(seeded, 7, "second"), others[1])[1:2] == alone


def test_another_seed_another_position_and_another_request_draw_other_tokens() -> None:
    flat = torch.zeros(1, 4_096)
    seeded, free = SamplingParameters(seed=1), SamplingParameters()
    draws = [draw(seeded), draw(seeded, 1), draw(SamplingParameters(seed=2)), draw(free), draw(free, 0, "b")]
    assert len({sample(flat, each)[0] for each in draws}) == 5


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 1}, [0]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.69}, [0, 1]),
        ({"top_p": 0.71}, [0, 1, 2]),
        ({"top_p": 0.0}, [0]),
        ({"min_p": 0.3}, [0, 1, 2]),
        ({"min_p": 1.0}, [0]),
        ({"top_k": 3, "top_p": 0.75}, [0, 1]),  # of 0.85 left, 0.7 is 0.82
        ({"top_p": 0.99, "min_p": 0.5}, [0, 1]),
    ],
)
def test_each_rule_keeps_the_right_tokens(parameters: dict[str, float], kept: Sequence[int]) -> None:
    assert survivors(**parameters) == kept


def test_rules_of_one_row_do_not_touch_another() -> None:
    scores = LOGITS.repeat(3, 1)
    cut_to_candidates(scores, [SamplingParameters(), SamplingParameters(top_k=1), SamplingParameters(min_p=0.3)])
    assert scores.isfinite().sum(dim=1).tolist() == [5, 1, 3]


def test_a_flat_row_needs_more_candidates_than_are_sorted_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FIRST_CANDIDATES", 4)
    monkeypatch.setattr(sampling, "MORE_CANDIDATES", 8)
    scores = torch.linspace(0.0, 1e-3, 100)[None]
    cut_to_candidates(scores, [SamplingParameters(top_p=0.5)])
    assert scores.isfinite().sum() == 50


def test_a_flat_row_beside_sharp_ones_changes_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FIRST_CANDIDATES", 4)
    monkeypatch.setattr(sampling, "MORE_CANDIDATES", 8)
    sharp, middling, flat = torch.zeros(100), torch.zeros(100), torch.linspace(0.0, 1e-3, 100)
    sharp[7], middling[:6] = 20.0, 20.0
    parameters = SamplingParameters(top_p=0.9)
    together = torch.stack([flat, sharp, torch.zeros(100), middling])
    cut_to_candidates(together, [parameters, parameters, SamplingParameters(), parameters])
    for place, row, num_kept in ((0, flat, 90), (1, sharp, 1), (3, middling, 6)):
        alone = row[None].clone()
        cut_to_candidates(alone, [parameters])
        assert torch.equal(together[place], alone[0])
        assert alone.isfinite().sum() == num_kept
    assert together[2].isfinite().all()


def test_presence_and_frequency_penalties_count_the_output() -> None:
    parameters = SamplingParameters(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    logits = torch.tensor([[2.0, 1.2, 1.0, 0.0]])
    twice = after(parameters, [0, 0])
    assert sample(logits, twice) == [1]  # 2.0 - 0.5 - 2 * 0.25 = 1.0
    once = after(parameters, [0])
    assert sample(logits, once) == [0]  # 2.0 - 0.5 - 0.25 = 1.25


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    parameters = SamplingParameters(temperature=0.0, repetition_penalty=2.0)
    assert sample(torch.tensor([[3.0, 2.0]]), after(parameters, [0])) == [1]
    assert sample(torch.tensor([[-1.0, -1.5]]), after(parameters, [0])) == [1]


def test_repetition_penalty_counts_the_prompt_and_each_token_once() -> None:
    parameters = SamplingParameters(temperature=0.0, repetition_penalty=1.5)
    logits = torch.tensor([[2.9, 2.0, 1.5]])
    assert sample(logits, after(parameters, [1])) == [0]
    assert sample(logits, after(parameters, [], prompt_token_ids=(0,))) == [1]  # 2.9 / 1.5 < 2.0
    assert sample(logits, after(parameters, [0, 0], prompt_token_ids=(0, 1))) == [0]  # 1.93, 1.33, 1.5


def test_the_prompt_does_not_count_for_presence_and_frequency_penalties() -> None:
    parameters = SamplingParameters(temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0)
    assert sample(torch.tensor([[2.0, 1.0]]), after(parameters, [], prompt_token_ids=(0,))) == [0]


def test_no_stop_token_is_drawn_before_min_tokens_are_there() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.0]])
    rules = {"stop_token_ids": (1, 2, 99), "min_tokens": 2}
    for parameters in (SamplingParameters(temperature=0.0), SamplingParameters(temperature=0.01, seed=1)):
        drawn = [sample(logits, after(parameters, [0] * num_output, **rules))[0] for num_output in range(4)]
        assert drawn == [0, 0, 1, 1]


def test_a_grammar_lets_only_its_tokens_follow_and_says_alone_when_to_stop() -> None:
    logits = torch.tensor([[1.0, 5.0, 4.0, 3.0, 2.0, 1.0, 1.0, 1.0, 9.0]])
    for parameters in (SamplingParameters(temperature=0.0), SamplingParameters(temperature=0.01, top_p=0.9, seed=1)):
        rules = DrawRules(parameters, stop_token_ids=(2,), min_tokens=5)
        assert sample(logits, Draw(rules, 0, [], bytes([0b1100, 0]))) == [2]
        assert sample(logits, Draw(rules, 0, [], bytes([0b1000, 1]))) == [8]


def test_where_nothing_may_follow_or_a_number_is_not_finite_only_that_row_draws_nothing() -> None:
    fine = [1.0, 3.0, 2.0]
    logits = torch.tensor([fine, [1.0, torch.nan, 0.0], fine, [torch.inf, 0.0, 0.0], fine])
    for parameters in (SamplingParameters(temperature=0.0), SamplingParameters(temperature=0.001, top_p=0.5, seed=1)):
        asking = replace(parameters, num_top_logprobs=1)
        blocked = Draw(DrawRules(asking), 0, [], bytes([0]))
        free = Draw(DrawRules(asking), 0, [])
        sampled = Sampler(3).sample(logits.clone(), [free, free, blocked, free, free])
        assert sampled.token_ids == [1, NOT_DRAWN, NOT_DRAWN, NOT_DRAWN, 1]
        assert [logprob and logprob.token_id for logprob in sampled.logprobs] == [1, None, None, None, 1]


def test_the_coldest_temperatures_are_greedy() -> None:
    logits = torch.tensor([[30.0, 31.0, -30.0]])
    assert sample(logits, draw(SamplingParameters(temperature=1e-40))) == [1]


def test_a_bias_on_a_token_that_does_not_exist_is_refused_before_it_is_used() -> None:
    for token_id in (-1, 3):
        with pytest.raises(IndexError, match="logit_bias"):
            sample(torch.zeros(1, 3), draw(SamplingParameters(logit_bias=((token_id, 1.0),))))


def test_logit_bias_forces_and_forbids_tokens() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    assert sample(logits, draw(SamplingParameters(temperature=0.0, logit_bias=((2, 100.0),)))) == [2]
    assert sample(logits, draw(SamplingParameters(temperature=0.0, logit_bias=((0, -100.0),)))) == [1]


def test_logprobs_are_of_the_model_before_temperature_and_bias() -> None:
    parameters = SamplingParameters(temperature=0.0, logit_bias=((3, 100.0),), num_top_logprobs=2)
    sampled = Sampler(5).sample(LOGITS.clone()[None], [draw(parameters)])
    (logprob,) = sampled.logprobs
    assert logprob is not None
    assert logprob.token_id == 3
    assert logprob.logprob == pytest.approx(float(LOGITS[3]), abs=1e-5)
    assert [token_id for token_id, _ in logprob.top] == [0, 1]
    assert logprob.top[0][1] == pytest.approx(float(LOGITS[0]), abs=1e-5)


def test_logprobs_of_a_row_do_not_depend_on_its_batch_and_each_row_gets_as_many_as_it_asked_for() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(2))
    asks = (None, 0, 20, 3)
    draws = [draw(SamplingParameters(temperature=0.0, num_top_logprobs=count)) for count in asks]
    together = Sampler(300).sample(logits.clone(), draws).logprobs
    assert [None if logprob is None else len(logprob.top) for logprob in together] == [*asks]
    for index in (1, 2, 3):
        (alone,) = Sampler(300).sample(logits[index : index + 1].clone(), [draws[index]]).logprobs
        assert alone == together[index]
        assert alone is not None
        expected = logits[index].double().log_softmax(dim=0)
        assert alone.logprob == pytest.approx(float(expected.max()), abs=1e-5)
        assert [value for _, value in alone.top] == pytest.approx(
            expected.topk(len(alone.top)).values.tolist(), abs=1e-5
        )


def test_logits_in_half_precision_are_drawn_from_as_the_numbers_that_they_are() -> None:
    halves = torch.randn(6, 400, generator=torch.Generator().manual_seed(4)).mul_(3).to(torch.bfloat16)
    draws = [draw(SamplingParameters(seed=seed, top_p=0.95, num_top_logprobs=2)) for seed in range(6)]
    assert Sampler(400).sample(halves.clone(), draws) == Sampler(400).sample(halves.float(), draws)


def test_margins_are_the_distance_of_the_two_largest_logits() -> None:
    sampled = Sampler(3).sample(torch.tensor([[1.0, 4.0, 2.5]]), [draw(SamplingParameters())], with_margins=True)
    assert sampled.margins == [1.5]
    assert sampled.logprobs == [None]
