"""A key whose owner was not heard of for longer than its lease: one operation, one charge, whoever wakes first (P36).

The stall is scripted: the lease is over, or the owner is one that the test plays.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from gateway.admission import Denied, Limits
from gateway.asking import Plain
from gateway.auth import Caller
from gateway.errors import Reason, Refusal
from gateway.fates import AnswerLost
from gateway.v1 import asks, schemas
from gateway.v1.once import Once
from scheduler_engine.policy import PriorityClass, TenantClassPolicy
from tests.gateway.test_idempotency import CHAT, num_reserved, send
from wire.messages import Released

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {},
    "/v1/completions": {"messages": None, "prompt": ["a", "b"]},
    "/v1/responses": {"messages": None, "input": "Hi"},
}
WAYS = [pytest.param(path, stream, id=f"{path}-{stream}") for path in BODIES for stream in (False, True)]


def the_key(world: Any) -> str:
    (name,) = world.redis.scan_iter(f"{world.redis_keys.prefix}idempotency:*")
    found: str = name.decode()
    return found


def lease_runs_out(world: Any) -> None:
    world.redis.hset(the_key(world), "until_ms", 0)


async def dies_before_it_keeps_the_answer(world: Any) -> None:
    """What the key holds when its owner is killed between the operation's end and ``complete``."""
    await world.until(lambda: world.redis.hexists(the_key(world), "status"))
    world.redis.hdel(the_key(world), "status", "headers", "body")
    world.redis.hset(the_key(world), mapping={"owner": "dead", "until_ms": 0})


def without_times(text: str) -> list[str]:
    """Chunks of two prompts come in any order."""
    return sorted(re.sub(r'"created(_at)?":\d+', "", text).splitlines())


def replayed(answer: httpx2.Response) -> bool:
    return answer.headers.get("idempotent-replayed") == "true"


async def test_an_answer_that_comes_after_its_lease_is_kept_all_the_same(world: Any) -> None:
    """Nothing has lapsed by itself: Valkey, or the gateway, slept for longer than the lease."""
    world.worker.script.prompt_first = True
    first = asyncio.create_task(send(world, "k1"))
    await world.until(lambda: len(world.worker.submits) == 1)
    lease_runs_out(world)
    world.worker.go_on()
    answer = await first
    again = await send(world, "k1")
    assert (answer.status_code, again.json()) == (200, answer.json())
    assert replayed(again)
    assert num_reserved(world) == 1


async def test_a_key_that_was_lost_while_its_request_ran_is_written_by_whoever_finishes(world: Any) -> None:
    world.worker.script.prompt_first = True
    first = asyncio.create_task(send(world, "k1"))
    await world.until(lambda: len(world.worker.submits) == 1)
    world.redis.delete(the_key(world))
    world.worker.go_on()
    assert (await first).status_code == 200
    assert replayed(await send(world, "k1"))
    assert num_reserved(world) == 1


async def test_a_twin_that_takes_the_key_of_one_who_sleeps_begins_nothing_while_the_work_goes_on(world: Any) -> None:
    world.worker.script.prompt_first = True
    first = asyncio.create_task(send(world, "k1"))
    await world.until(lambda: len(world.worker.submits) == 1)
    for _ in range(3):
        lease_runs_out(world)
        twin = await send(world, "k1")
        assert (twin.status_code, twin.json()["error"]["code"]) == (409, "idempotency_twin_running")
        assert int(twin.headers["retry-after"]) >= 1
    world.worker.go_on()
    answer = await first
    again = await send(world, "k1")
    assert (answer.status_code, again.json(), replayed(again)) == (200, answer.json(), True)
    assert (len(world.worker.submits), num_reserved(world)) == (1, 1)


