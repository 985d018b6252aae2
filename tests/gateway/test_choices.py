"""Several choices, log probabilities and response formats of one chat, through the official client."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import openai
import pytest

from wire.messages import Grammar, Reserved, Usage

MODEL = "simulated"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}


async def ask(world: Any, **changes: Any) -> Any:
    return await world.client().chat.completions.create(**{"model": MODEL, "messages": HI, **changes})


async def test_siblings_share_one_submit_one_prompt_and_one_reservation(world: Any) -> None:
    completion = await ask(world, n=3, max_tokens=20)
    (submit,) = world.worker.submits
    assert (submit.num_choices, submit.max_tokens) == (3, 20)
    prompt = len(submit.prompt_token_ids)
    assert [choice.index for choice in completion.choices] == [0, 1, 2]
    assert [choice.message.content for choice in completion.choices] == [
        "Hello, Aurora.",
        "Hello, Aurora",
        "Hello, Auror",
    ]
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (prompt, 14 + 13 + 12)
    reserved, used = world.usage_messages()
    assert isinstance(reserved, Reserved)
    assert isinstance(used, Usage)
    assert reserved.reserved_tokens == prompt + 3 * 20


async def test_streamed_siblings_interleave_and_each_ends_alone_with_one_reason(world: Any) -> None:
    """P51, P52, P55."""
    by_index: dict[int, list[Any]] = defaultdict(list)
    order = []
    async for chunk in await ask(world, n=3, stream=True, stream_options={"include_usage": True}):
        if not chunk.choices:
            assert chunk.usage.completion_tokens == 39
            continue
        (choice,) = chunk.choices
        by_index[choice.index].append(choice)
        order.append(choice.index)
    assert order != sorted(order)
    for index, choices in by_index.items():
        assert choices[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in choices) == "Hello, Aurora."[: 14 - index]
        assert [c.finish_reason for c in choices] == [None] * (len(choices) - 1) + ["stop"]
        assert choices[-1].delta.content is None


async def test_log_probabilities_come_whole_and_streamed_alike(world: Any) -> None:
    completion = await ask(world, logprobs=True, top_logprobs=2)
    whole = completion.choices[0].logprobs.content
    assert "".join(one.token for one in whole) == "Hello, Aurora."
    assert (whole[0].logprob, whole[0].bytes) == (-0.5, [ord("H")])
    assert [one.token for one in whole[0].top_logprobs] == ["H", "I"]
    streamed = []
    async for chunk in await ask(world, logprobs=True, top_logprobs=2, stream=True):
        found = chunk.choices[0].logprobs
        streamed += found.content if found else []
    assert streamed == whole
    assert [submit.sampling.num_top_logprobs for submit in world.worker.submits] == [2, 2]


async def test_a_prompt_of_an_unlikely_token_is_never_minus_infinity(world: Any) -> None:
    from gateway.v1.answers import chat_logprobs
    from wire.messages import TokenLogprob

    (text,) = world.runtime.door.texts.values()
    one = TokenLogprob(token_id=65, logprob=float("-inf"), top=((257, -0.1),))
    found = chat_logprobs(text, [one, TokenLogprob(token_id=257, logprob=0.0)])
    assert found["content"] == [
        {
            "token": "A",
            "logprob": -9_999.0,
            "bytes": [65],
            "top_logprobs": [{"token": "<|im_end|>", "logprob": -0.1, "bytes": list(b"<|im_end|>")}],
        }
    ]


@pytest.mark.parametrize(
    ("wanted", "grammar"),
    [
        ({"type": "json_object"}, Grammar(kind="json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}},
            Grammar(kind="json_schema", source='{"type":"object","properties":{"city":{"type":"string"}}}'),
        ),
        ({"type": "text"}, None),
    ],
)
async def test_a_response_format_becomes_a_grammar(world: Any, wanted: Any, grammar: Grammar | None) -> None:
    await ask(world, response_format=wanted)
    assert world.worker.submits[0].sampling.grammar == grammar


async def test_a_schema_that_cannot_be_followed_is_refused_with_its_fault_before_anything_is_taken(world: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "town"}}}
    with pytest.raises(openai.BadRequestError) as refused:
        await ask(world, response_format={"type": "json_schema", "json_schema": {"name": "place", "schema": schema}})
    assert refused.value.param == "response_format"
    assert "town" in refused.value.body["message"]  # type: ignore[index]
    assert world.worker.submits == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [({"logprobs": True}, "logprobs"), ({"response_format": {"type": "json_object"}}, "response_format")],
)
async def test_what_the_worker_cannot_do_is_refused_and_never_left_out(
    world: Any, changes: dict[str, Any], param: str
) -> None:
    world.worker.features = ()
    await world.until(lambda: world.runtime.loads[0].features == ())
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(world, **changes)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", param)
    assert world.usage_messages() == []


async def test_what_can_never_fit_the_device_is_told_its_numbers(world: Any) -> None:
    world.worker.script.reject = ("never_fits", None)
    world.worker.num_cache_tokens = 4_096
    await world.until(lambda: world.runtime.loads[0].num_cache_tokens == 4_096)
    with pytest.raises(openai.BadRequestError, match=r"5000 output tokens.*holds 4096 tokens"):
        await ask(world, max_tokens=5_000)
