"""The management API keeps to the schema that it publishes: real answers, and whatever a schema's reader may send.

The soaked half is schemathesis against the real ASGI app on a port, with a real database and an owner's key; FUZZ_S
sets how long it goes on (two minutes).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import pytest
from django.test import Client

from billing import services as billing_services
from gateway import asgi
from tenants.roles import Role
from tests.gateway.conftest import serving
from tests.gateway.management_world import BODIES, PRICES, ROOT, ROUTES, House, as_owner

SECONDS = float(os.environ.get("FUZZ_S", 120))
EXAMPLES = 5  # of one operation in one turn
OBJECTS = {"project": "project_id", "key": "key_id", "member": "member_id", "invite": "invitation_id"}


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> House:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return House("aurora", billing_services.set_prices(actor="tests", prices=PRICES).version)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    found: dict[str, Any] = Client().get(f"{ROOT}/schema").json()
    return found


def operation_of(schema: dict[str, Any], method: str, route: str) -> dict[str, Any]:
    """What the schema says of one of ROUTES, whatever it calls the parts of the path."""

    def plain(path: str) -> list[str]:
        return ["*" if part.startswith("{") else part for part in path.split("/")]

    wanted = plain(f"{ROOT}/{route.split('?')[0]}")
    (found,) = [methods[method.lower()] for path, methods in schema["paths"].items() if plain(path) == wanted]
    return found  # type: ignore[no-any-return]


def told(schema: dict[str, Any], operation: dict[str, Any], status: int, content_type: str) -> Any:
    """The JSON schema of an answer, null read as OpenAPI 3.0 writes it."""
    answers = operation["responses"]
    answer = answers.get(str(status)) or answers[f"{status // 100}XX"]
    shape = answer["content"][content_type]["schema"]
    return _nullable({**shape, "components": schema["components"]})


def _nullable(node: Any) -> Any:
    if isinstance(node, list):
        return [_nullable(one) for one in node]
    if not isinstance(node, dict):
        return node
    found = {name: _nullable(one) for name, one in node.items()}
    return {"anyOf": [found, {"type": "null"}]} if found.pop("nullable", False) else found


def test_every_route_answers_in_the_shape_that_its_schema_tells(house: House, schema: dict[str, Any]) -> None:
    for method, route, _ in sorted(ROUTES, key=lambda one: one[0] == "DELETE"):
        answer = as_owner(house, method, route.format(**house.ids()), BODIES.get((method, route)))
        assert answer.status_code in (200, 201), (method, route, answer.content)
        content_type = answer["Content-Type"].partition(";")[0]
        shape = told(schema, operation_of(schema, method, route), answer.status_code, content_type)
        if content_type == "application/json":
            jsonschema.validate(answer.json(), shape)


def test_a_refusal_has_the_shape_that_every_operation_tells(house: House, schema: dict[str, Any]) -> None:
    for method, route, _ in ROUTES:
        answer = Client().generic(method, f"{ROOT}/{route.format(**house.ids())}")
        jsonschema.validate(answer.json(), told(schema, operation_of(schema, method, route), 401, "application/json"))


@pytest.fixture
def base_url(house: House) -> Iterator[str]:
    """The ASGI app on a loopback port, its loop in a thread of its own."""
    started, over, urls = threading.Event(), asyncio.Event(), []

    async def serve() -> None:
        async with serving(asgi.router) as url:
            urls.append(url)
            started.set()
            await over.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="management API")
    thread.start()
    started.wait(30)
    yield urls[0]
    loop.call_soon_threadsafe(over.set)
    thread.join(30)
    loop.close()


@pytest.mark.soak
def test_what_a_reader_of_the_schema_may_send_is_answered_as_it_says(
    house: House, base_url: str, schema: dict[str, Any]
) -> None:
    import schemathesis
    from hypothesis import HealthCheck, given, seed, settings
    from hypothesis.errors import Unsatisfiable
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks as of_the_schema

    checks: list[Any] = [
        not_a_server_error,
        of_the_schema.status_code_conformance,
        of_the_schema.content_type_conformance,
        of_the_schema.response_headers_conformance,
        of_the_schema.response_schema_conformance,
        of_the_schema.ignored_auth,
    ]
    operations = [one.ok() for one in schemathesis.openapi.from_dict(schema).get_all_operations()]
    headers = {"Authorization": f"Bearer {house.management_key(Role.OWNER)}"}
    ids = house.ids()
    known = {**{name: ids[kind] for kind, name in OBJECTS.items()}, "statement_id": ids["statement"]}
    quiet = settings(
        max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False
    )
    found: dict[tuple[str, str], str] = {}
    num_sent = 0

    def send(case: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        try:
            answer = case.call_and_validate(base_url=base_url, headers=headers, timeout=120, checks=checks)
            assert "text/html" not in str(answer.headers.get("content-type")), case.as_curl_command()
        except (AssertionError, BaseExceptionGroup) as failure:  # schemathesis groups what it finds
            for one in getattr(failure, "exceptions", (failure,)):
                sys.stderr.write(f"found: {type(one).__name__} {case.operation.label}\n")
                found.setdefault((case.operation.label, type(one).__name__), f"{failure}\n{case.as_curl_command()}")

    ends_at_s = time.monotonic() + SECONDS
    for turn in itertools.count():
        for mode, is_known, operation in itertools.product(GenerationMode, (True, False), operations):
            if time.monotonic() > ends_at_s:
                break
            wanted = {parameter.name for parameter in operation.path_parameters}
            fixed = {name: known[name] for name in wanted} if is_known else None

            with suppress(Unsatisfiable):  # an operation that takes nothing cannot be sent something wrong
                seed(turn)(quiet(given(operation.as_strategy(mode, path_parameters=fixed))(send)))()
        else:
            continue
        break
    sys.stderr.write(f"\n{num_sent} requests to {len(operations)} operations in {turn + 1} turns\n")
    assert num_sent > len(operations)
    assert not found, "\n\n".join(f"{place}: {words}" for place, words in sorted(found.items()))