@pytest.mark.parametrize(("path", "stream"), WAYS)
async def test_the_answer_of_an_owner_who_died_before_it_was_kept_is_given_without_a_second_charge(
    world: Any, path: str, stream: bool
) -> None:
    """For every endpoint and every operation of one request: rendered once more from its tokens."""
    body = {**BODIES[path], "stream": stream}
    first = await send(world, "k1", path=path, **body)
    num_submits = len(world.worker.submits)
    await dies_before_it_keeps_the_answer(world)
    again = await send(world, "k1", path=path, **body)
    assert (first.status_code, again.status_code) == (200, 200)
    assert without_times(again.text) == without_times(first.text)
    assert (len(world.worker.submits), num_reserved(world)) == (num_submits, num_submits)
    assert replayed(await send(world, "k1", path=path, **body))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "asked"),
    [(CHAT, {"logprobs": True, "top_logprobs": 2}), ("/v1/completions", {**BODIES["/v1/completions"], "logprobs": 2})],
    ids=["chat", "completions"],
)
async def test_an_answer_with_log_probabilities_is_given_without_them_when_its_owner_died(
    world: Any, path: str, asked: dict[str, Any], stream: bool
) -> None:
    """They are nowhere any more; its tokens are."""
    body = {**asked, "stream": stream}
    await send(world, "k1", path=path, **body)
    await dies_before_it_keeps_the_answer(world)
    again = await send(world, "k1", path=path, **body)
    assert again.status_code == 200
    texts = re.findall(r'"(?:text|content)":"([^"]*)"', again.text)
    num_answers = len(asked.get("prompt", "1"))
    assert sorted("".join(texts)) == sorted("Hello, Aurora." * num_answers)


async def test_what_ended_at_no_charge_under_a_dead_owner_is_begun_anew(world: Any) -> None:
    """Its worker cancelled it when the gateway was gone, or the sweep released it."""
    world.worker.script.hang = True
    first = asyncio.create_task(send(world, "k1"))
    await world.until(lambda: len(world.worker.submits) == 1)
    name = world.worker.submits[0].response_id
    world.worker.script.hang = False
    released = Released(response_id=name, tenant_id="aurora", reason="expired")
    await world.runtime.bus.append_usage(released)
    lease_runs_out(world)
    second = await send(world, "k1")
    assert (second.status_code, name in second.text) == (200, False)
    first.cancel()
    assert replayed(await send(world, "k1"))
    assert world.money("aurora", "default")["open"] == 0


