"""Promises of the demo's story that need no platform: prompts of an exact length, and honest figures."""

import random

import pytest

from gateway.demo_story import StoryError, StoryResult, as_json, calibrate_us, make_prompt


def count_words(text: str) -> int:
    return 10 + len(text.split())


def count_bytes(text: str) -> int:
    return 40 + len(text.encode())


@pytest.mark.parametrize("count", [count_words, count_bytes])
@pytest.mark.parametrize("tokens", [60, 96, 256])
def test_a_prompt_is_exactly_as_long_as_asked_whatever_a_token_is(count, tokens):
    assert count(make_prompt(random.Random(tokens), tokens, count)) == tokens


def test_two_prompts_of_one_story_differ_and_a_second_run_makes_the_same():
    first, second, again = (make_prompt(random.Random(seed), 96, count_bytes) for seed in (1, 2, 1))
    assert first != second
    assert first == again


def test_a_prompt_shorter_than_the_template_is_refused_with_a_sentence():
    with pytest.raises(StoryError, match="20 tokens is shorter than the chat template"):
        make_prompt(random.Random(1), 20, count_bytes)


def test_the_ratio_is_of_medians_and_the_worst_stands_beside_it():
    result = StoryResult(idle_ttft_ms=[100, 200, 900], flooded_ttft_ms=[300, 300, 700])
    line = as_json(result, {"is_right": True})
    assert line["ratio_p50"] == 1.5
    assert line["worst_ratio"] == 3.5
    assert line["reconcile"] == {"is_right": True}


def test_the_calibration_loop_takes_time():
    assert calibrate_us() > 10
