"""POST /v1/chat/completions through the official client: answers, streams, refusals, and clients that leave."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import time
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from wire.messages import Reserved, Usage

MODEL = "simulated"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def cell(tenant: str, priority_class: PriorityClass = PriorityClass.DEFAULT, **limits: Any) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id=tenant, priority_class=priority_class, **limits)


async def ask(world: Any, tenant: str = "aurora", **changes: Any) -> Any:
    request = {"model": MODEL, "messages": HI, **changes}
    return await world.client(tenant).chat.completions.create(**request)


async def read(stream: Any, texts: list[str]) -> None:
    """All the text of a stream, as it comes."""
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "")


async def raw_stream(
    world: Any, body: dict[str, Any], headers: dict[str, str] | None = None, *, receive_buffer: int | None = None
) -> Reader:
    """A request by hand, so that a test holds the socket; ``receive_buffer`` in bytes, else the kernel's to grow."""
    host, port = world.base_url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setblocking(False)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection)
    payload = json.dumps({"model": MODEL, "messages": HI, "stream": True, **body}).encode()
    lines = {
        "host": host,
        "content-type": "application/json",
        "content-length": str(len(payload)),
        "authorization": f"Bearer {world.keys['aurora']}",
        **(headers or {}),
    }
    head = "POST /v1/chat/completions HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    writer.write(head.encode() + b"\r\n" + payload)
    return Reader(reader, writer)


class Reader:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), 5)

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


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


async def test_remaining_tokens_fall_by_the_worst_case_and_come_back_to_what_was_used(world: Any) -> None:
    client = world.client("nova")
    raw = await client.chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=100)
    used = raw.parse().usage.total_tokens
    assert raw.headers["x-ratelimit-limit-requests"] == "60"
    assert raw.headers["x-ratelimit-remaining-requests"] == "59"
    assert int(raw.headers["x-ratelimit-remaining-tokens"]) == 6_000 - (used - 14) - 100
    assert raw.headers["x-ratelimit-class"] == "default"
    assert raw.headers["x-request-id"].startswith("req_")
    await world.until(lambda: world.level("tokens", "nova") == 6_000 - used)


async def test_money_and_slots_are_settled_by_the_workers_count(world: Any) -> None:
    completion = await ask(world, max_tokens=100)
    expected = completion.usage.prompt_tokens * 1 + completion.usage.completion_tokens * 2
    assert world.money("aurora", "default") == {"open": 0, "settled": expected}
    assert world.slots_in_use() == 0
    kinds = [type(message) for message in world.usage_messages()]
    assert kinds == [Reserved, Usage]


async def test_the_tenants_own_limit_is_429_with_a_moment_to_come_back(world: Any) -> None:
    await world.set_quota(cell("nova", requests_per_minute=1))
    await ask(world, "nova")
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(world, "nova")
    assert caught.value.code == "rate_limit_exceeded"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert caught.value.response.headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("reason", "status", "code"),
    [
        ("never_fits", 400, "context_length_exceeded"),
        ("late", 503, "deadline_unreachable"),
        ("queue_wait", 503, "queue_timeout"),
        ("class_closed", 503, "overloaded"),
    ],
)
async def test_a_reject_before_the_first_token_is_a_status_streamed_or_not_and_free(
    world: Any, reason: str, status: int, code: str, stream: bool
) -> None:  # P23
    world.worker.script.reject = (reason, 2_000_000)
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(world, stream=stream)
    assert (caught.value.status_code, caught.value.code) == (status, code)
    assert caught.value.response.headers.get("retry-after") == ("2" if status == 503 else None)
    await world.until(lambda: world.slots_in_use() == 0)
    assert world.money("aurora", "default") == {"open": 0, "settled": 0}


async def test_a_closed_class_is_refused_at_the_door_and_the_batch_class_with_429(world: Any) -> None:  # P38
    world.worker.closed = {PriorityClass.BATCH: 7_000_000}
    await world.until(lambda: world.runtime.loads and world.runtime.loads[0].classes[2].closed)
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(world, "bulk", service_tier="flex")
    assert caught.value.code == "resource_unavailable"
    assert caught.value.response.headers["retry-after"] == "7"
    assert world.worker.submits == []
    await ask(world, "bulk")


async def test_a_failure_in_the_middle_of_a_stream_is_an_error_event_and_no_done(world: Any) -> None:  # P24
    world.worker.script.reason = "failed"
    texts: list[str] = []
    with pytest.raises(openai.APIError, match="could not compute"):
        await read(await ask(world, stream=True), texts)
    assert "".join(texts) == "Hello, Aurora."


