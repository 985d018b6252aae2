"""A small world around the door: real Valkey, a worker that does what a test scripts, and the four tenants."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis
import uvicorn
from openai import AsyncOpenAI

from gateway import runtime as gateway_runtime
from gateway.auth import StoredKey
from gateway.runtime import Runtime
from gateway.text import byte_text
from scheduler_engine.policy import PolicySnapshot, PriorityClass, TenantClassPolicy, cpu_classes, snapshot_to_dict
from tenants import api_keys
from tests.loads import quiet_class, quiet_load
from wire.bus import BadEntry, Fenced, FinishedOutput, StepOutput
from wire.messages import (
    GRAMMAR,
    LOGPROBS,
    Attach,
    Cancel,
    ChoiceEnd,
    ChoiceFinished,
    EngineCounters,
    Finished,
    LoadSnapshot,
    Rejected,
    Submit,
    ToGateway,
    TokenLogprob,
    Tokens,
    ToWorker,
    Usage,
)
from wire.redis_bus import RedisGatewayBus, RedisUsageReader, RedisWorkerBus, connect_async, write_policy
from wire.redis_keys import Keys

MODEL = "simulated"
BODY_LIMIT = 1_048_576
AURORA, BULK, NOVA, STRANGER = "aurora", "bulk", "nova", "stranger"
COUNTERS = EngineCounters(queue_us=2_000, total_us=9_000)


def cell(tenant_id: str, priority_class: PriorityClass, **limits: Any) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id=tenant_id, priority_class=priority_class, **limits)


WORLD_QUOTAS = (
    *(cell(AURORA, priority_class) for priority_class in PriorityClass),
    cell(BULK, PriorityClass.DEFAULT),
    cell(BULK, PriorityClass.BATCH),
    cell(NOVA, PriorityClass.DEFAULT, requests_per_minute=60, tokens_per_minute=6_000, concurrency=3),
)


@dataclass(slots=True)
class Script:
    """What the worker does with a Submit."""

    answer: bytes | Sequence[int] = b"Hello, Aurora."
    reason: str = "stop"
    visible_bytes: int | None = None
    reject: tuple[str, int | None] | None = None
    hang: bool = False  # takes the work and never says anything
    tokens_per_step: int = 1
    logprobs: bool = True  # made-up ones, where they are asked for
    prompt_first: bool = False  # stays in prefill until told otherwise
    counters: EngineCounters = COUNTERS


@dataclass(slots=True)
class _Work:
    submit: Submit
    script: Script
    gateway_id: str
    done: int = 0
    sent: int = 0

    @property
    def limit(self) -> int:
        return min(len(self.script.answer), self.submit.max_tokens)

    @property
    def choices(self) -> range:
        return range(self.submit.num_choices)

    def answer_of(self, choice: int) -> Sequence[int]:
        """Siblings say the same, each behind as many marks as its number; the longest is the last to end."""
        return bytes(self.script.answer[: self.limit - choice])


class FakeWorker:
    """Speaks the worker's side of the Bus from a thread of its own, one step per ``step_s``."""

    def __init__(self, url: str, keys: Keys, worker_id: str = "worker-1") -> None:
        self.bus = RedisWorkerBus(url, worker_id, keys=keys)
        self.script = Script()
        self.step_s = 0.0
        self.listen_s = 0.001  # between steps; with a server it lasts until its next tick, up to 100 ms; 0: no wait
        self.step = 0
        self.submits: list[Submit] = []
        self.cancels: list[tuple[int, Cancel]] = []
        self.attaches: list[Attach] = []
        self.generated: dict[str, int] = {}
        self.last_step: dict[str, int] = {}
        self.closed: dict[PriorityClass, int | None] = {}
        self.max_model_len = 32_768
        self.features: tuple[str, ...] = (LOGPROBS, GRAMMAR)
        self.num_cache_tokens = 0
        self.beating = True
        self._restart_asked = threading.Event()
        self._works: dict[str, _Work] = {}
        self._stop = threading.Event()
        self.epoch = self.bus.open()
        self._thread = threading.Thread(target=self._run, name="fake worker")

    def go_on(self) -> None:
        """End every prefill that was held."""
        for work in self._works.values():
            work.script.prompt_first = False

    def answer_to(self, gateway_id: str) -> None:
        """All that is under way goes to this gateway from now on."""
        for work in list(self._works.values()):
            work.gateway_id = gateway_id

    def freeze(self) -> None:
        """No more snapshots and no more tokens, like a process that was stopped."""
        self.beating = False
        for work in self._works.values():
            work.script.hang = True

    def restart(self) -> None:
        """Come back under a new epoch, knowing nothing any more; returns once that is so."""
        self._restart_asked.set()
        while self._restart_asked.is_set():
            time.sleep(0.001)

    def _restart(self) -> None:
        self._works.clear()
        self.epoch = self.bus.open()
        self._restart_asked.clear()

    def start(self) -> None:
        self.bus.publish_load(self.load())
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.bus.close()

    def load(self) -> LoadSnapshot:
        rows = tuple(
            quiet_class(each, closed=each in self.closed, retry_after_us=self.closed.get(each))
            for each in PriorityClass
        )
        return quiet_load(
            worker_id=self.bus.worker_id,
            epoch=self.epoch,
            model=MODEL,
            max_model_len=self.max_model_len,
            step=self.step,
            classes=rows,
            features=self.features,
            num_cache_tokens=self.num_cache_tokens,
        )

    def _run(self) -> None:
        """Until stopped, or declared dead."""
        with contextlib.suppress(Fenced):
            self._serve()

    def _serve(self) -> None:
        beat_at = 0.0
        while not self._stop.is_set():
            if self._restart_asked.is_set():
                self._restart()
            if self.beating and time.monotonic() >= beat_at:
                self.bus.publish_load(self.load())
                beat_at = time.monotonic() + 0.05
            for message in self.bus.receive(self.listen_s if self._works else 0.02):
                self._take(message)
            self._advance()
            if self.step_s:
                time.sleep(self.step_s)

    def _take(self, message: ToWorker | BadEntry) -> None:
        match message:
            case Submit():
                delivered = len(message.delivered_token_ids[0]) if message.delivered_token_ids else 0
                work = _Work(message, replace(self.script), message.gateway_id, delivered, delivered)
                self._works[message.response_id] = work
                self.submits.append(message)
            case Attach():
                attached = self._works.get(message.response_id)
                if attached is not None and attached.submit.attempt == message.attempt:
                    self.attaches.append(message)
                    attached.gateway_id, attached.sent = message.gateway_id, message.from_index
            case Cancel():
                self.cancels.append((self.step, message))
                work = self._works.get(message.response_id)
                if work is not None and not work.script.hang and work.submit.attempt == message.attempt:
                    self._cancelled(work, message.reason)
            case _:
                pass

    def _cancelled(self, work: _Work, reason: str) -> None:
        messages, usage = self._end(work, "cancelled")
        (finished,) = messages
        assert isinstance(finished, Finished)
        assert usage is not None
        terminal = "cancelled_client" if reason == "client" else "failed_platform"
        choices = tuple(replace(end, detail=reason) for end in finished.choices)
        finished = replace(finished, choices=choices)
        outputs = {work.submit.response_id: self._output(work, finished)}
        usages = [replace(usage, terminal=terminal)]
        self.bus.publish(StepOutput({work.gateway_id: [finished]}, usages, outputs))

    def _advance(self) -> None:
        ready = [w for w in self._works.values() if not w.script.hang and not w.script.prompt_first]
        if not ready:
            return
        self.step += 1
        by_gateway: dict[str, list[ToGateway]] = {}
        usages: list[Usage] = []
        outputs: dict[str, FinishedOutput] = {}
        for work in ready:
            messages, usage = self._one_step(work)
            by_gateway.setdefault(work.gateway_id, []).extend(messages)
            if usage is not None:
                usages.append(usage)
            if messages and isinstance(messages[-1], Finished):
                outputs[work.submit.response_id] = self._output(work, messages[-1])
        self.bus.publish(StepOutput(to_gateways=by_gateway, usages=usages, outputs=outputs))

    def _output(self, work: _Work, finished: Finished) -> FinishedOutput:
        return FinishedOutput(finished, [list(work.answer_of(choice)[: work.done]) for choice in work.choices])

    def _one_step(self, work: _Work) -> tuple[list[ToGateway], Usage | None]:
        script, response_id, limit = work.script, work.submit.response_id, work.limit
        if script.reject is not None:
            return self._reject(work)
        before, work.done = work.done, min(limit, work.done + script.tokens_per_step)
        messages: list[ToGateway] = [self._tokens(work)]
        self.generated[response_id] = work.done
        self.last_step[response_id] = self.step
        for choice in work.choices:
            if before < len(work.answer_of(choice)) <= work.done < limit:
                end = ChoiceEnd(choice=choice, reason=script.reason)
                messages.append(ChoiceFinished(response_id=response_id, attempt=work.submit.attempt, end=end))
        if work.done < limit:
            return messages, None
        reason = "length" if work.done == work.submit.max_tokens < len(script.answer) else script.reason
        finished, usage = self._end(work, reason)
        return [*messages, *finished], usage

    def _tokens(self, work: _Work) -> Tokens:
        news = [tuple(work.answer_of(choice)[work.sent : work.done]) for choice in work.choices]
        rows = [(choice, new) for choice, new in zip(work.choices, news, strict=True) if new]
        first, work.sent = work.sent, work.done
        asked = work.submit.sampling.num_top_logprobs
        logprobs = () if asked is None else tuple(tuple(_logprob(i, asked) for i in new) for _, new in rows)
        return Tokens(
            worker_id=self.bus.worker_id,
            epoch=self.epoch,
            step=self.step,
            response_ids=(work.submit.response_id,) * len(rows),
            attempts=(work.submit.attempt,) * len(rows),
            choices=tuple(choice for choice, _ in rows),
            first_indexes=(first,) * len(rows),
            token_ids=tuple(new for _, new in rows),
            logprobs=logprobs,
        )

    def _reject(self, work: _Work) -> tuple[list[ToGateway], Usage | None]:
        assert work.script.reject is not None
        reason, retry_after_us = work.script.reject
        del self._works[work.submit.response_id]
        rejected = Rejected(
            response_id=work.submit.response_id,
            attempt=work.submit.attempt,
            reason=reason,
            retry_after_us=retry_after_us,
        )
        return [rejected], self._usage(work, "shed", 0)

    def _end(self, work: _Work, reason: str) -> tuple[list[ToGateway], Usage | None]:
        del self._works[work.submit.response_id]
        prompt = len(work.submit.prompt_token_ids)
        ends = tuple(
            ChoiceEnd(choice=choice, reason=reason, visible_bytes=work.script.visible_bytes) for choice in work.choices
        )
        finished = Finished(
            response_id=work.submit.response_id,
            attempt=work.submit.attempt,
            choices=ends,
            prompt_tokens=prompt,
            cached_tokens=0,
            output_tokens=self._num_output(work),
            counters=work.script.counters,
        )
        terminal = {"cancelled": "cancelled_client", "failed": "failed_platform"}.get(reason, "completed")
        return [finished], self._usage(work, terminal, prompt)

    def _num_output(self, work: _Work) -> int:
        return sum(min(work.done, len(work.answer_of(choice))) for choice in work.choices)

    def _usage(self, work: _Work, terminal: str, prompt_tokens: int) -> Usage:
        submit = work.submit
        return Usage(
            response_id=submit.response_id,
            attempt=submit.attempt,
            tenant_id=submit.tenant_id,
            project_id=submit.project_id,
            key_id=submit.key_id,
            priority_class=submit.priority_class,
            model=submit.model,
            prompt_tokens=prompt_tokens,
            cached_tokens=0,
            output_tokens=self._num_output(work),
            terminal=terminal,
            policy_version=submit.policy_version,
            price_version=submit.price_version,
            counters=EngineCounters(),
            requested_class=submit.requested_class,
        )


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = ((token_id, -0.5), *((token_id + 1 + n, -1.0 - n) for n in range(20)))
    return TokenLogprob(token_id=token_id, logprob=-0.5, top=top[:num_top])


