"""What a tenant has under way: its own and nobody else's, on the device or waiting, and how it is cancelled."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.admission import new_response_id
from gateway.console.pages.live import stop, under_way
from gateway.loads import loads
from scheduler_engine.policy import PriorityClass
from tenants import services
from tenants.roles import Capability, Role, may
from tests.gateway.fake_worker import MODEL
from tests.gateway.people import person
from wire.messages import BoardRow

INTERACTIVE, DEFAULT, BATCH = PriorityClass
NOW_S = 1_800_000_000.0


def name(age_s: int = 0) -> str:
    return new_response_id(int((NOW_S - age_s) * 1_000), bytes(range(10)))


def row(response_id: str, tenant_id: str, priority_class: PriorityClass = DEFAULT, **changes: Any) -> BoardRow:
    whole = {"state": "decode", "num_blocks": 1, "num_computed_tokens": 9, "num_output_tokens": 4, **changes}
    return BoardRow(response_id=response_id, tenant_id=tenant_id, priority_class=priority_class, **whole)


class Board:
    """What a worker would say of its device: no more than is read here."""

    def __init__(self) -> None:
        self.rows: tuple[BoardRow, ...] = ()

    async def read(self) -> Sequence[Any]:
        return [SimpleNamespace(board=self.rows)]


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board()
    loads.read_from(board.read)
    yield board
    loads.read_from(None)


def text_of(answer: Any) -> str:
    return str(answer.content.decode())


def test_everybody_of_the_tenant_sees_its_own_requests_and_no_others(transactional_db: None, board: Board) -> None:
    tenant = services.create_tenant(actor="tests", slug="aurora", name="Aurora")
    mine, foreign, line = name(), name(9), str(uuid.uuid5(uuid.NAMESPACE_URL, "line"))
    board.rows = (
        row(mine, str(tenant.id), INTERACTIVE, state="on_host", num_output_tokens=41),
        row(foreign, "nova"),
        row(line, str(tenant.id), BATCH),
    )
    for role in Role:
        client = person(tenant, role)
        page = text_of(client.get("/console/aurora/live"))
        assert mine in page
        assert "paused, copied to the host" in page
        assert foreign not in page
        assert (f'id="c-{mine}"' in page) is may(role, Capability.USE_PLAYGROUND)
        assert f'id="c-{line}"' not in page  # it ends with its batch
        cancelled = client.post(f"/console/aurora/live/{mine}/cancel")
        assert cancelled.status_code == (302 if may(role, Capability.USE_PLAYGROUND) else 403)


def test_without_workers_the_page_says_that_it_cannot_know(transactional_db: None) -> None:
    client = person(services.create_tenant(actor="tests", slug="aurora", name="Aurora"), Role.AUDITOR)
    assert "hears no worker" in text_of(client.get("/console/aurora/live"))


def test_nothing_under_way_is_said_and_the_fragment_asks_on(transactional_db: None, board: Board) -> None:
    client = person(services.create_tenant(actor="tests", slug="aurora", name="Aurora"), Role.AUDITOR)
    fragment = text_of(client.get("/console/aurora/live", headers={"HX-Request": "true"}))
    assert "Nothing of yours" in fragment
    assert "hx-trigger" in fragment
    assert "<html" not in fragment


def test_a_long_list_is_cut_and_says_how_long_it_is(
    transactional_db: None, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.console.pages.live.SHOWN", 2)
    tenant = services.create_tenant(actor="tests", slug="aurora", name="Aurora")
    board.rows = tuple(row(name(age_s), str(tenant.id)) for age_s in range(3))
    assert "The oldest 2 of 3." in text_of(person(tenant, Role.AUDITOR).get("/console/aurora/live"))


def test_rows_stand_by_class_and_age_and_choices_of_one_response_are_one() -> None:
    old, new, chat = name(30), name(5), name(1)
    rows = (row(new, "a"), row(old, "a"), row(chat, "a", INTERACTIVE), row(new, "a", num_output_tokens=6))
    found = under_way("a", [SimpleNamespace(board=rows)], (), NOW_S)
    assert [(str(one.response_id), one.age_s, one.num_tokens) for one in found] == [
        (chat, 1, 4),
        (old, 30, 4),
        (new, 5, 10),
    ]


async def test_what_waits_behind_the_gateway_is_seen_and_cancelled(world: Any) -> None:
    world.worker.script.prompt_first = True
    client = world.client()
    asking = asyncio.create_task(
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    )
    await world.until(lambda: bool(world.worker.submits))
    runtime = world.runtime
    (one,) = under_way("aurora", (), runtime.streams, NOW_S)
    assert (one.state, one.num_tokens) == ("waiting", 0)
    assert under_way("bulk", (), runtime.streams, NOW_S) == []

    assert await stop(runtime, str(one.response_id))
    await asyncio.wait([asking])
    assert [cancel.reason for _, cancel in world.worker.cancels] == ["client"]
    await world.until(lambda: world.slots_in_use() == 0)
    assert not await stop(runtime, str(one.response_id))
    assert not await stop(runtime, str(uuid.uuid4()))


async def test_what_another_gateway_reads_is_cancelled_in_its_worker(world: Any) -> None:
    world.worker.script.prompt_first = True
    asking = asyncio.create_task(
        world.client().chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    )
    await world.until(lambda: bool(world.worker.submits))
    (stream,) = world.runtime.streams
    other = world.new_runtime("gateway-2")
    await other.start()
    try:
        assert await stop(other, stream.response_id)
        await asyncio.wait([asking])
    finally:
        await other.stop()
    assert [cancel.reason for _, cancel in world.worker.cancels] == ["client"]


def test_the_first_page_names_the_model_that_is_served_and_asks_for_no_class(transactional_db: None) -> None:
    """A class that the tenant is not granted would make of its first call a refusal."""

    async def one_worker() -> Sequence[Any]:
        return [SimpleNamespace(model=MODEL)]

    client = person(services.create_tenant(actor="tests", slug="aurora", name="Aurora"), Role.DEVELOPER)
    loads.read_from(one_worker)
    try:
        page = text_of(client.get("/console/aurora/"))
    finally:
        loads.read_from(None)
    for call in (f'"model": "{MODEL}"', f'model="{MODEL}"', f'model: "{MODEL}"'):
        assert call in page
    assert "service_tier" not in page
    assert '"MODEL"' in text_of(client.get("/console/aurora/"))
