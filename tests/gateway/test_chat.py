"""POST /v1/chat/completions through the official client: answers, streams, refusals, and clients that leave."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from openai.types.chat import ChatCompletionChunk

from scheduler_engine.policy import PriorityClass
from tests.gateway.chat_client import Reader, ask, cell, raw_stream
from wire.messages import Reserved


async def test_a_chat_is_answered_in_the_openai_shape_with_the_workers_own_count(world: Any) -> None:
    completion = await ask(world, max_completion_tokens=50)
    assert completion.choices[0].message.content == "Hello, Aurora."
    assert completion.choices[0].finish_reason == "stop"
    prompt = len(world.worker.submits[0].prompt_token_ids)
    assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (prompt, 14)
    assert completion.usage.total_tokens == prompt + 14
    assert (completion.object, completion.service_tier) == ("chat.completion", "default")


async def test_a_stream_says_the_same_text_one_chunk_per_token(world: Any) -> None:
    chunks: list[ChatCompletionChunk] = [chunk async for chunk in await ask(world, stream=True)]
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-1]] == list("Hello, Aurora.")
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_the_bytes_of_a_stream_are_exactly_these(world: Any) -> None:
    world.worker.script.answer = "é".encode()
    reader = await raw_stream(world, {"stream_options": {"include_usage": True}, "max_tokens": 9})
    head = (await reader.until(b"\r\n\r\n")).decode().lower()
    assert "content-type: text/event-stream" in head
    assert "cache-control: no-cache" in head
    assert "x-accel-buffering: no" in head
    body = await _dechunked(reader)
    await reader.close()
    response_id = world.worker.submits[0].response_id
    first = body.split(b"\n", 1)[0]
    created = json.loads(first.removeprefix(b"data: "))["created"]
    prompt = len(world.worker.submits[0].prompt_token_ids)
    head = (
        f'data: {{"id":"chatcmpl-{response_id}","object":"chat.completion.chunk","created":{created},'
        f'"model":"simulated","service_tier":"default","system_fingerprint":null,'
    )

    def chunk(delta: str, finish_reason: str = "null") -> str:
        choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish_reason}}}'
        return f'{head}"choices":[{choice}],"usage":null}}\n\n'

    usage = (
        f'{{"prompt_tokens":{prompt},"completion_tokens":2,"total_tokens":{prompt + 2},'
        '"prompt_tokens_details":{"cached_tokens":0,"audio_tokens":0},'
        '"completion_tokens_details":{"reasoning_tokens":0,"audio_tokens":0,"max_tokens":9}}'
    )
    expected = (
        chunk('{"role":"assistant","content":""}')
        + chunk('{"content":""}')  # the first byte of é: an event of its own, with nothing to show yet
        + chunk('{"content":"é"}')
        + chunk("{}", '"stop"')
        + f'{head}"choices":[],"usage":{usage}}}\n\n'
        + "data: [DONE]\n\n"
    )
    assert body.decode() == expected


async def _dechunked(reader: Reader) -> bytes:
    body = b""
    while size := int((await reader.until(b"\r\n")).strip(), 16):
        body += await reader.reader.readexactly(size)
        await reader.until(b"\r\n")
    return body


async def test_usage_comes_last_when_asked_for_and_is_the_only_chunk_without_choices(world: Any) -> None:
    """P54, P55."""
    stream = await ask(world, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    assert [bool(chunk.choices) for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage.completion_tokens == 14


async def test_the_first_chunk_comes_with_the_first_token_and_the_rest_as_they_are_made(world: Any) -> None:
    """P57. 10 tokens, one each 60 ms."""
    world.worker.step_s = 0.06
    world.worker.script.answer = b"0123456789"
    arrivals = []
    async for chunk in await ask(world, stream=True):
        if chunk.choices[0].delta.content:
            arrivals.append(time.monotonic())
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert len(arrivals) == 10
    assert sorted(gaps)[len(gaps) // 2] > 0.03  # not all at once


async def test_a_length_limit_ends_with_reason_length(world: Any) -> None:
    completion = await ask(world, max_tokens=5)
    assert (completion.choices[0].message.content, completion.choices[0].finish_reason) == ("Hello", "length")


async def test_the_text_of_a_stop_string_is_billed_and_not_shown(world: Any) -> None:
    world.worker.script.visible_bytes = 5
    world.worker.script.tokens_per_step = 100
    completion = await ask(world, stop=[", A"])
    assert completion.choices[0].message.content == "Hello"
    assert completion.usage.completion_tokens == 14
    assert world.worker.submits[0].stop_strings == (b", A",)


async def test_what_the_worker_gets_is_what_was_asked(world: Any) -> None:
    await ask(
        world,
        service_tier="priority",
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=1,
        frequency_penalty=-1,
        logit_bias={"65": -100},
        max_completion_tokens=8,
        extra_body={"min_tokens": 3, "ignore_eos": True, "deadline_ms": 5_000, "max_queue_wait_ms": 700},
    )
    (submit,) = world.worker.submits
    assert submit.priority_class is PriorityClass.INTERACTIVE
    assert (submit.tenant_id, submit.project_id, submit.cache_salt) == ("aurora", "project-aurora", "aurora")
    sampling = submit.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert sampling.logit_bias == ((65, -100),)
    assert (submit.max_tokens, submit.min_tokens, submit.stop_token_ids) == (8, 3, ())
    assert 4_000_000 < submit.remaining_first_token_us <= 5_000_000
    assert submit.remaining_hard_deadline_us == submit.remaining_first_token_us
    assert 0 < submit.max_queue_wait_us <= 700_000
    assert not submit.is_return


async def test_a_try_that_the_client_library_counts_comes_to_the_worker_as_a_return_and_deadlines_stay_apart(
    world: Any,
) -> None:
    await ask(
        world,
        extra_headers={"x-stainless-retry-count": "1"},
        extra_body={"completion_deadline_ms": 5_000},
    )
    (submit,) = world.worker.submits
    assert submit.is_return
    assert 4_000_000 < submit.remaining_completion_us <= 5_000_000
    assert submit.remaining_hard_deadline_us is None, "one to the last token is none to the first"


async def test_without_max_tokens_the_tenants_default_is_reserved_sent_and_echoed(world: Any) -> None:
    await world.set_quota(cell("aurora", default_max_tokens=33))
    completion = await ask(world)
    assert world.worker.submits[0].max_tokens == 33
    assert completion.usage.completion_tokens_details.max_tokens == 33
    reserved = next(m for m in world.usage_messages() if isinstance(m, Reserved))
    assert reserved.reserved_tokens == completion.usage.prompt_tokens + 33


@pytest.mark.parametrize(
    ("tier", "priority_class"),
    [("fast", PriorityClass.INTERACTIVE), ("flex", PriorityClass.BATCH), ("auto", PriorityClass.DEFAULT)],
)
async def test_a_service_tier_is_a_class(world: Any, tier: str, priority_class: PriorityClass) -> None:  # P37
    await ask(world, service_tier=tier)
    assert world.worker.submits[0].priority_class is priority_class


async def test_roles_and_parts_become_the_models_template(world: Any) -> None:
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "He"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": None},
    ]
    await ask(world, messages=messages)
    prompt = bytes(i if i < 256 else ord("|") for i in world.worker.submits[0].prompt_token_ids)
    assert prompt == b"|system\nBe kind.|\n|user\nHey|\n|assistant\n|\n|assistant\n"