@dataclass(slots=True)
class KeyShelf:
    """The key table without PostgreSQL."""

    stored: dict[str, StoredKey] = field(default_factory=dict)
    num_lookups: int = 0

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    async def note_used(self, key_ids: Sequence[str]) -> None: ...

    async def find(self, public_id: str) -> StoredKey | None:
        self.num_lookups += 1
        return self.stored.get(public_id)

    def issue(self, tenant_id: str, default_class: str = "default") -> str:
        new = api_keys.make("test")
        self.stored[new.public_id] = StoredKey(
            key_id=f"key-{tenant_id}",
            tenant_id=tenant_id,
            project_id=f"project-{tenant_id}",
            secret_sha256=new.secret_sha256,
            default_class=default_class,
            is_usable=True,
            expires_at_s=None,
        )
        return new.text


def policy_document(version: int, quotas: Sequence[TenantClassPolicy], prices: Sequence[int] = (1, 1, 2)) -> str:
    snapshot = PolicySnapshot(version=version, classes=cpu_classes(), tenants=tuple(quotas))
    rows = [
        {
            "model": MODEL,
            "priority_class": c.label,
            "token_kind": kind,
            "micros_per_million": price * 1_000_000,
        }
        for c in PriorityClass
        for kind, price in zip(("prompt", "cached", "output"), prices, strict=True)
    ]
    names = {t: {"slug": t, "name": t.title(), "timezone": "UTC"} for t in (AURORA, BULK, NOVA, STRANGER)}
    document = {"version": version, "policy": snapshot_to_dict(snapshot), "price_version": 1, "prices": rows}
    return json.dumps({**document, "tenants": names})


