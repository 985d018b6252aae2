"""A gateway that slept past its heartbeat and goes on: what it lost meanwhile it lets go, and nobody waits for nothing.

The sleep is scripted: its heartbeat is gone, somebody else has acted, and it takes its next look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import openai
import pytest

from gateway.runtime import Runtime
from gateway.streams import NOWHERE
from wire.messages import Released, Reserved, Usage

MODEL = "simulated"
ANSWER = bytes(97 + i % 26 for i in range(120))
TEXT = ANSWER.decode()


@pytest.fixture(autouse=True)
def asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does nothing of its own accord: each look is the test's."""
    monkeypatch.setattr("gateway.runtime.HEARTBEAT_S", 3_600.0)


def slowly(world: Any) -> None:
    world.worker.script.answer = ANSWER
    world.worker.step_s = 0.005


async def _nothing() -> None:
    """In place of a look."""


@asynccontextmanager
async def taken_by_another(world: Any, response_id: str) -> AsyncIterator[Runtime]:
    """The first gateway is silent for so long that a second one adopts what is in the background; then it wakes."""
    world.redis.delete(world.redis_keys.alive("gateway-1"))
    other: Runtime = world.new_runtime("gateway-2")
    adopt = other.continuity.adopt
    other.continuity.adopt = _nothing  # type: ignore[method-assign]  # its looks are the test's, too
    await other.start()
    try:
        await adopt()
        record = world.redis_keys.response(response_id)
        assert world.redis.hget(record, "gateway") == b"gateway-2"
        world.redis.set(world.redis_keys.alive("gateway-1"), 1)
        yield other
    finally:
        await other.stop()


async def background(world: Any) -> str:
    slowly(world)
    response = await world.client().responses.create(model=MODEL, input="Hi", background=True, max_output_tokens=400)
    name: str = response.id
    await world.until(lambda: world.worker.generated.get(name.removeprefix("resp_"), 0) > 20)
    return name.removeprefix("resp_")


async def ended(world: Any, response_id: str) -> None:
    record = world.redis_keys.response(response_id)
    await world.until(lambda: world.redis.hget(record, "state") == b"done", 20.0)


async def test_what_another_gateway_brought_to_its_end_is_shown_and_resumed_whole(world: Any) -> None:
    response_id = await background(world)
    client = world.client()
    async with taken_by_another(world, response_id):
        await ended(world, response_id)
        await world.runtime.holding.renew()
        assert world.runtime.streams.get(response_id) is None
        found = await client.responses.retrieve(f"resp_{response_id}")
        assert (found.status, found.output_text) == ("completed", TEXT)
        events = [event async for event in await client.responses.retrieve(f"resp_{response_id}", stream=True)]
        assert events[-1].type == "response.completed"
    assert [type(message) for message in world.usage_messages()] == [Reserved, Usage]
    assert world.slots_in_use() == 0


async def test_what_goes_on_at_another_gateway_is_shown_as_going_on_and_its_cancel_arrives(world: Any) -> None:
    response_id = await background(world)
    client = world.client()
    async with taken_by_another(world, response_id):
        world.worker.step_s = 0.05
        await world.runtime.holding.renew()
        assert (await client.responses.retrieve(f"resp_{response_id}")).status == "in_progress"
        cancelled = await client.responses.cancel(f"resp_{response_id}")
        assert cancelled.status == "cancelled"
        assert (await client.responses.retrieve(f"resp_{response_id}")).status == "cancelled"


async def test_what_another_gateway_goes_on_with_is_not_given_up_by_who_slept_without_a_worker(world: Any) -> None:
    """It had no worker when it fell asleep, and has waited for longer than it would when it wakes."""
    response_id = await background(world)
    async with taken_by_another(world, response_id):
        stream = world.runtime.streams.get(response_id)
        (stream.worker_id, stream.epoch), stream.homeless_since_s = NOWHERE, float("-inf")
        await world.runtime.continuity.go_on()
        await ended(world, response_id)
    assert [type(message) for message in world.usage_messages()] == [Reserved, Usage]


