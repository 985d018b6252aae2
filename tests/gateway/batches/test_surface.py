"""Every route of /v1 through the official client, strict about our bodies: sync, async and raw. A new route fails here.

The routes that make something are streamed in test_conformance.py; the websocket is test_responses_socket.py's.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from gateway.v1 import ROUTES
from tests.gateway.batches.conftest import MODEL, Platform, jsonl, request_line

FILES: dict[tuple[str, str], Callable[[Any, dict[str, Any]], Any]] = {
    ("POST", "/v1/files"): lambda api, one: api.files.create(
        file=("in.jsonl", jsonl(request_line("a"))), purpose="batch"
    ),
    ("GET", "/v1/files"): lambda api, one: api.files.list(limit=2),
    ("GET", "/v1/files/*"): lambda api, one: api.files.retrieve(one["file"]),
    ("GET", "/v1/files/*/content"): lambda api, one: api.files.content(one["file"]),
    ("POST", "/v1/batches"): lambda api, one: api.batches.create(
        input_file_id=one["file"], endpoint="/v1/chat/completions", completion_window="24h"
    ),
    ("GET", "/v1/batches"): lambda api, one: api.batches.list(limit=2),
    ("GET", "/v1/batches/*"): lambda api, one: api.batches.retrieve(one["batch"]),
    ("POST", "/v1/batches/*/cancel"): lambda api, one: api.batches.cancel(one["batch"]),
    ("DELETE", "/v1/files/*"): lambda api, one: api.files.delete(one["file"]),
    ("GET", "/v1/models"): lambda api, one: api.models.list(),
    ("GET", "/v1/models/**"): lambda api, one: api.models.retrieve(MODEL),
}
ANSWERS: dict[tuple[str, str], Callable[[Any, dict[str, Any]], Any]] = {
    ("POST", "/v1/chat/completions"): lambda api, one: api.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=3
    ),
    ("POST", "/v1/completions"): lambda api, one: api.completions.create(model=MODEL, prompt="Hi", max_tokens=3),
    ("POST", "/v1/responses"): lambda api, one: api.responses.create(model=MODEL, input="Hi", background=True),
    ("GET", "/v1/responses/*"): lambda api, one: api.responses.retrieve(one["response"]),
    ("GET", "/v1/responses/*/input_items"): lambda api, one: api.responses.input_items.list(one["response"]),
    ("POST", "/v1/responses/*/cancel"): lambda api, one: api.responses.cancel(one["response"]),
    ("DELETE", "/v1/responses/*"): lambda api, one: api.responses.delete(one["response"]),
}
KEPT = {"/v1/files": "file", "/v1/batches": "batch", "/v1/responses": "response"}  # ids that later calls name


def test_every_route_is_called() -> None:
    assert {(route.method, route.pattern) for route in ROUTES} == set(FILES) | set(ANSWERS)


def whole(base_url: str, key: str, kind: Any) -> Any:
    return kind(base_url=f"{base_url}/v1", api_key=key, max_retries=0, _strict_response_validation=True)


async def walk(calls: dict[tuple[str, str], Any], client: Any, *, raw: bool) -> None:
    """All of them in their order, each naming what an earlier one made; closes. Raises for a body of another shape."""
    named: dict[str, Any] = {}
    for (method, pattern), call in calls.items():
        answer = await _ask(call, _Raw(client) if raw else client, named)
        if raw:
            assert answer.http_response.status_code == 200
            assert answer.http_response.headers["x-request-id"].startswith("req_")
            answer = answer.parse()
            answer = await answer if inspect.isawaitable(answer) else answer
        if method == "POST" and pattern in KEPT:
            named[KEPT[pattern]] = answer.id
    closing = client.close()
    if inspect.isawaitable(closing):
        await closing


async def _ask(call: Any, client: Any, named: dict[str, Any]) -> Any:
    if isinstance(client, OpenAI) or getattr(client, "is_sync", False):
        return await asyncio.to_thread(call, client, named)
    answer = call(client, named)
    return await answer if inspect.isawaitable(answer) else answer


class _Raw:
    """``api.files.list(…)`` that means ``api.files.with_raw_response.list(…)``, whatever the depth."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.is_sync = isinstance(real, OpenAI)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        return getattr(self._real.with_raw_response, name) if callable(found) else _Raw(found)


@pytest.mark.parametrize("raw", [False, True], ids=["parsed", "raw"])
@pytest.mark.parametrize("kind", [OpenAI, AsyncOpenAI])
def test_files_batches_and_models_are_read_strictly(platform: Platform, kind: Any, raw: bool) -> None:
    asyncio.run(walk(FILES, whole(platform.base_url, platform.keys["aurora"], kind), raw=raw))
