"""Every bad input gets the right status and the OpenAI error object, costs nothing and leaves no slot and no record."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from gateway import v1
from tenants import api_keys

MODEL = "simulated"
HI = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


def body(**changes: Any) -> bytes:
    request = {"model": MODEL, "messages": HI, **changes}
    return json.dumps({name: value for name, value in request.items() if value is not ...}).encode()


async def send(
    world: Any, content: bytes, *, method: str = "POST", path: str = CHAT, **headers: str
) -> httpx2.Response:
    own = {"authorization": f"Bearer {world.keys['aurora']}", "content-type": "application/json"}
    sent = {name.replace("_", "-"): value for name, value in {**own, **headers}.items() if value}
    async with httpx2.AsyncClient(base_url=world.base_url) as client:
        return await client.request(method, path, content=content, headers=sent)


def assert_refused(world: Any, response: httpx2.Response, status: int, code: str, param: str | None = None) -> None:
    """The right answer, and nothing left behind."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req_")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert world.worker.submits == []
    assert world.usage_messages() == []
    assert not [key for key in world.redis.scan_iter(f"{world.redis_keys.prefix}*") if _is_a_trace(key)]


def _is_a_trace(key: bytes) -> bool:
    return any(kind in key for kind in (b"lease:", b"limit:", b"money:", b"response:"))


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"model": ...}, "missing_required_parameter", "model"),
        ({"messages": ...}, "missing_required_parameter", "messages"),
        ({"model": 5}, "invalid_type", "model"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "Hi"}, "invalid_type", "messages"),
        ({"messages": ["Hi"]}, "invalid_type", "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "unknown_parameter", "messages[0].colour"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": "x"}]}]},
            "invalid_value",
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "unsupported_parameter",
            "messages[0].tool_calls",
        ),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"max_tokens": 10**9}, "context_length_exceeded", "max_tokens"),
        ({"max_completion_tokens": 10**9}, "context_length_exceeded", "max_completion_tokens"),
        ({"max_tokens": 10**30}, "invalid_value", "max_tokens"),
        ({"max_tokens": True}, "invalid_type", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"max_tokens": "7"}, "invalid_type", "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "invalid_value", "max_tokens"),
        ({"min_tokens": 9, "max_tokens": 5}, "invalid_value", "min_tokens"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"top_p": -0.1}, "invalid_value", "top_p"),
        ({"presence_penalty": 3}, "invalid_value", "presence_penalty"),
        ({"seed": 2**70}, "invalid_value", "seed"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "invalid_value", "stop"),
        ({"stop": "x" * 257}, "invalid_value", "stop"),
        ({"stop": ["a", "é" * 129]}, "invalid_value", "stop"),
        ({"stop": [1]}, "invalid_type", "stop[0]"),
        ({"logit_bias": {"x": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"999999": 1}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "invalid_value", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "invalid_value", "logit_bias[...]"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 17}, "invalid_value", "n"),
        ({"n": True}, "invalid_type", "n"),
        ({"logprobs": 1}, "invalid_type", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 1}, "invalid_value", "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "unsupported_parameter", "tools"),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "colour": 1}}},
            "unknown_parameter",
            "response_format.json_schema.colour",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
            "invalid_value",
            "response_format.json_schema",
        ),
        ({"stream": "yes"}, "invalid_type", "stream"),
        ({"stream_options": {"include_usage": True}}, "invalid_value", "stream_options"),
        ({"stream": True, "stream_options": {"colour": 1}}, "unknown_parameter", "stream_options.colour"),
        ({"service_tier": "gold"}, "invalid_value", "service_tier"),
        ({"deadline_ms": 0}, "invalid_value", "deadline_ms"),
        ({"deadline_ms": -5}, "invalid_value", "deadline_ms"),
        ({"completion_deadline_ms": 0}, "invalid_value", "completion_deadline_ms"),
        ({"max_queue_wait_ms": 0}, "invalid_value", "max_queue_wait_ms"),
        ({"colour": "blue"}, "unknown_parameter", "colour"),
    ],
    ids=lambda value: json.dumps(value, default=lambda _: "absent")[:70] if isinstance(value, dict) else None,
)
async def test_a_bad_field_is_named(world: Any, changes: dict[str, Any], code: str, param: str) -> None:
    assert_refused(world, await send(world, body(**changes)), 400, code, param)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"  ",
        b"[]",
        b'"Hi"',
        b"null",
        b"{",
        body() + b"x",
        body(temperature=...)[:-1] + b',"temperature":NaN}',
        body()[:-1] + b',"temperature":Infinity}',
        b'{"model":"\xff"}',
        b'{"messages":' + b"[" * 100_000,
        body()[:-1] + b',"tools":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    ],
    ids=[
        *("empty", "blank", "array", "string", "null", "cut", "trailing", "NaN", "Infinity"),
        *("not UTF-8", "deep and cut", "deep"),
    ],
)
async def test_a_body_that_is_no_json_object_is_400(world: Any, content: bytes) -> None:
    response = await send(world, content)
    assert response.status_code == 400
    assert_refused(world, response, 400, response.json()["error"]["code"], response.json()["error"]["param"])


