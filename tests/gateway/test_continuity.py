"""Responses that outlive their worker or their gateway: a pause, no gap, no repeat, and one charge."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from gateway.errors import InvalidRequest
from gateway.response_stream import Lost, Reader
from gateway.runtime import Runtime
from wire.messages import Finished, Released, Reserved, Usage

MODEL = "simulated"
HI: list[Any] = [{"role": "user", "content": "Hi"}]
ANSWER = bytes(97 + i % 26 for i in range(120))


async def ask(world: Any, **changes: Any) -> Any:
    return await world.client().chat.completions.create(
        **{"model": MODEL, "messages": HI, "max_tokens": 400, **changes}
    )


async def read(stream: Any, texts: list[str]) -> None:
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "")


def slowly(world: Any) -> None:
    world.worker.script.answer = ANSWER
    world.worker.step_s = 0.005


async def test_a_worker_that_dies_in_mid_stream_is_a_pause_without_gap_or_repeat(world: Any) -> None:
    slowly(world)
    texts: list[str] = []
    reading = asyncio.create_task(read(await ask(world, stream=True), texts))
    await world.until(lambda: len("".join(texts)) > 30)
    await asyncio.to_thread(world.worker.restart)
    await asyncio.wait_for(reading, 20)
    assert "".join(texts).encode() == ANSWER
    first, second = world.worker.submits
    assert (first.attempt, second.attempt) == (1, 2)
    (delivered,) = second.delivered_token_ids
    assert bytes(delivered) == ANSWER[: len(delivered)]
    assert len(delivered) > 30
    assert (second.max_queue_wait_us, second.remaining_hard_deadline_us) == (None, None)
    assert second.worker_epoch == world.worker.epoch
    kinds = [type(message) for message in world.usage_messages()]
    assert kinds == [Reserved, Usage]
    await world.until(lambda: world.slots_in_use() == 0)
    assert world.money("aurora", "default")["open"] == 0


async def test_a_plain_request_is_answered_by_the_next_worker_too(world: Any) -> None:
    world.worker.script.hang = True
    asking = asyncio.create_task(ask(world))
    await world.until(lambda: len(world.worker.submits) == 1)
    world.worker.script.hang = False
    await asyncio.to_thread(world.worker.restart)
    assert (await asyncio.wait_for(asking, 20)).choices[0].message.content == "Hello, Aurora."
    assert [submit.attempt for submit in world.worker.submits] == [1, 2]


async def test_a_response_that_no_worker_goes_on_with_ends_with_an_error_and_no_charge(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.streams.LOST_AFTER_S", 0.2)
    monkeypatch.setattr("gateway.continuity.HOMELESS_S", 0.3)
    slowly(world)
    texts: list[str] = []
    reading = asyncio.create_task(read(await ask(world, stream=True), texts))
    await world.until(lambda: len(texts) > 5)
    world.worker.freeze()
    with pytest.raises(openai.APIError, match="was lost"):
        await asyncio.wait_for(reading, 20)
    assert world.redis.get(world.redis_keys.epoch("worker-1")) == f"fenced:{world.worker.epoch}".encode()
    await world.until(lambda: world.slots_in_use() == 0)
    assert world.money("aurora", "default") == {"open": 0, "settled": 0}
    assert [type(message) for message in world.usage_messages()] == [Reserved, Released]


async def test_a_client_that_leaves_while_no_worker_is_there_leaves_nothing_behind(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.streams.LOST_AFTER_S", 0.2)
    slowly(world)
    stream = await ask(world, stream=True)
    await anext(aiter(stream))
    world.worker.freeze()
    await world.until(lambda: bool(world.runtime.streams.homeless()))
    await stream.close()
    await world.until(lambda: len(world.runtime.streams) == 0)
    await world.until(lambda: world.slots_in_use() == 0)


@asynccontextmanager
async def second_gateway(world: Any) -> AsyncIterator[Runtime]:
    runtime: Runtime = world.new_runtime("gateway-2")
    await runtime.start()
    try:
        yield runtime
    finally:
        await runtime.stop()


async def background(world: Any, **changes: Any) -> str:
    response = await world.client().responses.create(
        **{"model": MODEL, "input": "Hi", "background": True, "max_output_tokens": 400, **changes}
    )
    assert response.status in ("queued", "in_progress")  # its first tokens may be there already
    name: str = response.id
    return name.removeprefix("resp_")


async def text_of(reader: Reader) -> bytes:
    token_ids: list[int] = []
    async with asyncio.timeout(20):
        while True:
            delivery = await reader.next()
            token_ids += [token_id for piece in delivery.pieces for token_id in piece.token_ids]
            if delivery.end is not None:
                assert isinstance(delivery.end, Finished)
                return bytes(token_ids)


async def test_another_gateway_takes_a_live_response_over_whole_and_the_first_is_told(world: Any) -> None:
    slowly(world)
    response_id = await background(world)
    await world.until(lambda: world.worker.generated.get(response_id, 0) > 30)
    first = world.runtime.streams.get(response_id).read()
    async with second_gateway(world) as other:
        found = await other.continuity.find("aurora", response_id)
        assert await text_of(found.stream.read()) == ANSWER
        end = None
        while end is None:
            end = (await first.next()).end
        assert isinstance(end, Lost)
        assert end.refusal.row.code == "response_moved"
        (attach,) = world.worker.attaches
        assert (attach.gateway_id, attach.attempt) == ("gateway-2", 1)
    assert [type(message) for message in world.usage_messages()] == [Reserved, Usage]


async def test_of_two_gateways_that_take_over_at_once_one_becomes_the_owner(world: Any) -> None:
    world.worker.script.prompt_first = True
    response_id = await background(world)
    ownership = world.runtime.ownership
    owner = await ownership.owner(response_id)
    moves = [
        ownership.move(response_id, owner, gateway_id=name, attempt=1, worker=("worker-1", owner.epoch))
        for name in ("gateway-2", "gateway-3")
    ]
    assert sorted(await asyncio.gather(*moves)) == [False, True]


async def test_a_response_of_another_tenant_is_not_there(world: Any) -> None:
    response_id = await background(world)
    async with second_gateway(world) as other:
        assert await other.continuity.find("bulk", response_id) is None
        assert await world.runtime.continuity.find("bulk", response_id) is None


async def dies(world: Any, response_id: str) -> None:
    """Its gateway, as if it had been killed: nobody has the stream, and a dead gateway's outbox is nobody else's."""
    world.worker.answer_to("gateway-dead")
    await world.until(lambda: world.redis.exists(world.redis_keys.outbox("gateway-dead")))
    world.runtime.streams.forget(world.runtime.streams.get(response_id))
    owner = await world.runtime.ownership.owner(response_id)
    assert await world.runtime.ownership.move(
        response_id, owner, gateway_id="gateway-dead", attempt=1, worker=("worker-1", owner.epoch)
    )


async def test_a_background_response_whose_gateway_died_is_adopted_before_its_worker_gives_up(world: Any) -> None:
    slowly(world)
    async with second_gateway(world) as other:
        response_id = await background(world)
        await world.until(lambda: world.worker.generated.get(response_id, 0) > 20)
        await dies(world, response_id)
        await world.until(lambda: any(r.streams.get(response_id) is not None for r in (other, world.runtime)), 10.0)
        owner = next(r for r in (other, world.runtime) if r.streams.get(response_id) is not None)
        assert await text_of(owner.streams.get(response_id).read()) == ANSWER
    await world.until(lambda: world.slots_in_use() == 0)


async def test_a_background_response_that_was_adopted_goes_on_to_its_end_without_any_reader(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.response_stream.LINGER_S", 0.1)
    monkeypatch.setattr("gateway.runtime.HEARTBEAT_S", 0.05)
    monkeypatch.setattr("gateway.runtime.ADOPT_S", 0.05)
    world.worker.script.answer, world.worker.step_s = b"x" * 200, 0.01
    async with second_gateway(world):
        response_id = await background(world)
        await world.until(lambda: world.worker.generated.get(response_id, 0) > 5)
        await dies(world, response_id)
        await world.until(lambda: world.slots_in_use() == 0, 20.0)
    assert world.worker.cancels == []
    ended = [message for message in world.usage_messages() if isinstance(message, Usage)]
    assert [(usage.terminal, usage.output_tokens) for usage in ended] == [("completed", 200)]


async def test_a_background_response_that_lost_its_gateway_and_then_its_worker_is_begun_anew_and_charged_once(
    world: Any,
) -> None:
    """What its dead gateway had delivered is known to nobody; the next worker draws the same tokens again."""
    slowly(world)
    response_id = await background(world, extra_body={"max_queue_wait_ms": 60_000, "deadline_ms": 60_000})
    await world.until(lambda: world.worker.generated.get(response_id, 0) > 20)
    await dies(world, response_id)
    await asyncio.to_thread(world.worker.restart)
    await world.until(lambda: world.runtime.streams.get(response_id) is not None, 10.0)
    assert await text_of(world.runtime.streams.get(response_id).read()) == ANSWER
    _, second = world.worker.submits
    assert (second.attempt, second.delivered_token_ids) == (2, ((),))
    assert (second.max_queue_wait_us, second.remaining_first_token_us, second.remaining_hard_deadline_us) == (None,) * 3
    assert [type(message) for message in world.usage_messages()] == [Reserved, Usage]
    await world.until(lambda: world.slots_in_use() == 0)
    assert world.money("aurora", "default")["open"] == 0


async def test_a_stream_that_lost_its_gateway_and_then_its_worker_ends_free_of_charge(world: Any) -> None:
    """Its reader may hold tokens that nobody knows of any more."""
    slowly(world)
    stream, response_id = await created(world)
    await world.until(lambda: world.worker.generated.get(response_id, 0) > 20)
    await dies(world, response_id)
    await asyncio.to_thread(world.worker.restart)
    reader = (await world.runtime.continuity.find("aurora", response_id)).stream.read()
    end = None
    while end is None:
        end = (await asyncio.wait_for(reader.next(), 20)).end
    assert isinstance(end, Lost)
    assert end.refusal.row.code == "worker_lost"
    await world.until(lambda: world.redis.xlen(world.redis_keys.usage) > 1)  # the reader is told first
    assert [type(message) for message in world.usage_messages()] == [Reserved, Released]
    await stream.close()


async def created(world: Any) -> tuple[Any, str]:
    """A stream over HTTP that is under way, and its id."""
    stream = await world.client().responses.create(model=MODEL, input="Hi", stream=True, max_output_tokens=400)
    first = await anext(aiter(stream))
    return stream, first.response.id.removeprefix("resp_")


async def test_looking_at_a_response_elsewhere_or_cancelling_it_takes_it_from_nobody(world: Any) -> None:
    world.worker.script.answer, world.worker.step_s = b"x" * 400, 0.02
    async with second_gateway(world) as other:
        stream, response_id = await created(world)
        found = await other.continuity.find("aurora", response_id, to_read=False)
        assert found.is_elsewhere
        other.door.stop_reading(found.stream, found.stream.read())
        other.door.cancel(found.stream)
        await asyncio.wait_for(other.continuity.until_ended(found.stream), 10)
        events = [event.type async for event in stream]
        assert events[-1] == "response.incomplete"
        assert world.worker.attaches == []


async def test_two_clients_cannot_tear_a_response_to_and_fro_between_two_gateways(world: Any) -> None:
    world.worker.script.answer, world.worker.step_s = b"x" * 400, 0.05
    async with second_gateway(world) as other:
        stream, response_id = await created(world)
        taken = await other.continuity.find("aurora", response_id)
        reader = taken.stream.read()
        last = [event async for event in stream][-1]
        assert last.type == "response.failed"
        assert "Another connection" in last.response.error.message
        with pytest.raises(InvalidRequest) as refused:
            await world.runtime.continuity.find("aurora", response_id)
        assert refused.value.refusal.row.code == "response_moved"
        assert refused.value.refusal.headers()["retry-after"] == "2"
        assert taken.stream.end is None
        other.door.stop_reading(taken.stream, reader)
        other.door.cancel(taken.stream)
        await world.until(lambda: world.slots_in_use() == 0)


async def test_a_response_that_was_taken_over_waits_for_its_reader_and_then_ends(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not in the background ends without a reader, also after it was resumed elsewhere."""
    monkeypatch.setattr("gateway.response_stream.LINGER_S", 0.5)
    monkeypatch.setattr("gateway.runtime.HEARTBEAT_S", 0.1)
    world.worker.script.answer, world.worker.step_s = b"x" * 2_000, 0.02
    async with second_gateway(world) as other:
        stream, response_id = await created(world)
        taken = (await other.continuity.find("aurora", response_id)).stream
        other.door.stop_reading(taken, taken.read())
        again = taken.read()
        await asyncio.sleep(0.8)
        assert world.slots_in_use() == 1  # somebody reads
        other.door.stop_reading(taken, again)
        await world.until(lambda: world.slots_in_use() == 0)
        (cancel,) = [cancel for _, cancel in world.worker.cancels]
        assert cancel.reason == "client"
        await stream.close()