class World:
    """The door of one gateway on a loopback port, its worker, and looks into Redis."""

    def __init__(self, url: str, keys: Keys) -> None:
        self.url = url
        self.redis_keys = keys
        self.redis = redis.Redis.from_url(url)
        self.redis.set(keys.gate_built, 1)
        self.shelf = KeyShelf()
        self.keys = {tenant: self.shelf.issue(tenant) for tenant in (AURORA, BULK, NOVA, STRANGER)}
        self.worker = FakeWorker(url, keys)
        self.policy_version = 0
        self.base_url = ""
        self.runtime: Runtime | None = None
        self.build_gate: Callable[[], bool] = lambda: False  # there is no PostgreSQL, so no books to build it from
        self._clients: dict[tuple[str, bool], AsyncOpenAI] = {}

    def publish(self, *quotas: TenantClassPolicy) -> None:
        """Put these cells in force, the world's other cells beside them."""
        replaced = {(quota.tenant_id, quota.priority_class) for quota in quotas}
        others = [q for q in WORLD_QUOTAS if (q.tenant_id, q.priority_class) not in replaced]
        self.policy_version += 1
        document = policy_document(self.policy_version, [*others, *quotas])
        write_policy(self.redis, self.redis_keys, version=self.policy_version, document=document)

    async def set_quota(self, *quotas: TenantClassPolicy) -> None:
        """Publish, and wait until the gateway has it."""
        assert self.runtime is not None
        self.publish(*quotas)
        policy = self.runtime.policy
        await self.until(lambda: policy.view is not None and policy.view.version == self.policy_version)

    @staticmethod
    async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Poll for something that another thread or process brings about."""
        async with asyncio.timeout(timeout_s):
            while True:
                if condition():
                    return
                await asyncio.sleep(0.005)

    def new_runtime(self, gateway_id: str, bus_type: type[RedisGatewayBus] = RedisGatewayBus) -> Runtime:
        return Runtime(
            bus=bus_type(self.url, gateway_id, keys=self.redis_keys),
            redis=connect_async(self.url),
            redis_keys=self.redis_keys,
            key_table=self.shelf,
            texts=[byte_text()],
            body_limit_bytes=BODY_LIMIT,
            build_gate=lambda: self.build_gate(),
        )

    def client(self, tenant: str = AURORA, *, strict: bool = True) -> AsyncOpenAI:
        """The official client, which checks our bodies against its own types."""
        found = self._clients.get((tenant, strict))
        if found is None:
            found = self._clients[tenant, strict] = AsyncOpenAI(
                base_url=f"{self.base_url}/v1",
                api_key=self.keys[tenant],
                max_retries=0,
                _strict_response_validation=strict,
            )
        return found

    async def close_clients(self) -> None:
        for client in self._clients.values():
            await client.close()

    def usage_messages(self) -> list[Any]:
        """All that stands in the durable stream, in order."""
        with contextlib.closing(RedisUsageReader(self.url, keys=self.redis_keys, consumer="test")) as reader:
            return [entry.message for entry in reader.read(10_000, 0.0)]

    def slots_in_use(self, tenant: str = AURORA, label: str = "default") -> int:
        return self.redis.zcard(f"{self.redis_keys.prefix}lease:{tenant}:{label}")

    def money(self, tenant: str, label: str) -> dict[str, int]:
        """open and settled, over all windows."""
        totals = {"open": 0, "settled": 0}
        for key in self.redis.scan_iter(f"{self.redis_keys.prefix}money:{tenant}:{label}:*"):
            for name, amount in zip(totals, self.redis.hmget(key, *totals), strict=True):
                totals[name] += int(amount or 0)
        return totals

    def level(self, kind: str, tenant: str, label: str = "default") -> float | None:
        level = self.redis.hget(f"{self.redis_keys.prefix}limit:{tenant}:{label}:{kind}", "level")
        return None if level is None else float(level)


@contextlib.asynccontextmanager
async def serving(application: Any) -> AsyncIterator[str]:
    """A server on a free loopback port, in this event loop: uvicorn's protocol, and nothing that ticks."""
    config = uvicorn.Config(application, lifespan="off", log_config=None, access_log=False)
    config.load()
    state = uvicorn.server.ServerState()
    listener = await asyncio.get_running_loop().create_server(
        lambda: config.http_protocol_class(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()
        for connection in list(state.connections):
            connection.shutdown()
        try:
            await World.until(lambda: not (state.connections or state.tasks), 1.0)
        except TimeoutError:
            for task in state.tasks:
                task.cancel()


@pytest.fixture
async def world(valkey: str) -> AsyncIterator[World]:
    """One gateway behind a port, and a scripted worker."""
    from gateway import asgi

    world = World(valkey, Keys(f"test:{uuid.uuid4().hex}:"))
    world.publish()
    world.worker.start()
    runtime = world.runtime = world.new_runtime("gateway-1")
    await runtime.start()
    gateway_runtime.set_current(runtime)
    try:
        async with serving(asgi.router) as world.base_url:
            yield world
            await world.close_clients()
    finally:
        gateway_runtime.set_current(None)
        await runtime.stop()
        world.worker.stop()
        world.redis.close()
