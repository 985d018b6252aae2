"""Chats through the official client, and streams by hand."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

from scheduler_engine.policy import PriorityClass, TenantClassPolicy

MODEL = "simulated"
HI: list[Any] = [{"role": "user", "content": "Hi"}]


def cell(tenant: str, priority_class: PriorityClass = PriorityClass.DEFAULT, **limits: Any) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id=tenant, priority_class=priority_class, **limits)


async def ask(world: Any, tenant: str = "aurora", **changes: Any) -> Any:
    request = {"model": MODEL, "messages": HI, **changes}
    return await world.client(tenant).chat.completions.create(**request)


async def read(stream: Any, texts: list[str]) -> None:
    """All the text of a stream, as it comes."""
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "")


async def raw_stream(
    world: Any, body: dict[str, Any], headers: dict[str, str] | None = None, *, receive_buffer: int | None = None
) -> Reader:
    """A request by hand, so that a test holds the socket; ``receive_buffer`` in bytes, else the kernel's to grow."""
    host, port = world.base_url.removeprefix("http://").split(":")
    connection = socket.socket()
    connection.setblocking(False)
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=connection)
    payload = json.dumps({"model": MODEL, "messages": HI, "stream": True, **body}).encode()
    lines = {
        "host": host,
        "content-type": "application/json",
        "content-length": str(len(payload)),
        "authorization": f"Bearer {world.keys['aurora']}",
        **(headers or {}),
    }
    head = "POST /v1/chat/completions HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    writer.write(head.encode() + b"\r\n" + payload)
    return Reader(reader, writer)


class Reader:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def until(self, mark: bytes) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(mark), 5)

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()
