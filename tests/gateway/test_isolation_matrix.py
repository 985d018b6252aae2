"""P49. Every route of /v1 that names an object, in every state of a response: to others it is one that never was.

Routes are read from the router: a new one that names an object is in the matrix at once, or fails the last test. That
it takes no longer to say so follows from what is done for it: the same questions to Redis, none of which finds anything
(questions to PostgreSQL: test_isolation_effort.py). The soaked half looks at a clock.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2
import pytest

from gateway.v1 import ROUTES
from tests.gateway.batches import test_isolation as archive

MODEL = "simulated"
NAMING = [(route.method, route.pattern) for route in ROUTES if "*" in route.pattern]
OF_RESPONSES = [(method, pattern) for method, pattern in NAMING if pattern.startswith("/v1/responses/")]
QUERIES = ("", "?stream=true", "?stream=true&starting_after=0")
STATES = ("queued", "in_progress", "completed", "cancelled", "deleted")


async def response_in(world: Any, state: str) -> str:
    """A response of Aurora's in that state."""
    client = world.client()
    world.worker.script.prompt_first = state == "queued"
    world.worker.script.answer = b"x" * (10 if state == "completed" else 2_000)
    world.worker.step_s = 0.002 if state == "completed" else 0.02
    made = await client.responses.create(model=MODEL, input="Hi", background=True, max_output_tokens=2_000)
    response_id: str = made.id.removeprefix("resp_")
    if state == "in_progress":
        await world.until(lambda: world.worker.generated.get(response_id, 0) > 2)
    if state == "completed":
        await world.until(lambda: world.slots_in_use() == 0)
    if state == "cancelled":
        await client.responses.cancel(made.id)
    if state == "deleted":
        await client.responses.delete(made.id)
    name: str = made.id
    return name


def plain(answer: httpx2.Response) -> tuple[int, str, set[str]]:
    """All that an onlooker can tell two answers apart by, but for ids and times of their own."""
    return answer.status_code, answer.text, set(answer.headers)


@pytest.mark.parametrize("state", STATES)
async def test_a_response_in_any_state_answers_others_on_every_route_as_one_that_never_was(
    world: Any, state: str
) -> None:
    theirs, none = await response_in(world, state), f"resp_{uuid.uuid4()}"
    for tenant in ("bulk", "nova", "stranger"):
        headers = {"authorization": f"Bearer {world.keys[tenant]}"}
        async with httpx2.AsyncClient(base_url=world.base_url, headers=headers) as client:
            for method, pattern in OF_RESPONSES:
                for query in QUERIES if (method, pattern) == ("GET", "/v1/responses/*") else ("",):
                    found, unknown = [
                        plain(await client.request(method, pattern.replace("*", name) + query))
                        for name in (theirs, none)
                    ]
                    assert found == unknown, (tenant, method, pattern, query)
                    assert found[0] == 404
    if state in ("queued", "in_progress"):
        assert world.worker.cancels == []  # nobody's cancel or delete has reached it
        await world.client().responses.cancel(theirs)


async def questions(world: Any, name: str, ask: Callable[[], Awaitable[Any]]) -> tuple[list[str], set[str]]:
    """What Redis is asked to give of this object, in order, and the keys among it that are there.

    By GET, that is: records, which are hashes, every gateway looks at now and then for reasons of its own.
    """
    response_id = name.removeprefix("resp_")
    with world.redis.monitor() as monitor:
        await ask()
        world.redis.echo(f"asked {name}")
        seen: list[str] = []
        while f"asked {name}" not in (command := monitor.next_command()["command"]):
            seen += [command] if command.startswith("GET ") and response_id in command else []
    words = {word for command in seen for word in command.split() if response_id in word}
    found = {word for word in words if world.redis.exists(word)}
    return [command.replace(response_id, "…") for command in seen], found


@pytest.mark.parametrize("state", STATES)
async def test_for_anothers_response_redis_is_asked_what_it_is_asked_for_none_and_finds_nothing(
    world: Any, state: str
) -> None:
    """So neither its being there nor its length shows in the time that the 404 takes."""
    theirs, none = await response_in(world, state), f"resp_{uuid.uuid4()}"
    headers = {"authorization": f"Bearer {world.keys['stranger']}"}
    async with httpx2.AsyncClient(base_url=world.base_url, headers=headers) as client:
        for method, pattern in OF_RESPONSES:
            looked_for = []
            for name in (theirs, none):
                path = pattern.replace("*", name)
                asked, found = await questions(world, name, lambda path=path: client.request(method, path))  # noqa: B023
                assert asked, path
                assert found == set(), path
                looked_for.append(asked)
            assert looked_for[0] == looked_for[1], (method, pattern)
    if state in ("queued", "in_progress"):
        await world.client().responses.cancel(theirs)


@pytest.mark.soak
async def test_the_clock_does_not_tell_anothers_long_response_from_none(world: Any) -> None:
    """Pairs in random order: the foreign one is the slower of the two about as often as not. (By chance alone a share
    beyond 0.40 to 0.60 of 1,000 pairs comes once in a billion runs.)
    """
    world.worker.script.answer = b"x" * 2_000
    made = await world.client().responses.create(model=MODEL, input="Hi " * 8_000, max_output_tokens=2_000)
    chance, took = random.Random(1), {True: [], False: []}  # type: ignore[var-annotated]
    headers = {"authorization": f"Bearer {world.keys['stranger']}"}
    async with httpx2.AsyncClient(base_url=world.base_url, headers=headers) as client:
        for _ in range(1_000):
            for is_theirs in chance.sample((True, False), 2):
                name = made.id if is_theirs else f"resp_{uuid.uuid4()}"
                began = time.perf_counter()
                assert (await client.get(f"/v1/responses/{name}")).status_code == 404
                took[is_theirs].append(time.perf_counter() - began)
    share = sum(theirs > none for theirs, none in zip(took[True], took[False], strict=True)) / 1_000
    medians = {name: round(1e6 * statistics.median(took[is_theirs])) for name, is_theirs in _NAMES}
    sys.stderr.write(f"median µs {medians}; the foreign one slower in {share:.3f} of the pairs\n")
    assert 0.4 < share < 0.6


_NAMES = (("of another", True), ("of nobody", False))


def test_every_route_that_names_an_object_is_in_a_matrix() -> None:
    covered = {(method, pattern.replace("{file}", "*").replace("{batch}", "*")) for method, pattern in archive.ROUTES}
    models = {("GET", "/v1/models/**")}  # of the house; a model that is not granted: test_models.py
    assert set(NAMING) - set(OF_RESPONSES) - models - covered == set()