async def read(world: Any, response_id: str, starting_after: int = -1) -> list[Any]:
    """All events, up to the stream's end."""
    query = {"stream": True, "starting_after": starting_after}
    stream = await world.client().responses.retrieve(f"resp_{response_id}", **query)
    return [event async for event in stream]


async def test_who_still_reads_what_goes_on_elsewhere_is_told_to_come_again_and_can(world: Any) -> None:
    response_id = await background(world)
    world.worker.step_s = 0.02
    reading = asyncio.create_task(read(world, response_id))
    await world.until(lambda: bool(world.runtime.streams.get(response_id).readers))
    async with taken_by_another(world, response_id):
        await world.runtime.holding.renew()
        last = (await asyncio.wait_for(reading, 5))[-1]
        assert (last.type, last.response.error.code) == ("response.failed", "server_error")
        assert "can be resumed" in last.response.error.message
        rest = await read(world, response_id, starting_after=10)
        assert (rest[0].sequence_number, rest[-1].type) == (11, "response.completed")


async def test_who_still_reads_what_has_ended_elsewhere_is_given_all_of_it(world: Any) -> None:
    response_id = await background(world)
    reading = asyncio.create_task(read(world, response_id))
    await world.until(lambda: bool(world.runtime.streams.get(response_id).readers))
    async with taken_by_another(world, response_id):
        await ended(world, response_id)
        await world.runtime.holding.renew()
        last = (await asyncio.wait_for(reading, 5))[-1]
        assert (last.type, last.response.output[0].content[0].text) == ("response.completed", TEXT)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_whose_last_words_did_not_come_is_given_from_its_output(world: Any, stream: bool) -> None:
    """The outbox was lost, or the gateway slept longer than it lives: charged, and delivered all the same."""
    slowly(world)
    world.worker.script.prompt_first = True
    sending = asyncio.create_task(chat(world, stream=stream))
    await world.until(lambda: bool(world.worker.submits))
    world.worker.answer_to("gateway-nobody")
    world.worker.go_on()
    await ended(world, world.worker.submits[0].response_id)
    await world.runtime.holding.renew()
    await world.runtime.holding.renew()
    assert TEXT in "".join(await asyncio.wait_for(sending, 5))
    assert len(world.runtime.streams) == 0


async def chat(world: Any, *, stream: bool) -> list[str]:
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    asking = world.client().chat.completions.create(model=MODEL, messages=messages, max_tokens=400, stream=stream)
    if not stream:
        return [(await asking).choices[0].message.content]
    return [chunk.choices[0].delta.content or "" async for chunk in await asking]


async def test_an_answer_that_was_given_up_meanwhile_ends_with_an_error_and_no_charge(world: Any) -> None:
    """The sweep of the settler released it: nothing will come any more."""
    world.worker.script.hang = True
    sending = asyncio.create_task(chat(world, stream=False))
    await world.until(lambda: bool(world.worker.submits))
    response_id = world.worker.submits[0].response_id
    released = Released(response_id=response_id, tenant_id="aurora", reason="expired")
    await world.runtime.bus.append_usage(released)
    await world.runtime.holding.renew()
    await world.runtime.holding.renew()
    with pytest.raises(openai.InternalServerError, match="was lost"):
        await asyncio.wait_for(sending, 5)
    assert world.money("aurora", "default") == {"open": 0, "settled": 0}


async def test_a_response_that_ended_here_is_told_by_its_own_last_words(world: Any) -> None:
    """Log probabilities and all: its end lies in the outbox, and one look does not overtake it."""
    world.worker.script.prompt_first = True
    headers = {"authorization": f"Bearer {world.keys['aurora']}"}
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
    async with httpx2.AsyncClient(base_url=world.base_url, headers=headers) as client:
        sending = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await world.until(lambda: bool(world.worker.submits))
        receive = world.runtime.bus.receive

        async def late(timeout_s: float) -> Any:
            found = await receive(timeout_s)
            if found:
                world.runtime.bus.receive = receive
                await ended(world, world.worker.submits[0].response_id)
                await world.runtime.holding.renew()
            return found

        world.runtime.bus.receive = late
        world.worker.go_on()
        answer = (await asyncio.wait_for(sending, 10)).json()
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(world.worker.script.answer)
