"""One chat completion as a measurement: sent over HTTP, timed by its client. Knows the OpenAI protocol alone."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2

WORDS = (
    *("river", "stone", "light", "house", "garden", "paper", "water", "morning", "road", "hand", "story", "ship"),
    *("table", "bread", "music", "window", "tree", "summer", "letter", "market", "bird", "cloud", "bridge", "town"),
)
LIMIT_S = 600.0
REFUSED_S = 0.2  # a pause after a refusal that is only counted


class ServerRefused(Exception):
    """An answer that is no completion; the text says which."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One answer. Times in seconds from the moment before it was sent; tokens as the server counted them."""

    first_s: float
    total_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What is common to a group of requests. ``extensions`` are fields that not every server knows; ``fields`` go into
    every body as they are.
    """

    model: str
    num_words: int
    output_tokens: int
    tier: str | None
    extensions: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


class Caller:
    """Sends requests with one key. Always: no two prompts of a run are equal, and each run sends the same ones."""

    def __init__(self, client: httpx2.AsyncClient, seed: int = 0) -> None:
        self._client = client
        self._random = random.Random(seed)
        self._number = 0

    def body(self, kind: Kind, *, stream: bool) -> dict[str, Any]:
        self._number += 1
        words = [str(self._number), *(self._random.choice(WORDS) for _ in range(kind.num_words - 1))]
        body: dict[str, Any] = {
            "model": kind.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": kind.output_tokens,
            "temperature": 0,
            **kind.fields,
        }
        if kind.tier is not None:
            body["service_tier"] = kind.tier
        if kind.extensions:
            body |= {"ignore_eos": True, "min_tokens": kind.output_tokens}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    async def plain(self, kind: Kind) -> Timed:
        """Raises ServerRefused."""
        body = self.body(kind, stream=False)
        started = time.perf_counter()
        answer = await self._client.post("/v1/chat/completions", json=body)
        total_s = time.perf_counter() - started
        check_answer(answer.status_code, answer.text)
        usage = answer.json()["usage"]
        return Timed(total_s, total_s, usage["prompt_tokens"], usage["completion_tokens"])

    async def streamed(self, kind: Kind) -> Timed:
        """Raises ServerRefused; the first token is the first text that is not empty."""
        body = self.body(kind, stream=True)
        first_s, usage = None, None
        started = time.perf_counter()
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as answer:
            if answer.status_code != 200:
                check_answer(answer.status_code, (await answer.aread()).decode(errors="replace"))
            async for line in answer.aiter_lines():
                event = _event(line)
                if event is None:
                    continue
                usage = event.get("usage") or usage
                if first_s is None and any(choice["delta"].get("content") for choice in event.get("choices", ())):
                    first_s = time.perf_counter() - started
        total_s = time.perf_counter() - started
        if first_s is None or usage is None:
            raise ServerRefused("a stream ended without text or without its usage")
        return Timed(first_s, total_s, usage["prompt_tokens"], usage["completion_tokens"])


def _event(line: str) -> dict[str, Any] | None:
    body = line.removeprefix("data:").strip()
    if not line.startswith("data:") or body == "[DONE]":
        return None
    event: dict[str, Any] = json.loads(body)
    return event


def check_answer(status: int, text: str) -> None:
    if status != 200:
        raise ServerRefused(f"the server answered {status}: {text[:300]}")


@asynccontextmanager
async def caller(base_url: str, key: str | None, seed: int = 0) -> AsyncIterator[Caller]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=LIMIT_S, limits=limits) as client:
        yield Caller(client, seed)


async def words_for(one: Caller, kind: Kind, prompt_tokens: int) -> int:
    """How many words make a prompt of about that many tokens, from two questions to the server itself."""
    few, many = 16, 80
    counts = []
    for num_words in (few, many):
        probe = replace(kind, num_words=num_words, output_tokens=1)
        counts.append((await one.plain(probe)).prompt_tokens)
    per_word = max(0.1, (counts[1] - counts[0]) / (many - few))
    return max(2, round(few + (prompt_tokens - counts[0]) / per_word))


async def closed_loop(
    one: Caller, kind: Kind, *, num_requests: int, at_once: int, refused: list[str] | None = None
) -> tuple[list[Timed], float]:
    """Plain requests, ``at_once`` always under way; the answers and the seconds from first to last.

    Refusals go to ``refused``, and are waited out; without it, raises ServerRefused for the first.
    """
    answers: list[Timed] = []
    left = iter(range(num_requests))

    async def ask() -> None:
        for _ in left:
            try:
                answers.append(await one.plain(kind))
            except ServerRefused as error:
                if refused is None:
                    raise
                refused.append(str(error))
                await asyncio.sleep(REFUSED_S)

    started = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(at_once)))
    return answers, time.perf_counter() - started


async def open_loop(ask: Callable[[], Awaitable[float]], *, per_s: float, seconds: float) -> tuple[list[float], float]:
    """Asks at fixed moments, whatever has been answered by then; the seconds that each took, and the rate reached.

    ``ask`` answers with its own duration. A machine that cannot send as often says so by the rate.
    """
    started = time.perf_counter()
    tasks = []
    for number in range(round(per_s * seconds)):
        wait_s = started + number / per_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        tasks.append(asyncio.create_task(ask()))
    sent_s = time.perf_counter() - started
    took = await asyncio.gather(*tasks)
    return list(took), len(tasks) / max(sent_s, 1 / per_s)
