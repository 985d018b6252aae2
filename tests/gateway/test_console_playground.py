"""Who may use the playground, and what a ticket opens: one socket, once, for one member, from one page."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis
import websockets
from asgiref.sync import sync_to_async
from django.test import Client

from gateway.console import account, tickets
from scheduler_engine.policy import PriorityClass
from tenants import services
from tenants.models import Membership
from tenants.roles import Capability, Role, may
from tests.gateway.conftest import cell
from tests.gateway.fake_worker import MODEL
from tests.gateway.people import person
from wire.messages import ChoiceEnd, EngineCounters, Finished, Rejected, Reserved

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


class House:
    """Aurora with a project and a person."""

    def __init__(self, role: Role = Role.DEVELOPER) -> None:
        self.tenant = services.create_tenant(actor="tests", slug="aurora", name="Aurora")
        self.project = services.create_project(actor="tests", tenant=self.tenant, name="main")
        self.client = self.person("somebody", role)

    def person(self, name: str, role: Role | None) -> Client:
        return person(self.tenant, role, name)

    def ask(self, client: Client | None = None, origin: str = "http://testserver", **form: str) -> Any:
        given = {"project": str(self.project.id), **form}
        return (client or self.client).post("/console/aurora/ticket", given, headers={"origin": origin})


def test_the_page_and_its_ticket_are_open_to_who_may_use_the_playground(valkey: str) -> None:
    house = House()
    for role in Role:
        client = house.person(role.value, role)
        expected = 200 if may(role, Capability.USE_PLAYGROUND) else 403
        assert client.get("/console/aurora/playground").status_code == expected
        assert house.ask(client).status_code == expected
    stranger = house.person("stranger", None)
    assert stranger.get("/console/aurora/playground").status_code == 404
    assert house.ask(stranger).status_code == 404
    assert Client().get("/console/aurora/playground").status_code == 302


def test_a_ticket_wants_a_post_with_the_pages_token(valkey: str) -> None:
    house = House()
    assert house.client.get("/console/aurora/ticket").status_code == 405
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = house.client.cookies
    assert house.ask(strict).status_code == 403


@pytest.mark.parametrize("project", ["", "nonsense", "0199c0de-0000-7000-8000-00000000beef"])
def test_a_ticket_is_for_a_project_of_the_tenant(valkey: str, project: str) -> None:
    house = House()
    assert house.ask(project=project).status_code == 404


def test_a_project_of_another_tenant_is_none(valkey: str) -> None:
    house = House()
    nova = services.create_tenant(actor="tests", slug="nova", name="Nova")
    foreign = services.create_project(actor="tests", tenant=nova, name="main")
    assert house.ask(project=str(foreign.id)).status_code == 404


def test_a_ticket_ends_within_half_a_minute_and_cannot_be_read_from_the_store(valkey: str) -> None:
    secret = House().ask().json()["ticket"].removeprefix("ticket.")
    with redis.Redis.from_url(valkey) as client:
        (key,) = client.keys("*ticket:*")
        assert 0 < client.ttl(key) <= 30
        assert secret.encode() not in key + client.get(key)


def test_a_page_without_the_platforms_memory_is_told_so(settings: Any) -> None:
    settings.REDIS_URL = "redis://127.0.0.1:1/0"
    answer = House().ask()
    assert (answer.status_code, "memory" in answer.json()["error"]) == (503, True)


@pytest.fixture
async def house(world: Any, settings: Any) -> House:
    settings.RUBATO_REDIS_PREFIX = world.redis_keys.prefix
    house = await sync_to_async(House)(Role.OWNER)
    await world.set_quota(*(cell(str(house.tenant.id), each) for each in PriorityClass))
    return house


async def ticket(house: House, world: Any, client: Client | None = None) -> str:
    answer = await sync_to_async(house.ask)(client, world.base_url)
    found: str = answer.json()["ticket"]
    return found


@asynccontextmanager
async def socket(world: Any, house: House, secret: str, **changes: Any) -> AsyncIterator[Any]:
    """As the page opens it; ``changes``: origin, client, query, headers."""
    client = changes.get("client", house.client)
    headers = {"Cookie": f"sessionid={client.cookies['sessionid'].value}", **changes.get("headers", {})}
    url = world.base_url.replace("http", "ws") + "/v1/responses" + changes.get("query", "")
    origin = changes.get("origin", world.base_url)
    protocols = [tickets.PROTOCOL, secret]
    async with websockets.connect(url, origin=origin, additional_headers=headers, subprotocols=protocols) as connection:
        yield connection


async def read(connection: Any) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(await asyncio.wait_for(connection.recv(), 10))
    return event


async def create(connection: Any, **changes: Any) -> list[dict[str, Any]]:
    """All frames up to the account."""
    await connection.send(json.dumps({"type": "response.create", "model": MODEL, "input": "Hi", **changes}))
    frames = [await read(connection)]
    while frames[-1]["type"] not in ("error", account.KIND):
        frames.append(await read(connection))
    return frames


async def refused(connection: Any) -> str:
    """The words, and that the socket is closed as one without a key."""
    event = await read(connection)
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await asyncio.wait_for(connection.recv(), 10)
    assert closed.value.rcvd is not None
    assert (event["status"], closed.value.rcvd.code) == (401, 4401)
    return str(event["error"]["message"])


async def test_a_ticket_opens_one_socket_and_is_never_said_again(world: Any, house: House) -> None:  # P70
    secret = await ticket(house, world)
    async with socket(world, house, secret) as connection:
        assert connection.subprotocol == tickets.PROTOCOL
        frames = await create(connection)
        assert [frame["type"] for frame in frames[-2:]] == ["response.completed", account.KIND]
    async with socket(world, house, secret) as connection:
        assert "opens nothing" in await refused(connection)
    (reserved,) = [message for message in world.usage_messages() if isinstance(message, Reserved)]
    assert (reserved.source, reserved.key_id, reserved.project_id) == ("console", "", str(house.project.id))


async def test_a_page_elsewhere_cannot_use_a_ticket(world: Any, house: House) -> None:  # P70
    async with socket(world, house, await ticket(house, world), origin="http://evil.example") as connection:
        await refused(connection)
    async with socket(world, house, await ticket(house, world), origin=None) as connection:
        await refused(connection)


async def test_a_ticket_opens_for_its_own_member_alone(world: Any, house: House) -> None:
    other = await sync_to_async(house.person)("other", Role.OWNER)
    async with socket(world, house, await ticket(house, world), client=other) as connection:
        assert "signed out" in await refused(connection)


async def test_a_key_in_the_url_or_beside_the_ticket_is_refused(world: Any, house: House) -> None:  # P70
    async with socket(world, house, await ticket(house, world), query="?api_key=x") as connection:
        assert "never in the URL" in await refused(connection)
    headers = {"Authorization": f"Bearer {world.keys['aurora']}"}
    async with socket(world, house, await ticket(house, world), headers=headers) as connection:
        await refused(connection)


async def test_who_loses_the_role_loses_the_socket(world: Any, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "RECHECK_S", 0.0)
    async with socket(world, house, await ticket(house, world)) as connection:
        await create(connection)
        await sync_to_async(Membership.objects.filter(role="owner").update)(role="billing")
        await connection.send(json.dumps({"type": "response.create", "model": MODEL, "input": "Hi"}))
        assert "playground" in await refused(connection)


async def test_who_signs_out_loses_the_socket(world: Any, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tickets, "RECHECK_S", 0.0)
    monkeypatch.setattr("gateway.v1.responses_socket.KEY_CHECK_S", 0.05)
    secret = await ticket(house, world)
    session = house.client.cookies["sessionid"].value
    async with socket(world, house, secret) as connection:
        await create(connection)
        await sync_to_async(house.client.session.delete)(session)
        assert "signed out" in await refused(connection)


async def test_a_budget_that_is_used_up_refuses_the_playground_too(world: Any, house: House) -> None:  # P04
    await world.set_quota(cell(str(house.tenant.id), PriorityClass.DEFAULT, money_micros=1))
    async with socket(world, house, await ticket(house, world)) as connection:
        (error,) = await create(connection)
    assert error["error"]["code"] == "insufficient_quota"
    assert world.usage_messages() == []


async def test_a_class_that_is_not_granted_is_refused(world: Any, house: House) -> None:
    tenant_id = str(house.tenant.id)
    await world.set_quota(
        cell(tenant_id, PriorityClass.DEFAULT), cell(tenant_id, PriorityClass.INTERACTIVE, allowed=False)
    )
    async with socket(world, house, await ticket(house, world)) as connection:
        (error,) = await create(connection, service_tier="priority")
    assert error["error"]["code"] == "service_tier_not_granted"


async def test_the_price_is_told_to_who_sees_money_alone(world: Any, house: House) -> None:
    developer = await sync_to_async(house.person)("developer", Role.DEVELOPER)
    async with socket(world, house, await ticket(house, world)) as connection:
        assert (await create(connection))[-1]["cost"] == "0.000049"
    async with socket(world, house, await ticket(house, world, developer), client=developer) as connection:
        assert (await create(connection))[-1]["cost"] is None


async def test_a_ping_is_answered(world: Any, house: House) -> None:  # P69
    async with socket(world, house, await ticket(house, world)) as connection:
        await connection.send('{"type": "ping"}')
        assert await read(connection) == {"type": "pong"}


def finished(*, reason: str = "stop", detail: str = "", attempt: int = 1, **counters: Any) -> Finished:
    return Finished(
        response_id="r",
        attempt=attempt,
        choices=(ChoiceEnd(choice=0, reason=reason, detail=detail),),
        prompt_tokens=10,
        cached_tokens=0,
        output_tokens=5,
        counters=EngineCounters(**counters),
    )


def test_waits_are_told_in_words_and_whole_milliseconds_that_sum_to_the_whole() -> None:
    waits = (
        ("queued", "memory", "batch", 1_600),
        ("queued", "own_tenant", "", 1_600),
        ("paused", "new_cause", "", 9_000),
    )
    told = account.account("resp_r", finished(queue_us=3_200, waits=waits), None)
    assert [(wait["phase"], wait["ms"], wait["words"]) for wait in told["waits"]] == [
        ("queued", 2, "for KV memory held by the batch class"),
        ("queued", 1, "behind other requests of its own tenant"),
        ("paused", 9, "for new cause"),
    ]
    assert told["queue_ms"] == 3


def test_the_first_token_of_an_answer_that_moved_is_not_told_by_its_last_worker() -> None:
    told = {attempt: account.account("resp_r", finished(attempt=attempt, ttft_us=49_000), None) for attempt in (1, 2)}
    assert [(one["ttft_ms"], one["is_moved"]) for one in told.values()] == [(49, False), (None, True)]


def test_one_that_was_refused_in_the_engine_is_told_what_it_waited_for() -> None:
    rejected = Rejected(
        response_id="r", attempt=1, reason="late", retry_after_us=None, waits=(("queued", "slots", "batch", 7_000),)
    )
    assert account.account("resp_r", rejected, None)["waits"] == [
        {"phase": "queued", "ms": 7, "words": "for a slot held by the batch class"}
    ]


@pytest.mark.parametrize(
    ("end", "cost"),
    [
        ({"reason": "stop"}, "0.000020"),
        ({"reason": "cancelled", "detail": "client"}, "0.000020"),
        ({"reason": "cancelled", "detail": "gateway_lost"}, "0.000000"),
        ({"reason": "failed"}, "0.000000"),
    ],
)
def test_what_the_platform_broke_off_costs_nothing(end: dict[str, str], cost: str) -> None:
    from billing.pricing import TokenPrices

    prices = TokenPrices(prompt=1_000_000, cached=0, output=2_000_000)
    assert account.account("resp_r", finished(**end), prices)["cost"] == cost