async def received_without_a_whole_body(world: Any, key: str) -> list[dict[str, Any]]:
    """What is sent when the server says ``http.disconnect`` amid the body, as it does for bad chunks."""
    messages = iter([{"type": "http.request", "body": b'{"mod', "more_body": True}, {"type": "http.disconnect"}])
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return next(messages)

    async def keep(message: Any) -> None:
        sent.append(message)

    headers = [(b"authorization", f"Bearer {key}".encode()), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": headers}
    await v1.application(world.runtime, scope, receive, keep)
    return sent


async def test_a_body_that_breaks_off_is_400_in_the_error_shape(world: Any) -> None:
    start, end = await received_without_a_whole_body(world, world.keys["aurora"])
    assert start["status"] == 400
    assert json.loads(end["body"])["error"]["code"] == "invalid_request"
    assert world.worker.submits == []


async def test_a_broken_body_does_not_hide_an_earlier_refusal(world: Any) -> None:
    start, *parts = await received_without_a_whole_body(world, "nonsense")
    assert start["status"] == 401
    assert json.loads(b"".join(part["body"] for part in parts))["error"]["code"] == "invalid_api_key"


async def test_four_stop_strings_of_the_greatest_length_are_taken(world: Any) -> None:
    response = await send(world, body(stop=["é" * 128, "b" * 256, "c", "d"]))
    assert response.status_code == 200


@pytest.mark.parametrize("tier", ["gold", "x" * 10_000])
async def test_an_unknown_tier_is_told_the_ones_there_are(world: Any, tier: str) -> None:  # P39
    response = await send(world, body(service_tier=tier))
    assert_refused(world, response, 400, "invalid_value", "service_tier")
    message = response.json()["error"]["message"]
    assert message == "Invalid 'service_tier': Must be one of auto, default, flex, priority, fast."


async def test_a_very_long_model_name_is_not_echoed_whole(world: Any) -> None:
    name = "m" * 5_000
    asked = await send(world, body(model=name))
    assert_refused(world, asked, 400, "invalid_value", "model")
    fetched = await send(world, b"", method="GET", path=f"/v1/models/{name}")
    assert_refused(world, fetched, 404, "model_not_found", "model")
    assert "m" * 201 not in asked.text + fetched.text


@pytest.mark.parametrize("size", [1_048_577, 10_000_000])
async def test_a_body_over_the_limit_is_413(world: Any, size: int) -> None:
    content = body(messages=[{"role": "user", "content": "x" * size}])
    assert_refused(world, await send(world, content), 413, "request_too_large")


async def test_a_body_over_the_limit_that_does_not_announce_its_size_is_413_too(world: Any) -> None:
    async def pieces() -> Any:
        for _ in range(40):
            yield b"x" * 65_536

    headers = {"authorization": f"Bearer {world.keys['aurora']}", "content-type": "application/json"}
    async with httpx2.AsyncClient(base_url=world.base_url) as client:
        response = await client.post(CHAT, content=pieces(), headers=headers)
    assert_refused(world, response, 413, "request_too_large")


@pytest.mark.parametrize("expects", [b"", b"expect: 100-continue\r\n"])
@pytest.mark.parametrize("size", [1_048_577, 99_999_999])
async def test_a_body_that_is_announced_too_large_is_413_at_once_and_before_it_is_sent(
    world: Any, size: int, expects: bytes
) -> None:
    host, port = world.base_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    key, length = world.keys["aurora"].encode(), str(size).encode()
    head = b"POST " + CHAT.encode() + b" HTTP/1.1\r\nhost: x\r\nauthorization: Bearer " + key + b"\r\n"
    writer.write(head + b"content-type: application/json\r\ncontent-length: " + length + b"\r\n" + expects + b"\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 2.0)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"request_too_large" in answer
    writer.close()


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
    "headers", [{"content_type": "text/plain"}, {"content_type": "multipart/form-data"}, {"content_encoding": "gzip"}]
)
async def test_another_media_type_is_415(world: Any, headers: dict[str, str]) -> None:
    assert_refused(world, await send(world, body(), **headers), 415, "unsupported_media_type")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_over_the_context_is_400(world: Any, stream: bool) -> None:
    world.worker.max_model_len = 64
    while world.runtime.loads[0].max_model_len != 64:
        world.runtime.loads = await world.runtime.bus.loads()
    content = body(messages=[{"role": "user", "content": "x" * 64}], stream=stream)
    assert_refused(world, await send(world, content), 400, "context_length_exceeded", "messages")


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


async def test_an_unknown_model_is_404(world: Any) -> None:
    assert_refused(world, await send(world, body(model="gpt-9")), 404, "model_not_found", "model")


async def test_a_tenant_without_any_class_sees_no_model(world: Any) -> None:
    authorization = f"Bearer {world.keys['stranger']}"
    assert_refused(world, await send(world, body(), authorization=authorization), 404, "model_not_found", "model")


@pytest.mark.parametrize("tier", ["priority", "fast"])
async def test_a_class_the_tenant_may_not_use_is_403_and_no_use_to_repeat(world: Any, tier: str) -> None:  # P39
    authorization = f"Bearer {world.keys['bulk']}"
    response = await send(world, body(service_tier=tier), authorization=authorization)
    assert_refused(world, response, 403, "service_tier_not_granted", "service_tier")
    assert response.headers["x-should-retry"] == "false"


async def test_what_its_limit_can_never_hold_is_429_and_no_use_to_repeat(world: Any) -> None:
    response = await send(world, body(max_tokens=6_000), authorization=f"Bearer {world.keys['nova']}")
    assert_refused(world, response, 429, "rate_limit_exceeded")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


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


@pytest.mark.parametrize(
    "changes",
    [
        {"c" * 5_000: 1},
        {"messages": [{"role": "w" * 5_000, "content": "x"}]},
        {"messages": [{"role": "user", "content": "x", "c" * 5_000: 1}]},
        {"service_tier": "t" * 5_000},
    ],
    ids=["unknown field", "role", "unknown field of a message", "tier"],
)
async def test_what_a_caller_wrote_is_quoted_back_only_so_far(world: Any, changes: dict[str, Any]) -> None:
    response = await send(world, body(**changes))
    assert response.status_code == 400
    assert len(response.content) < 1_000


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


async def test_the_model_list_shows_context_length_and_the_tiers_this_key_may_use(world: Any) -> None:
    (model,) = [model async for model in world.client("bulk").models.list()]
    assert (model.id, model.object) == (MODEL, "model")
    assert (model.context_length, model.service_tiers) == (32_768, ["default", "flex"])
    assert (await world.client().models.retrieve(MODEL)).id == MODEL


async def test_a_model_that_is_not_granted_is_answered_like_one_that_is_not_there(world: Any) -> None:
    answers = []
    for tenant, model in (("stranger", MODEL), ("aurora", "gpt-9")):
        response = await send(
            world, b"", method="GET", path=f"/v1/models/{model}", authorization=f"Bearer {world.keys[tenant]}"
        )
        assert_refused(world, response, 404, "model_not_found", "model")
        answers.append(response.text.replace(model, "MODEL"))
    assert answers[0] == answers[1]
    assert [model async for model in world.client("stranger").models.list()] == []
