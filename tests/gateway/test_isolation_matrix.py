"""P49. Every route of /v1 that names an object, in every state of a response: to others it is one that never was.

Routes are read from the router: a new one that names an object is in the matrix at once, or fails the last test.
"""

from __future__ import annotations

import uuid
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


def test_every_route_that_names_an_object_is_in_a_matrix() -> None:
    covered = {(method, pattern.replace("{file}", "*").replace("{batch}", "*")) for method, pattern in archive.ROUTES}
    models = {("GET", "/v1/models/**")}  # of the house; a model that is not granted: test_bad_input.py
    assert set(NAMING) - set(OF_RESPONSES) - models - covered == set()
