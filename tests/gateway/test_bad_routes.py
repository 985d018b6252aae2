"""Wrong paths, methods, queries and keys, and errors of our own: each is answered in the OpenAI error shape."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from tenants import api_keys
from tests.gateway.bad_requests import CHAT, MODEL, assert_refused, body, send


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", CHAT),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("POST", "/v1/responses/resp_x/cancel"),
        ("DELETE", "/v1/responses/resp_x"),
        ("POST", "/v1/files"),
        ("GET", "/v1/files/file-x"),
        ("GET", "/v1/files/file-x/content"),
        ("POST", "/v1/batches"),
        ("POST", "/v1/batches/batch_x/cancel"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("GET", "/v1/responses/resp_x"),
        ("GET", "/v1/responses/resp_x/input_items"),
    ],
)
async def test_a_query_that_means_nothing_is_refused_by_name_everywhere(world: Any, method: str, path: str) -> None:
    refused = await send(world, b"" if method == "GET" else body(), method=method, path=f"{path}?colour=red")
    assert_refused(world, refused, 400, "unknown_parameter", "colour")


@pytest.mark.parametrize("query", ["stream=true&stream=true", "stream=true&starting_after=1&starting_after=2"])
async def test_a_parameter_of_a_query_that_comes_twice_is_refused(world: Any, query: str) -> None:
    refused = await send(world, b"", method="GET", path=f"/v1/responses/resp_x?{query}")
    assert_refused(world, refused, 400, "invalid_value", query.rpartition("&")[2].partition("=")[0])


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer nonsense",
        f"Bearer {api_keys.make('test').text}",
        f"Bearer {api_keys.make('test').text[:-1]}",
        "Basic YTpi",
    ],
    ids=["none", "empty", "malformed", "unknown", "cut", "basic"],
)
async def test_no_wrong_or_malformed_key_is_401(world: Any, authorization: str) -> None:
    assert_refused(world, await send(world, body(), authorization=authorization), 401, "invalid_api_key")


async def test_a_revoked_key_is_401(world: Any) -> None:
    world.shelf.stored.clear()
    assert_refused(world, await send(world, body()), 401, "invalid_api_key")


async def test_a_key_in_the_query_string_is_401_and_never_echoed(world: Any) -> None:
    response = await send(world, body(), path=f"{CHAT}?api_key={world.keys['aurora']}", authorization="")
    assert_refused(world, response, 401, "invalid_api_key")
    assert world.keys["aurora"] not in response.text


async def test_a_request_id_of_the_caller_is_not_reflected(world: Any) -> None:
    response = await send(world, b"", x_request_id="<script>")
    assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    "path",
    [
        *("/v1", "/v1/", "/v1/chat/completions/", "/v1/embeddings", "/v1/models/a/../b", "/v1/%00"),
        *("/V1/models", "/v1//models", "/v1/responses/a/b", "/v1/models/"),
    ],
)
async def test_a_path_that_is_not_there_is_404_in_the_error_shape(world: Any, path: str) -> None:
    response = await send(world, body(), path=path)
    assert response.status_code in (404, 405)
    assert_refused(world, response, response.status_code, response.json()["error"]["code"], None)


async def test_two_slashes_in_front_are_404_in_the_error_shape_and_no_page_of_django(world: Any) -> None:
    async with httpx2.AsyncClient() as client:
        assert_refused(world, await client.get(f"{world.base_url}//v1/models"), 404, "route_not_found")


@pytest.mark.parametrize(("method", "path"), [("GET", CHAT), ("DELETE", CHAT), ("POST", "/v1/models"), ("PUT", CHAT)])
async def test_another_method_is_405_and_names_the_right_one(world: Any, method: str, path: str) -> None:
    response = await send(world, body(), method=method, path=path)
    assert_refused(world, response, 405, "method_not_allowed")
    assert response.headers["allow"] in ("GET", "POST")


async def test_bad_input_makes_no_log_noise(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    for content in (b"", b"{", body(max_tokens=0), body(model="gpt-9")):
        await send(world, content)
    assert [record for record in caplog.records if not record.name.startswith(("httpx2", "uvicorn"))] == []


async def test_an_error_of_our_own_is_500_in_the_error_shape_with_an_id_to_quote(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(world.runtime.keys, "authenticate", broken)
    response = await send(world, body())
    assert response.json()["error"]["code"] == "internal_error"
    assert response.headers["x-request-id"] in response.json()["error"]["message"]
    assert response.status_code == 500
