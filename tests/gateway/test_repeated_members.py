"""A member that stands twice in one JSON object: the last one counts, at every door alike, and each must be right."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from gateway.batches.endpoints import check, read_line
from gateway.errors import InvalidRequest
from tests.gateway.socket_client import read, socket

DOORS = {
    "/v1/chat/completions": b'"model":"simulated","messages":[{"role":"user","content":"Hi"}],',
    "/v1/completions": b'"model":"simulated","prompt":"Hi",',
    "/v1/responses": b'"model":"simulated","input":"Hi",',
}
LIMIT = {"/v1/responses": b"max_output_tokens"}


def twice(path: str, first: bytes, last: bytes) -> bytes:
    """A good body whose most tokens stand twice."""
    name = LIMIT.get(path, b"max_tokens")
    return b"{%b%b}" % (DOORS[path], b",".join(b'"%b":%b' % (name, value) for value in (first, last)))


@pytest.mark.parametrize("path", DOORS)
async def test_over_http_the_last_one_counts(world: Any, path: str) -> None:
    headers = {"authorization": f"Bearer {world.keys['aurora']}", "content-type": "application/json"}
    async with httpx2.AsyncClient(base_url=world.base_url, headers=headers) as client:
        assert (await client.post(path, content=twice(path, b"5", b"3"))).status_code == 200
        assert (await client.post(path, content=twice(path, b"0", b"3"))).status_code == 400
    assert [submit.max_tokens for submit in world.worker.submits] == [3]


async def test_in_a_frame_the_last_one_counts(world: Any) -> None:
    async with socket(world) as connection:
        for first, kind in ((b"5", "response.incomplete"), (b"0", "error")):
            frame = twice("/v1/responses", first, b"3").decode()
            await connection.send('{"type":"response.create",' + frame[1:])
            assert (await read(connection))[-1]["type"] == kind
    assert [submit.max_tokens for submit in world.worker.submits] == [3]


@pytest.mark.parametrize("path", DOORS)
def test_in_a_line_of_a_batch_the_last_one_counts(path: str) -> None:
    line = b'{"custom_id":"a","custom_id":"b","method":"POST","url":"%b","body":{},"body":%b}'
    read_twice = read_line(line % (path.encode(), twice(path, b"5", b"3")))
    assert (read_twice.custom_id, check(path, read_twice).max_tokens) == ("b", 3)
    with pytest.raises(InvalidRequest):
        check(path, read_line(line % (path.encode(), twice(path, b"0", b"3"))))
