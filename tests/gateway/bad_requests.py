"""Requests that must be refused, and what a refusal is: the right answer, no charge, no slot and no record left."""

from __future__ import annotations

import json
from typing import Any

import httpx2

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
