"""Streams whose reader leaves, is slow or never reads, and streams that break or go quiet."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from tests.gateway.chat_client import ask, cell, raw_stream, read
from wire.messages import Usage


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
    monkeypatch.setattr("gateway.response_stream.STALLED_AFTER_S", 0.2)
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
