"""``store: true``: a finished response on the durable shelf, there when Redis has forgotten it, for its tenant."""

from __future__ import annotations

import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any

import openai
import pytest
from django.utils import timezone

from gateway.database_threads import DatabaseThreads
from gateway.ownership import Card
from gateway.stored.models import StoredResponse
from gateway.stored.shelf import LIFETIME, DatabaseShelf, ShelfDown, Stored, sweep
from scheduler_engine.policy import PriorityClass
from tenants import services
from wire.bus import FinishedOutput
from wire.messages import ChoiceEnd, EngineCounters, Finished, Submit

MODEL = "simulated"


class MemoryShelf:
    """The same promises without a database."""

    def __init__(self) -> None:
        self.stored: dict[tuple[str, str], Stored] = {}
        self.is_down = False

    async def put(self, card: Card, output: FinishedOutput) -> None:
        if self.is_down:
            raise ShelfDown("away")
        self.stored.setdefault((card.tenant_id, card.submit.response_id), Stored(card, output))

    async def take_down(self, tenant_id: str, response_id: str) -> Stored | None:
        return self.stored.get((tenant_id, response_id))

    async def throw_away(self, tenant_id: str, response_id: str) -> None:
        self.stored.pop((tenant_id, response_id), None)


@pytest.fixture
def shelf(world: Any) -> MemoryShelf:
    shelf = MemoryShelf()
    world.runtime.continuity.shelf = shelf
    return shelf


async def create(world: Any, **changes: Any) -> Any:
    return await world.client().responses.create(**{"model": MODEL, "input": "Hi", "store": True, **changes})


def forget(world: Any, name: str) -> None:
    """Ten minutes later, in Redis."""
    keys, response_id = world.redis_keys, name.removeprefix("resp_")
    world.redis.delete(keys.card("aurora", response_id), keys.output(response_id), keys.response(response_id))


async def test_a_stored_response_is_shown_as_it_was_after_redis_forgot_it(world: Any, shelf: MemoryShelf) -> None:
    response = await create(world, metadata={"a": "b"})
    assert response.store
    await world.until(lambda: len(shelf.stored) == 1)
    forget(world, response.id)
    client = world.client()
    again = await client.responses.retrieve(response.id)
    assert again.to_dict() == response.to_dict()
    stream = await client.responses.retrieve(response.id, stream=True, starting_after=3)
    assert "".join([e.delta async for e in stream if e.type == "response.output_text.delta"]) == "Hello, Aurora."
    assert [item.role async for item in client.responses.input_items.list(response.id)] == ["user"]
    with pytest.raises(openai.NotFoundError):
        await world.client("bulk").responses.retrieve(response.id)
    await client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(response.id)


async def test_what_had_ended_before_its_adopter_heard_of_it_is_stored_though_nobody_looks(
    world: Any, shelf: MemoryShelf
) -> None:
    """Its gateway died with the last words in its outbox."""
    world.worker.script.prompt_first = True
    response = await create(world, background=True)
    response_id = response.id.removeprefix("resp_")
    await world.until(lambda: bool(world.worker.submits))
    world.worker.answer_to("gateway-dead")
    world.runtime.streams.forget(world.runtime.streams.get(response_id))
    owner = await world.runtime.ownership.owner(response_id)
    worker = (owner.worker_id, owner.epoch)
    await world.runtime.ownership.move(response_id, owner, gateway_id="gateway-dead", attempt=1, worker=worker)
    await world.runtime.continuity.adopt()
    world.worker.answer_to("gateway-dead")
    world.worker.go_on()
    await world.until(lambda: len(shelf.stored) == 1, 10.0)


async def test_what_was_not_to_be_stored_or_failed_is_not(world: Any, shelf: MemoryShelf) -> None:
    """P77: nothing of a prompt is kept unless somebody asks for it."""
    await create(world, store=False)
    world.worker.script.reject = ("late", 1)
    with pytest.raises(openai.InternalServerError):
        await create(world)
    world.worker.script.reject = None
    await create(world)
    await world.until(lambda: len(shelf.stored) == 1)
    assert world.runtime.streams.to_store == []


async def test_a_shelf_that_is_away_gets_it_later(world: Any, shelf: MemoryShelf) -> None:
    shelf.is_down = True
    await create(world)
    await world.until(lambda: len(world.runtime.streams.to_store) == 1)
    shelf.is_down = False
    await world.until(lambda: len(shelf.stored) == 1)


async def test_without_a_database_it_is_refused_and_in_chats_always(world: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await create(world)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "store")
    with pytest.raises(openai.BadRequestError):
        await world.client().chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], store=True
        )


def card_of(tenant_id: uuid.UUID) -> Card:
    submit = Submit(
        response_id=str(uuid.uuid4()),
        attempt=1,
        gateway_id="g",
        tenant_id=str(tenant_id),
        project_id="p",
        key_id="k",
        priority_class=PriorityClass.DEFAULT,
        model=MODEL,
        prompt_token_ids=(1, 2),
    )
    return Card(tenant_id=str(tenant_id), created_at=1, request=b"{}", submit=submit, is_stored=True)


OUTPUT = FinishedOutput(
    Finished(
        response_id="r",
        attempt=1,
        choices=(ChoiceEnd(choice=0, reason="stop"),),
        prompt_tokens=2,
        cached_tokens=0,
        output_tokens=1,
        counters=EngineCounters(),
    ),
    [[5]],
)


@pytest.mark.django_db(transaction=True)
async def test_the_database_keeps_it_behind_the_wall_and_throws_the_old_away() -> None:
    tenants = [await _tenant(slug) for slug in ("aurora", "stranger")]
    threads = DatabaseThreads()
    shelf, card = DatabaseShelf(threads), card_of(tenants[0])
    response_id = card.submit.response_id
    await shelf.put(card, OUTPUT)
    await shelf.put(replace(card, created_at=2), OUTPUT)
    assert await shelf.take_down(str(tenants[0]), response_id) == Stored(card, OUTPUT)
    assert await shelf.take_down(str(tenants[1]), response_id) is None
    await shelf.throw_away(str(tenants[1]), response_id)
    assert await threads.run(lambda: sweep(timezone.now())) == 0
    assert await threads.run(lambda: sweep(timezone.now() + LIFETIME + timedelta(seconds=1))) == 1
    assert await threads.run(StoredResponse.objects.count) == 0
    threads.close()


async def _tenant(slug: str) -> uuid.UUID:
    threads = DatabaseThreads()
    made = await threads.run(lambda: services.create_tenant(actor="test", slug=slug, name=slug.title(), timezone="UTC"))
    threads.close()
    tenant_id: uuid.UUID = made.id
    return tenant_id
