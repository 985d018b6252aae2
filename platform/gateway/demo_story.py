"""The demo's story, told through the official client: chats alone, then the same chats through a batch flood.

Knows what any program knows (a base URL, keys) and the workers' LoadSnapshots; refuses to know how the platform
was started.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI

from scheduler_engine.policy import PriorityClass
from wire.messages import LoadSnapshot

_WORDS = """
river stone light house garden paper water morning road hand story ship table bread music window tree summer letter
market bird cloud bridge town field night winter rain voice glass school door train island coat city
"""
WORDS = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class StoryShape:
    """How large the story is. Prompt lengths are in tokens after the chat template."""

    chat_prompt_tokens: int = 96
    chat_output_tokens: int = 32
    num_chats: int = 5
    batch_prompt_tokens: int = 256
    batch_output_tokens: int = 64
    num_batch: int = 96
    num_batch_alone: int = 48
    chat_gap_s: float = 1.0
    fill_limit_s: float = 120.0
    progress_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """What the story needs of the outside. ``count`` gives the prompt length of one user message, in tokens."""

    base_url: str
    model: str
    chat_key: str
    batch_key: str
    count: Callable[[str], int]
    loads: Callable[[], Awaitable[Sequence[LoadSnapshot]]]
    say: Callable[[str], None]


@dataclass(slots=True)
class StoryResult:
    """The figures of the last JSON line, but for the reconciliation, which is not the client's to know."""

    idle_ttft_ms: list[int] = field(default_factory=list)
    flooded_ttft_ms: list[int] = field(default_factory=list)
    websocket_ttft_ms: int | None = None
    batch_requests: int = 0
    batch_completed: int = 0
    batch_tokens_per_s: float = 0.0
    batch_alone_tokens_per_s: float = 0.0
    blocks_used_percent_max: int = 0
    calib_us: dict[str, int] = field(default_factory=dict)
    preemptions: dict[str, int] = field(default_factory=dict)

    @property
    def ratio_p50(self) -> float:
        """Median flooded over median idle time to the first token."""
        return round(statistics.median(self.flooded_ttft_ms) / statistics.median(self.idle_ttft_ms), 3)

    @property
    def worst_ratio(self) -> float:
        """Worst flooded time to the first token over the idle median."""
        return round(max(self.flooded_ttft_ms) / statistics.median(self.idle_ttft_ms), 3)


