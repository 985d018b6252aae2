"""Texts that no encoding knows, bodies nested without end, other character sets: refused by name, never a failure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.test import Client

from billing import services as billing_services
from gateway.management_api.parsing import MAX_DEPTH
from tenants.roles import Role
from tests.gateway.bad_requests import body, send
from tests.gateway.management_world import PRICES, ROUTES, House, as_owner, call, error, of_owner_and_operator

HALF = "\ud800"
SENDING = [(method, route) for method, route, _ in ROUTES if method == "POST"]
FIELDS = ("name", "default_class", "expires_at", "role", "grace_seconds", "email", "colour")
PAGES = (
    *("/account/login/", "/admin/login/", "/account/password/reset/", "/console/aurora/keys"),
    *("/console/aurora/members", "/console/aurora/batches", "/operator/policy/"),
)


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    return House("aurora", billing_services.set_prices(actor="tests", prices=PRICES).version)


@pytest.mark.parametrize("name", FIELDS)
def test_half_a_surrogate_pair_is_refused_by_its_field_on_every_management_route(house: House, name: str) -> None:
    for method, route in SENDING:
        path = route.format(**house.ids())
        for value, where in (
            (HALF, name),
            (f"a{HALF}b", name),
            ("\udfff\ud800", name),
            ([HALF], name),
            ({"x": [HALF]}, f"{name}.x"),
            ({HALF: 1}, f"{name}.\\ud800"),
        ):
            answer = as_owner(house, method, path, {name: value})
            assert (answer.status_code, error(answer)["param"]) == (400, where), (route, value)
        assert error(as_owner(house, method, path, {name + HALF: 1}))["param"] == f"{name}\\ud800"


def test_a_whole_surrogate_pair_is_a_character(house: House) -> None:
    answer = as_owner(house, "POST", "projects", b'{"name": "\\ud83d\\ude00"}')
    assert (answer.status_code, answer.json()["name"]) == (201, "\N{GRINNING FACE}")


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 100, 900, 5_000, 100_000])
@pytest.mark.parametrize(("opened", "closed"), [("[", "]"), ('{"a":[', "]}")], ids=["lists", "objects"])
def test_a_body_nested_without_end_is_refused_on_every_management_route(
    house: House, depth: int, opened: str, closed: str
) -> None:
    for method, route in SENDING:
        for content in (f'{{"name": {opened * depth}{closed * depth}}}', opened * depth):
            answer = call(house.management_key(Role.OWNER), method, route.format(**house.ids()), content.encode())
            assert answer.status_code == 400, (route, content[:20])
            assert error(answer)["message"]


@pytest.mark.parametrize("charset", ["unicode_escape", "raw_unicode_escape", "utf-7", "utf-16", "latin-1"])
@pytest.mark.parametrize("path", PAGES)
def test_a_form_in_another_character_set_is_400(house: House, path: str, charset: str) -> None:
    names = ("login", "password", "username", "email", "name", "role", "reason", "endpoint", "made_id", "days")
    parts = "".join(f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n\\ud800\r\n' for name in names)
    client = of_owner_and_operator(house)
    kind = f"multipart/form-data; boundary=x; charset={charset}"
    for browser in (client, Client()):
        answer = browser.generic("POST", path, f"{parts}--x--\r\n".encode(), kind)
        assert answer.status_code == 400
        assert b"character set" in answer.content


def test_a_form_in_utf_8_is_read_however_that_is_written(house: House) -> None:
    for charset in ("utf-8", "UTF-8", "utf8"):
        kind = f"multipart/form-data; boundary=x; charset={charset}"
        content = b'--x\r\nContent-Disposition: form-data; name="login"\r\n\r\nann\r\n--x--\r\n'
        assert Client().generic("POST", "/account/login/", content, kind).status_code == 200


@pytest.mark.parametrize("text", ['"\\ud800"', '"\\udc00x"', '{"\\ud800": "a"}', '{"a": ["\\ud800"]}'])
@pytest.mark.parametrize("field", ["user", "model", "metadata", "stop", "service_tier", "tools", "colour"])
async def test_half_a_surrogate_pair_is_no_json_at_the_door(world: Any, field: str, text: str) -> None:
    answer = await send(world, body(**{field: "here"}).replace(b'"here"', text.encode()))
    assert answer.status_code == 400
    assert json.loads(answer.content)["error"]["message"]
