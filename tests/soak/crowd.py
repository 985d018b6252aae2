"""Clients that keep asking until told to stop, and take every answer: chats, batch requests, and people who leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import httpx2

from tests.end_to_end.running_up import Up

WORDS = ("river", "stone", "light", "house", "garden", "paper", "water", "morning", "road", "hand", "story", "ship")
PAUSE_S = 0.2  # after a refusal or a broken connection


class Crowd:
    """Asks over plain HTTP. Always: ``outcomes`` holds each request once, by how it ended for its client, and ``told``
    the (prompt, output) tokens of every answer that came whole: what the books must say, whoever died meanwhile.
    """

    def __init__(self, platform: Up, seed: int) -> None:
        self._demo = platform.demo
        self._random = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self.told: dict[UUID, tuple[int, int]] = {}

    def body(self, *, words: int, max_tokens: int, **changes: Any) -> dict[str, Any]:
        text = " ".join(self._random.choice(WORDS) for _ in range(words))
        return {
            "model": self._demo["model"],
            "messages": [{"role": "user", "content": text}],
            "max_completion_tokens": max_tokens,
            "ignore_eos": True,
            **({"stream_options": {"include_usage": True}} if changes.get("stream") else {}),
            **changes,
        }

    @asynccontextmanager
    async def client(self, tenant: str) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {"Authorization": f"Bearer {self._demo['keys'][tenant]}"}
        limits = httpx2.Limits(max_connections=None)
        async with httpx2.AsyncClient(
            base_url=self._demo["base_url"], headers=headers, timeout=60, limits=limits
        ) as client:
            yield client

    async def ask(self, client: httpx2.AsyncClient, body: Mapping[str, Any]) -> str:
        """One request to its end, plain or streamed."""
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                content = await answer.aread()
        except httpx2.TimeoutException:
            return "hung"
        except httpx2.TransportError:
            return "broken"
        if answer.status_code != 200:
            return str(answer.status_code)
        last = _last_event(content) if body.get("stream") else json.loads(content)
        if last is None:
            return "cut"
        usage = last["usage"]
        operation = UUID(last["id"].removeprefix("chatcmpl-"))
        self.told[operation] = (usage["prompt_tokens"], usage["completion_tokens"])
        return "served"

    async def ask_and_leave(self, client: httpx2.AsyncClient, body: Mapping[str, Any], after_s: float) -> str:
        """One request whose client hangs up after so long, if it has not been answered by then."""
        try:
            async with asyncio.timeout(after_s):
                return await self.ask(client, body)
        except TimeoutError:
            return "left"

    @asynccontextmanager
    async def busy(self) -> AsyncIterator[None]:
        """Chats, a batch flood and people who leave, for as long as the block lasts."""
        over = asyncio.Event()
        async with self.client("aurora") as aurora, self.client("bulk") as bulk:
            askers = [asyncio.create_task(self._batch(bulk, over)) for _ in range(12)]
            askers += [asyncio.create_task(self._chats(aurora, over)) for _ in range(3)]
            askers += [asyncio.create_task(self._leavers(aurora, over)) for _ in range(2)]
            try:
                yield
            finally:
                over.set()
                await asyncio.gather(*askers)

    async def _batch(self, client: httpx2.AsyncClient, over: asyncio.Event) -> None:
        while not over.is_set():
            await self._note(self.ask(client, self.body(words=120, max_tokens=64, service_tier="flex")))

    async def _chats(self, client: httpx2.AsyncClient, over: asyncio.Event) -> None:
        while not over.is_set():
            await self._note(self.ask(client, self.body(words=40, max_tokens=24, stream=True, service_tier="priority")))

    async def _leavers(self, client: httpx2.AsyncClient, over: asyncio.Event) -> None:
        while not over.is_set():
            body = self.body(words=80, max_tokens=200, stream=True, service_tier="default")
            await self._note(self.ask_and_leave(client, body, self._random.uniform(0.05, 1.0)))

    async def _note(self, asking: Any) -> None:
        outcome = await asking
        self.outcomes[outcome] += 1
        if outcome not in ("served", "left"):
            await asyncio.sleep(PAUSE_S)


def _last_event(content: bytes) -> dict[str, Any] | None:
    """The usage of a stream that came to its end; None of one that was cut short."""
    events = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: ")]
    if not events or events[-1].strip() != b"[DONE]":
        return None
    found: dict[str, Any] = json.loads(events[-2])
    return found