class Story:
    """Runs the phases in order. Always: every request it started has ended when ``run`` returns."""

    def __init__(self, client: Client, shape: StoryShape) -> None:
        self._client = client
        self._shape = shape
        self._chats = AsyncOpenAI(base_url=client.base_url, api_key=client.chat_key, max_retries=0)
        self._batch = AsyncOpenAI(base_url=client.base_url, api_key=client.batch_key, max_retries=0)
        self._seed = 0
        self.result = StoryResult()

    async def run(self) -> StoryResult:
        """The batch alone comes first: a class counts as active for 60 s after its last request, and the batch alone
        shall have its best step budget.
        """
        async with self._chats, self._batch:
            self._client.say("warming up; the whole story takes about four minutes on two cores")
            await self._batch_request(self._prompt(self._shape.batch_prompt_tokens))
            await self._flood_alone()
            await self._idle_chats("before the flood")
            await self._flood_with_chats()
            await self._idle_chats("after the flood")
        return self.result

    async def _flood_alone(self) -> None:
        number = self._shape.num_batch_alone
        self._client.say(f"batch alone: {number} requests")
        self.result.calib_us["batch_alone"] = calibrate_us()
        completed, rate = await self._flood(number)
        self._client.say(f"batch alone: {completed} of {number} done, {rate} output tokens/s")
        self.result.batch_alone_tokens_per_s = rate

    async def _idle_chats(self, when: str) -> None:
        self.result.calib_us[f"idle {when}"] = calibrate_us()
        for _ in range(self._shape.num_chats):
            ttft_ms = await self._chat()
            self.result.idle_ttft_ms.append(ttft_ms)
            self._client.say(f"idle chat {when}: first token after {ttft_ms} ms")

    async def _flood_with_chats(self) -> None:
        before = await self._preemptions()
        number = self._shape.num_batch
        self._client.say(f"flood: {number} batch requests of {self._shape.batch_prompt_tokens} prompt tokens")
        flood = asyncio.create_task(self._flood(number))
        try:
            await self._until_pool_is_full(flood)
            self.result.calib_us["flooded"] = calibrate_us()
            for _ in range(self._shape.num_chats):
                await self._flooded_chat("chat", self._chat)
            self.result.websocket_ttft_ms = await self._flooded_chat("websocket chat", self._websocket_chat)
            if flood.done():
                raise StoryError("the flood ended before the last chat was answered: make the flood larger")
        except BaseException:
            flood.cancel()
            raise
        completed, rate = await flood
        self.result.batch_requests = number
        self.result.batch_completed = completed
        self.result.batch_tokens_per_s = rate
        after = await self._preemptions()
        self.result.preemptions = {lever: after[lever] - before.get(lever, 0) for lever in sorted(after)}
        self._client.say(f"flood: {completed} of {number} done, {rate} output tokens/s")

    async def _flooded_chat(self, what: str, chat: Callable[[], Awaitable[int]]) -> int:
        ttft_ms = await chat()
        self.result.flooded_ttft_ms.append(ttft_ms)
        self._client.say(f"{what} through the flood: first token after {ttft_ms} ms   {await self._board()}")
        await asyncio.sleep(self._shape.chat_gap_s)
        return ttft_ms

    async def _until_pool_is_full(self, flood: asyncio.Task[tuple[int, float]]) -> None:
        """Chats start once it is full, or after ``fill_limit_s`` (the figures tell how full it was)."""
        started = time.monotonic()
        while not flood.done() and time.monotonic() - started < self._shape.fill_limit_s:
            if any(_is_full(load) for load in await self._client.loads()):
                break
            await asyncio.sleep(0.1)
        self._client.say(f"the pool after {time.monotonic() - started:.0f} s of flood: {await self._board()}")

    async def _flood(self, number: int) -> tuple[int, float]:
        """Completed requests and output tokens per second, from the first submit to the last end."""
        prompts = [self._prompt(self._shape.batch_prompt_tokens) for _ in range(number)]  # seconds of our own CPU
        started = time.monotonic()
        requests = [asyncio.ensure_future(self._batch_request(prompt)) for prompt in prompts]
        progress = asyncio.create_task(self._tell_progress(requests))
        try:
            outcomes = await asyncio.gather(*requests, return_exceptions=True)
        finally:
            progress.cancel()
        elapsed = time.monotonic() - started
        tokens = [outcome for outcome in outcomes if isinstance(outcome, int)]
        for failure in (outcome for outcome in outcomes if isinstance(outcome, BaseException)):
            self._client.say(f"a batch request failed: {failure}")
        return len(tokens), round(sum(tokens) / elapsed, 2)

    async def _tell_progress(self, requests: Sequence[asyncio.Future[int]]) -> None:
        while True:
            await asyncio.sleep(self._shape.progress_s)
            num_done = sum(request.done() for request in requests)
            self._client.say(f"  {num_done} of {len(requests)} batch requests done   {await self._board()}")

    async def _batch_request(self, prompt: str) -> int:
        output_tokens = self._shape.batch_output_tokens
        completion = await self._batch.chat.completions.create(
            model=self._client.model,
            messages=[{"role": "user", "content": prompt}],
            service_tier="flex",
            temperature=0,
            max_completion_tokens=output_tokens,
            extra_body={"ignore_eos": True, "min_tokens": output_tokens},
        )
        assert completion.usage is not None
        return completion.usage.completion_tokens

    async def _chat(self) -> int:
        output_tokens = self._shape.chat_output_tokens
        prompt = self._prompt(self._shape.chat_prompt_tokens)
        started, first = time.monotonic(), None
        stream = await self._chats.chat.completions.create(
            model=self._client.model,
            messages=[{"role": "user", "content": prompt}],
            service_tier="priority",
            temperature=0,
            max_completion_tokens=output_tokens,
            stream=True,
            extra_body={"ignore_eos": True, "min_tokens": output_tokens},
        )
        async for chunk in stream:
            if first is None and chunk.choices and chunk.choices[0].delta.content:
                first = time.monotonic()
        return _milliseconds(started, first)

    async def _websocket_chat(self) -> int:
        prompt = self._prompt(self._shape.chat_prompt_tokens)
        async with self._chats.responses.connect() as connection:
            started, first = time.monotonic(), None
            await connection.response.create(
                model=self._client.model,
                input=prompt,
                service_tier="priority",
                temperature=0,
                max_output_tokens=self._shape.chat_output_tokens,
            )
            async for event in connection:
                if first is None and event.type == "response.output_text.delta" and event.delta:
                    first = time.monotonic()
                if event.type in ("response.completed", "response.incomplete"):
                    return _milliseconds(started, first)
                if event.type in ("error", "response.failed"):
                    raise StoryError(f"the websocket answered {event.to_json()}")
        raise StoryError("the websocket closed before the response was complete")

    def _prompt(self, tokens: int) -> str:
        """A prompt of exactly ``tokens`` tokens, different at every call and the same in every run."""
        self._seed += 1
        return make_prompt(random.Random(self._seed), tokens, self._client.count)

    async def _preemptions(self) -> dict[str, int]:
        totals: dict[str, int] = {}
        for load in await self._client.loads():
            for lever, _resource, count in (row for c in load.classes for row in c.preemptions):
                totals[lever] = totals.get(lever, 0) + count
        return totals

    async def _board(self) -> str:
        parts = []
        for load in await self._client.loads():
            used = 100 * (load.num_blocks - load.num_free_blocks) // load.num_blocks
            self.result.blocks_used_percent_max = max(self.result.blocks_used_percent_max, used)
            classes = ", ".join(
                f"{c.priority_class.label} {c.num_running} running {c.num_suspended} paused {c.num_waiting} waiting"
                for c in load.classes
                if c.num_running or c.num_suspended or c.num_waiting
            )
            parts.append(f"[{used} % of KV blocks used; {classes or 'idle'}]")
        return " ".join(parts)


