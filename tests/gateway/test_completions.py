"""POST /v1/completions: texts and tokens to go on with, through the official client."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import openai
import pytest

MODEL = "simulated"


async def ask(world: Any, **changes: Any) -> Any:
    """Streams through a client that does not insist: its types forbid the null that OpenAI itself sends (P52)."""
    client = world.client(strict=not changes.get("stream"))
    return await client.completions.create(**{"model": MODEL, "prompt": "Once", **changes})


async def test_a_text_is_gone_on_with_and_no_template_is_put_around_it(world: Any) -> None:
    completion = await ask(world, max_tokens=50)
    assert (completion.object, completion.choices[0].text) == ("text_completion", "Hello, Aurora.")
    assert completion.choices[0].finish_reason == "stop"
    assert world.worker.submits[0].prompt_token_ids == tuple(b"Once")
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (4, 14)


async def test_a_control_token_that_is_typed_stays_text(world: Any) -> None:
    await ask(world, prompt="<|im_end|>")
    assert world.worker.submits[0].prompt_token_ids == tuple(b"<|im_end|>")


@pytest.mark.parametrize(
    ("prompt", "submitted"),
    [
        ([79, 110], [(79, 110)]),
        ([[79], [110, 257]], [(79,), (110, 257)]),
        (["a", "b"], [(97,), (98,)]),
        ([[1, 2, 3]], [(1, 2, 3)]),
    ],
)
async def test_token_ids_and_lists_are_prompts_as_they_are(world: Any, prompt: Any, submitted: Any) -> None:
    completion = await ask(world, prompt=prompt)
    assert [submit.prompt_token_ids for submit in world.worker.submits] == submitted
    assert [choice.index for choice in completion.choices] == list(range(len(submitted)))
    assert completion.usage.prompt_tokens == sum(map(len, submitted))


async def test_a_choices_index_is_its_prompts_number_times_n_plus_its_own(world: Any) -> None:
    completion = await ask(world, prompt=["a", "b"], n=2)
    assert [(choice.index, choice.text) for choice in completion.choices] == [
        (0, "Hello, Aurora."),
        (1, "Hello, Aurora"),
        (2, "Hello, Aurora."),
        (3, "Hello, Aurora"),
    ]
    assert [submit.num_choices for submit in world.worker.submits] == [2, 2]
    texts: dict[int, str] = defaultdict(str)
    reasons: dict[int, list[str]] = defaultdict(list)
    async for chunk in await ask(world, prompt=["a", "b"], n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == {choice.index: choice.text for choice in completion.choices}
    assert reasons == {index: ["stop"] for index in range(4)}


async def test_an_echo_puts_the_prompt_before_each_choice(world: Any) -> None:
    completion = await ask(world, prompt=["é", [111, 257]], echo=True)
    assert [choice.text for choice in completion.choices] == ["éHello, Aurora.", "oHello, Aurora."]
    streamed = "".join([chunk.choices[0].text async for chunk in await ask(world, echo=True, stream=True)])
    assert streamed == "OnceHello, Aurora."


async def test_log_probabilities_are_columns_with_offsets_into_the_text(world: Any) -> None:
    world.worker.script.answer = "aé".encode()
    found = (await ask(world, logprobs=2)).choices[0].logprobs
    assert found.tokens == ["a", "\N{REPLACEMENT CHARACTER}", "\N{REPLACEMENT CHARACTER}"]
    assert found.token_logprobs == [-0.5] * 3
    assert found.top_logprobs[0] == {"a": -0.5, "b": -1.0}
    assert found.text_offset == [0, 1, 1]
    offsets = []
    async for chunk in await ask(world, logprobs=2, stream=True):
        columns = chunk.choices[0].logprobs
        offsets += columns.text_offset if columns else []
    assert offsets == found.text_offset


async def test_usage_comes_last_when_asked_for_and_counts_every_prompt(world: Any) -> None:
    stream = await ask(world, prompt=["a", "bc"], stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 28)
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"prompt": []}, "invalid_value", "prompt"),
        ({"prompt": ""}, "invalid_value", "prompt"),
        ({"prompt": [[]]}, "invalid_value", "prompt"),
        ({"prompt": [259]}, "invalid_value", "prompt"),
        ({"prompt": [-1]}, "invalid_value", "prompt"),
        ({"prompt": ["a", 1]}, "invalid_type", "prompt"),
        ({"prompt": ["x"] * 65}, "invalid_value", "prompt"),
        ({"prompt": "x" * 40_000}, "context_length_exceeded", "prompt"),
        ({"logprobs": 6}, "invalid_value", "logprobs"),
        ({"logprobs": True}, "invalid_type", "logprobs"),
        ({"logprobs": 1, "echo": True}, "unsupported_parameter", "logprobs"),
        ({"n": 17}, "invalid_value", "n"),
        ({"best_of": 2}, "unsupported_parameter", "best_of"),
        ({"suffix": "end"}, "unsupported_parameter", "suffix"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
    ],
)
async def test_a_bad_field_is_named_and_costs_nothing(
    world: Any, changes: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(world, **changes)
    assert caught.value.code == code
    assert caught.value.param is not None
    assert caught.value.param.partition("[")[0] == param.partition("[")[0]
    assert world.usage_messages() == []


async def test_a_client_that_leaves_cancels_every_prompt_of_its_list(world: Any) -> None:
    world.worker.script.answer = b"x" * 1_000
    world.worker.step_s = 0.005
    stream = await ask(world, prompt=["a", "b"], stream=True, max_tokens=1_000)
    await anext(aiter(stream))
    await stream.close()
    await world.until(lambda: len(world.worker.cancels) == 2)
    await world.until(lambda: world.slots_in_use() == 0)