@pytest.mark.parametrize("is_first_left", [False, True])
async def test_a_list_that_is_refused_after_some_of_it_was_charged_keeps_its_key(
    world: Any, is_first_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner died when a prompt was answered; who comes next is refused for another, whether they have come to the
    answered one or not: nothing is asked for anew.
    """
    asked = {**BODIES["/v1/completions"], "path": "/v1/completions"}
    await send(world, "k1", **asked)
    names = [submit.response_id for submit in world.worker.submits]
    answered, left = reversed(names) if is_first_left else names
    await dies_before_it_keeps_the_answer(world)
    world.redis.hset(world.redis_keys.response(left), mapping={"state": "done", "terminal": "released"})

    async def deny(*_: Any, **__: Any) -> Denied:
        return Denied(Refusal(reason=Reason.NO_WORKER, message="none"), Limits(PriorityClass.DEFAULT))

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(world.runtime.door, "enter", deny)
        assert (await send(world, "k1", **asked)).status_code == 503
    world.worker.script.reject = ("late", 1_000_000)
    assert (await send(world, "k1", **asked)).status_code == 503
    world.worker.script.reject = None
    again = await send(world, "k1", **asked)
    assert (again.status_code, len(again.json()["choices"])) == (200, 2)
    asked_for = [submit.response_id for submit in world.worker.submits]
    assert (asked_for.count(answered), asked_for.count(left), len(asked_for)) == (1, 1, 4)
    assert replayed(await send(world, "k1", **asked))


@pytest.mark.parametrize("num_left", [0, 1])
async def test_what_is_left_of_a_list_is_served_in_the_class_of_the_rest_and_the_answer_names_that_class(
    world: Any, num_left: int
) -> None:
    """Its own class was full at first, and has room by the time that somebody takes the key over."""
    asked = {**BODIES["/v1/completions"], "path": "/v1/completions", "service_tier": "priority"}
    interactive = TenantClassPolicy(
        tenant_id="aurora", priority_class=PriorityClass.INTERACTIVE, overflow_to=PriorityClass.DEFAULT
    )
    await world.set_quota(replace(interactive, requests_per_minute=1))
    await send(world, "k1", **asked)
    names = [submit.response_id for submit in world.worker.submits]
    await dies_before_it_keeps_the_answer(world)
    for name in names[2 - num_left :]:
        world.redis.hset(world.redis_keys.response(name), mapping={"state": "done", "terminal": "released"})
    await world.set_quota(interactive)
    again = await send(world, "k1", **asked)
    assert (again.status_code, again.json()["service_tier"]) == (200, "default")
    assert [submit.priority_class for submit in world.worker.submits] == [PriorityClass.DEFAULT] * (2 + num_left)


async def test_what_is_left_of_a_list_is_refused_where_the_class_of_the_rest_serves_it_no_more(world: Any) -> None:
    asked = {**BODIES["/v1/completions"], "path": "/v1/completions"}
    await send(world, "k1", **asked)
    left = world.worker.submits[1].response_id
    await dies_before_it_keeps_the_answer(world)
    world.redis.hset(world.redis_keys.response(left), mapping={"state": "done", "terminal": "released"})
    default = TenantClassPolicy(tenant_id="aurora", priority_class=PriorityClass.DEFAULT)
    full = replace(default, requests_per_minute=0, overflow_to=PriorityClass.BATCH)
    await world.set_quota(full, replace(default, priority_class=PriorityClass.BATCH))
    assert (await send(world, "k1", **asked)).status_code == 429
    await world.set_quota(default)
    again = await send(world, "k1", **asked)
    assert (again.status_code, again.json()["service_tier"]) == (200, "default")


def once(world: Any, operation: str, *, is_left: bool) -> Once:
    runtime = world.runtime
    return Once(runtime.door, runtime.policy, runtime.fates, operation, is_left=is_left)


CALLER = Caller("key-aurora", "public", "aurora", "project-aurora", PriorityClass.DEFAULT)


def an_ask(world: Any) -> Any:
    request = schemas.CompletionRequest(model="simulated", prompt="Hi")
    return asks.ask(
        request,
        model="simulated",
        prompt=Plain("Hi"),
        prompt_param="prompt",
        max_tokens=400,
        max_tokens_param="max_tokens",
        source="rest",
        received_at_s=asyncio.get_running_loop().time(),
        text=world.runtime.door.texts["simulated"],
    )


@pytest.mark.parametrize("who_wakes", ["the first", "the second", "both"])
async def test_of_an_owner_who_slept_before_the_door_and_a_taker_one_is_let_in(world: Any, who_wakes: str) -> None:
    """However long it slept: the operation's id is the key's, and the door knows it."""
    operation = str(uuid.uuid4())
    sleeper, taker = once(world, operation, is_left=False), once(world, operation, is_left=True)
    order = [sleeper, taker] if who_wakes == "the first" else [taker, sleeper]
    world.worker.script.hang = True
    if who_wakes == "both":
        found = await asyncio.gather(*(one.enter(CALLER, [an_ask(world)]) for one in order), return_exceptions=True)
    else:
        found = [await _enter(one, an_ask(world)) for one in order]
    let_in = [one for one in found if not isinstance(one, Denied | BaseException)]
    assert len(let_in) == 1
    assert [submit.response_id for submit in world.worker.submits] in ([operation], [])
    await world.until(lambda: len(world.worker.submits) == 1)
    assert num_reserved(world) == 1
    world.runtime.door.leave(let_in[0][0])


async def _enter(one: Once, ask: Any) -> Any:
    try:
        return await one.enter(CALLER, [ask])
    except Exception as error:
        return error


async def test_a_charged_answer_that_is_nowhere_any_more_is_told_so_and_not_charged_again(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has forgotten it, and the books have its charge."""
    await send(world, "k1")
    await dies_before_it_keeps_the_answer(world)

    async def lost(*_: Any) -> AnswerLost:
        return AnswerLost()

    monkeypatch.setattr(world.runtime.fates, "of", lost)
    for _ in range(2):
        refused = await send(world, "k1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_answer_lost")
        assert refused.headers["x-should-retry"] == "false"
        lease_runs_out(world)
    assert num_reserved(world) == 1


async def test_a_broken_answer_whose_operation_goes_on_elsewhere_does_not_free_its_key(world: Any) -> None:
    """Its reader was told that it moved; who sends it again waits for the one operation."""
    world.worker.script.prompt_first = True
    first = asyncio.create_task(send(world, "k1", path="/v1/responses", messages=None, input="Hi"))
    await world.until(lambda: len(world.worker.submits) == 1)
    response_id = world.worker.submits[0].response_id
    other = world.new_runtime("gateway-2")
    await other.start()
    try:
        found = await other.continuity.find("aurora", response_id)
        assert (await first).status_code == 409
        twin = await send(world, "k1", path="/v1/responses", messages=None, input="Hi")
        assert twin.json()["error"]["code"] == "idempotency_twin_running"
        world.worker.go_on()
        await world.until(lambda: found.stream.end is not None)
        again = await send(world, "k1", path="/v1/responses", messages=None, input="Hi")
        assert (again.status_code, again.json()["status"]) == (200, "completed")
    finally:
        await other.stop()
    assert num_reserved(world) == 1