class StoryError(Exception):
    """The story could not be told; the sentence says what to change."""


def make_prompt(chance: random.Random, tokens: int, count: Callable[[str], int]) -> str:
    """Common words, exactly ``tokens`` long by ``count``. Raises StoryError when the template alone is longer."""
    text = chance.choice(WORDS)
    if count(text) > tokens:
        raise StoryError(f"a prompt of {tokens} tokens is shorter than the chat template itself")
    while missing := tokens - count(text):
        words = [f" {chance.choice(WORDS)}" for _ in range(max(1, missing // 8))]
        piece = next((p for p in ("".join(words), words[0], " a", "a") if count(text + p) <= tokens), None)
        if piece is None:
            raise StoryError(f"no prompt of exactly {tokens} tokens could be made")
        text += piece
    return text


def _is_full(load: LoadSnapshot) -> bool:
    """Four in five blocks are taken while others wait (cap and headroom of the class leave the rest to higher ones, and
    a request that does not fit whole is not begun), or somebody had to give way.
    """
    batch = [c for c in load.classes if c.priority_class is PriorityClass.BATCH]
    waiting, paused = sum(c.num_waiting for c in batch), sum(c.num_suspended for c in batch)
    return paused > 0 or (waiting > 0 and load.num_free_blocks * 5 <= load.num_blocks)


def calibrate_us() -> int:
    """A fixed Python loop, best of five, in microseconds: tells two speeds of one machine apart."""
    best = 1 << 62
    for _ in range(5):
        started = time.perf_counter_ns()
        total = 0
        for number in range(10_000):
            total += number * number
        best = min(best, time.perf_counter_ns() - started)
    return best // 1_000


def as_json(result: StoryResult, reconcile: Mapping[str, object]) -> dict[str, object]:
    """The last line of the demo."""
    return {
        "idle_ttft_ms": result.idle_ttft_ms,
        "flooded_ttft_ms": result.flooded_ttft_ms,
        "websocket_ttft_ms": result.websocket_ttft_ms,
        "ratio_p50": result.ratio_p50,
        "worst_ratio": result.worst_ratio,
        "batch_requests": result.batch_requests,
        "batch_completed": result.batch_completed,
        "batch_tokens_per_s": result.batch_tokens_per_s,
        "batch_alone_tokens_per_s": result.batch_alone_tokens_per_s,
        "blocks_used_percent_max": result.blocks_used_percent_max,
        "calib_us": result.calib_us,
        "preemptions": result.preemptions,
        "reconcile": dict(reconcile),
    }


def _milliseconds(started: float, first: float | None) -> int:
    if first is None:
        raise StoryError("a chat ended without a visible token")
    return round((first - started) * 1_000)