async def test_fifty_clients_that_drop_their_stream_leave_no_slot_behind(world: Any) -> None:
    """P15. Concurrency 1; each reads one token and closes its socket; the engine stops each within one step."""
    await world.set_quota(cell("aurora", concurrency=1))
    world.worker.script.answer = b"x" * 400
    world.worker.step_s = 0.002
    for _ in range(50):
        reader = await raw_stream(world, {"max_tokens": 400})
        await reader.until(b'"content":"x"')
        await reader.close()
        await world.until(lambda: world.slots_in_use() == 0, 2.0)
    assert all(made < 400 for made in world.worker.generated.values())
    for cancelled_at, cancel in world.worker.cancels:
        assert world.worker.last_step[cancel.response_id] <= cancelled_at + 1
    world.worker.script.answer = b"served"
    completion = await asyncio.wait_for(ask(world), 1.0)
    assert completion.choices[0].message.content == "served"
    await world.until(lambda: world.slots_in_use() == 0)


async def test_a_dropped_stream_is_charged_for_what_was_generated(world: Any) -> None:
    """P20. max 500, the socket closes after 5 chunks: prompt + tokens generated, as cancelled by the client."""
    world.worker.script.answer = b"x" * 500
    world.worker.step_s = 0.005
    reader = await raw_stream(world, {"max_tokens": 500})
    for _ in range(5):
        await reader.until(b'"content":"x"')
    await reader.close()
    await world.until(lambda: world.slots_in_use() == 0, 2.0)
    (usage,) = [message for message in world.usage_messages() if isinstance(message, Usage)]
    assert usage.terminal == "cancelled_client"
    assert 5 <= usage.output_tokens < 500
    assert world.money("aurora", "default") == {"open": 0, "settled": usage.prompt_tokens + 2 * usage.output_tokens}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_gone_before_its_first_token_is_cancelled_too(world: Any, stream: bool) -> None:
    world.worker.script.prompt_first = True
    reader = await raw_stream(world, {"stream": stream})
    await world.until(lambda: len(world.worker.submits) == 1)
    await reader.close()
    await world.until(lambda: len(world.worker.cancels) == 1, 2.0)
    assert world.worker.cancels[0][1].reason == "client"
    await world.until(lambda: world.slots_in_use() == 0)
    await world.until(lambda: len(world.runtime.streams) == 0)


async def test_a_slow_reader_loses_nothing_and_is_charged_what_the_engine_made(world: Any) -> None:
    """P21, the half that belongs here."""
    world.worker.script.answer = b"y" * 3_000
    world.worker.script.tokens_per_step = 50
    stream = await ask(world, stream=True, max_tokens=3_000)
    texts = []
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "")
        if len(texts) % 500 == 0:
            await asyncio.sleep(0.05)
    assert "".join(texts) == "y" * 3_000


async def test_a_reader_that_never_reads_is_dropped_and_its_work_cancelled(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.streams.STALLED_AFTER_S", 0.2)
    world.worker.script.answer = b"z" * 32_000
    world.worker.script.tokens_per_step = 500
    world.worker.step_s = 0.02  # 64 steps, and far more bytes than the sockets hold
    reader = await raw_stream(world, {"max_tokens": 32_000}, receive_buffer=65_536)
    await reader.until(b"data: ")
    reader.writer.transport.pause_reading()
    await world.until(lambda: len(world.worker.cancels) == 1, 10.0)
    await world.until(lambda: world.slots_in_use() == 0)
    reader.writer.transport.abort()


async def test_a_gateway_that_stops_ends_and_cancels_what_it_serves(world: Any) -> None:
    world.worker.script.prompt_first = True
    asking = asyncio.create_task(ask(world))
    await world.until(lambda: len(world.worker.submits) == 1)
    await world.runtime.door.close()
    with pytest.raises(openai.InternalServerError) as caught:
        await asking
    assert caught.value.code == "overloaded"
    await world.until(lambda: len(world.worker.cancels) == 1)
    assert world.worker.cancels[0][1].reason == "gateway_lost"
    await world.until(lambda: world.slots_in_use() == 0)


async def test_a_waiting_stream_is_kept_alive_with_comments_that_the_client_ignores(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P58."""
    monkeypatch.setattr("gateway.v1.generation.KEEPALIVE_S", 0.05)
    world.worker.script.prompt_first = True
    reader = await raw_stream(world, {})
    await reader.until(b": waiting\n\n")
    world.worker.go_on()
    await reader.until(b"data: [DONE]\n\n")
    await reader.close()


async def test_a_key_that_is_revoked_is_refused_as_soon_as_that_was_told(world: Any) -> None:
    await ask(world)
    public_id = world.keys["aurora"].split("_")[2]
    del world.shelf.stored[public_id]
    await ask(world)  # known for up to 30 s, unless told
    world.redis.publish(f"{world.redis_keys.prefix}keys:changed", public_id)

    async def refused() -> None:
        while True:
            try:
                await world.client().models.list()
            except openai.AuthenticationError:
                return

    await asyncio.wait_for(refused(), 5.0)


async def test_a_class_that_is_taken_away_is_refused_at_the_next_request(world: Any) -> None:
    await ask(world, "bulk", service_tier="flex")
    await world.set_quota(cell("bulk", PriorityClass.BATCH, allowed=False))
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await ask(world, "bulk", service_tier="flex")
    assert caught.value.code == "service_tier_not_granted"
    assert caught.value.response.headers["x-should-retry"] == "false"
