"""What only the Redis side can meet: cut connections, a server that is away, strange bytes, records that end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gateway.embedded import EmbeddedValkey, running
from scheduler_engine.policy import PolicySnapshot, gpu_classes
from wire.bus import BadEntry, BusError, Fenced, StepOutput
from wire.messages import PolicyChanged, Released, Usage
from wire.redis_bus import RedisGatewayBus, RedisUsageReader, RedisWorkerBus
from wire.redis_bus.connection import MAX_CONNECTIONS


def cut_all_connections(world: Any) -> None:
    """As a router that forgets its connections; our own client survives."""
    world.client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def test_a_cut_connection_is_taken_up_again_by_both_sides(redis_world: Any, make: Any) -> None:
    worker, gateway, reader = redis_world.worker(), redis_world.gateway(), redis_world.usage_reader()
    worker.open()
    await gateway.open()
    reader.read(1, 0.0)
    cut_all_connections(redis_world)
    await gateway.send("w1", make.submit())
    assert [message.response_id for message in worker.receive(0.0)] == ["r1"]
    cut_all_connections(redis_world)
    worker.publish(StepOutput({"g1": [make.tokens("r1", 0, (7,))]}, usages=[make.usage()]))
    assert len(await gateway.receive(0.0)) == 1
    cut_all_connections(redis_world)
    assert len(reader.read(10, 0.0)) == 1


async def test_more_callers_than_connections_wait_for_each_other(redis_world: Any) -> None:
    gateway = redis_world.gateway()
    await gateway.open()
    await asyncio.gather(*(gateway.loads() for _ in range(5 * MAX_CONNECTIONS)))
    assert 0 < len(redis_world.client.client_list()) <= MAX_CONNECTIONS + 10


async def test_while_redis_is_gone_everybody_gets_a_bus_error(tmp_path: Path, make: Any) -> None:
    server = EmbeddedValkey(tmp_path)
    with running(server, tmp_path / "log"):
        worker, gateway = RedisWorkerBus(server.url, "w1"), RedisGatewayBus(server.url, "g1")
        reader = RedisUsageReader(server.url)
        worker.open()
        await gateway.open()
    with pytest.raises(BusError):
        worker.publish(StepOutput(usages=[make.usage()]))
    with pytest.raises(BusError):
        worker.receive(0.0)
    with pytest.raises(BusError):
        await gateway.send("w1", make.submit())
    with pytest.raises(BusError):
        await gateway.heartbeat()
    with pytest.raises(BusError):
        reader.read(1, 0.0)
    worker.close()
    reader.close()
    with pytest.raises(BusError):
        await gateway.close()


async def test_strange_bytes_in_an_inbox_are_skipped_and_reported(redis_world: Any, make: Any) -> None:
    worker, gateway = redis_world.worker(), redis_world.gateway()
    worker.open()
    inbox = redis_world.keys.inbox("w1")
    redis_world.client.xadd(inbox, {"m": b"\x01\xff\xff"})
    redis_world.client.xadd(inbox, {"other": b"field"})
    await gateway.send("w1", make.submit())
    strange, empty, good = worker.receive(0.0)
    assert isinstance(strange, BadEntry)
    assert empty.reason == "empty entry"
    assert good == make.submit()


async def test_a_policy_that_cannot_be_is_reported_and_the_next_one_is_taken(redis_world: Any) -> None:
    worker = redis_world.worker()
    worker.open()
    redis_world.client.set(redis_world.keys.policy_version, 1)
    redis_world.client.set(redis_world.keys.policy_current, json.dumps({"version": 1, "policy": {"classes": 7}}))
    (bad,) = worker.receive(0.0)
    assert isinstance(bad, BadEntry)
    assert bad.reason.startswith("policy 1:")


async def test_a_policy_edit_reaches_a_waiting_worker_within_a_second(redis_world: Any) -> None:
    worker = redis_world.worker()
    worker.open()
    worker.receive(0.0)
    began_s = time.monotonic()
    redis_world.set_policy(PolicySnapshot(version=5, classes=gpu_classes()))
    received: list[Any] = []
    while not received and time.monotonic() - began_s < 5:
        received.extend(worker.receive(1.0))
    assert received[0].snapshot.version == 5
    assert time.monotonic() - began_s < 1.0


@contextmanager
def spoiled(world: Any, name: str) -> Iterator[None]:
    """A key that Redis refuses to read meanwhile."""
    world.client.rename(name, f"{name}:whole")
    world.client.sadd(name, "of another type")
    yield
    world.client.rename(f"{name}:whole", name)


async def test_a_policy_is_not_lost_with_an_inbox_that_cannot_be_read(redis_world: Any, make: Any) -> None:
    worker, gateway, received = redis_world.worker(), redis_world.gateway(), []
    worker.open()
    policy, submit = PolicySnapshot(version=1, classes=gpu_classes()), make.submit()
    redis_world.set_policy(policy)
    await gateway.send("w1", submit)
    with spoiled(redis_world, redis_world.keys.inbox("w1")):
        for _ in range(2):
            with suppress(BusError):
                received.extend(worker.receive(0.0))
    received.extend(worker.receive(0.0))
    assert received == [PolicyChanged(snapshot=policy), submit]


async def test_an_inbox_is_not_lost_with_a_policy_that_cannot_be_read(redis_world: Any, make: Any) -> None:
    worker, gateway = redis_world.worker(), redis_world.gateway()
    worker.open()
    old, new = (PolicySnapshot(version=version, classes=gpu_classes()) for version in (1, 2))
    redis_world.set_policy(old)
    assert worker.receive(0.0) == [PolicyChanged(snapshot=old)]
    redis_world.set_policy(new)
    submit = make.submit(policy_version=2)
    await gateway.send("w1", submit)
    with spoiled(redis_world, redis_world.keys.policy_version), pytest.raises(BusError):
        worker.receive(0.0)
    assert worker.receive(0.0) == [PolicyChanged(snapshot=new), submit]


async def test_a_fenced_worker_cannot_take_its_successors_input(redis_world: Any, make: Any) -> None:
    old, gateway = redis_world.worker(), redis_world.gateway()
    old.open()
    successor = redis_world.worker()
    successor.open()
    await gateway.send("w1", make.submit())
    old.receive(0.0)
    with pytest.raises(Fenced):
        old.receive(0.0)
    assert len(successor.receive(0.0)) == 1


async def test_what_a_gateway_read_is_taken_out_with_the_next_read_so_that_nobody_waits_for_that(
    redis_world: Any, make: Any
) -> None:
    worker, gateway, outbox = redis_world.worker(), redis_world.gateway(), redis_world.keys.outbox("g1")
    worker.open()
    await gateway.open()
    for number in range(3):
        worker.publish(StepOutput({"g1": [make.tokens(f"r{number}", 0, (7,))]}))
        assert [tokens.response_ids for tokens in await gateway.receive(0.0)] == [(f"r{number}",)]
        assert redis_world.client.xlen(outbox) == 1
    assert await gateway.receive(0.0) == []
    assert redis_world.client.xlen(outbox) == 0


async def test_what_a_worker_read_is_taken_out_when_nothing_comes_or_much_of_it_at_once(
    redis_world: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wire.redis_bus.worker_side.MAX_DELIVERED", 4)
    worker, gateway, inbox = redis_world.worker(), redis_world.gateway(), redis_world.keys.inbox("w1")
    worker.open()
    lengths = []
    for number in range(6):
        await gateway.send("w1", make.submit(f"r{number}"))
        assert [message.response_id for message in worker.receive(0.0)] == [f"r{number}"]
        lengths.append(redis_world.client.xlen(inbox))
    assert lengths == [1, 2, 3, 4, 1, 2]
    assert worker.receive(0.0) == []
    assert redis_world.client.xlen(inbox) == 0


async def test_an_epoch_begins_at_redis_clock_so_that_it_grows_even_when_redis_lost_everything(
    redis_world: Any,
) -> None:
    seconds, _ = redis_world.client.time()
    assert seconds <= redis_world.worker().open() <= seconds + 10


class Record:
    """A response's record as the admit script leaves it, with its lease, bucket and money window."""

    def __init__(self, world: Any, **fields: Any) -> None:
        self.client, self.keys = world.client, world.keys
        prefix = self.keys.prefix
        self.lease, self.bucket, self.requests = f"{prefix}lease", f"{prefix}tokens", f"{prefix}requests"
        self.money = f"{prefix}money"
        self.key = self.keys.response("r1")
        self.client.zadd(self.lease, {"r1": 1, "other": 2})
        self.client.hset(self.bucket, mapping={"level": 400, "capacity": 1_000})
        self.client.hset(self.requests, mapping={"level": 59, "capacity": 60})
        self.client.hset(self.money, mapping={"open": 900, "settled": 100})
        record = {
            "state": "open",
            "attempt": 1,
            "lease_keys": json.dumps([self.lease]),
            "token_refunds": json.dumps([[self.bucket, 600]]),
            "request_refunds": json.dumps([[self.requests, 1]]),
            "money_keys": json.dumps([self.money]),
            "money_reserved": 900,
            "price_prompt": 1_000_000,
            "price_cached": 100_000,
            "price_output": 3_000_000,
        }
        self.client.hset(self.key, mapping={**record, **fields})

    def state(self) -> tuple[set[bytes], int, int, int, int]:
        """(leases, tokens left, requests left, open money, settled money)"""
        left = [int(self.client.hget(key, "level")) for key in (self.bucket, self.requests)]
        money = [int(amount) for amount in self.client.hmget(self.money, "open", "settled")]
        return set(self.client.zrange(self.lease, 0, -1)), left[0], left[1], money[0], money[1]

    def field(self, name: str) -> str:
        return str(self.client.hget(self.key, name).decode())


UNTOUCHED = ({b"r1", b"other"}, 400, 59, 900, 100)


async def test_the_end_gives_back_lease_and_tokens_and_settles_the_cost_once(redis_world: Any, make: Any) -> None:
    record, worker = Record(redis_world), redis_world.worker()
    worker.open()
    for _ in range(2):
        worker.publish(StepOutput(usages=[make.usage(prompt_tokens=100, cached_tokens=30, output_tokens=20)]))
    assert record.state() == ({b"other"}, 400 + 600 - 120, 59, 0, 100 + 70 + 3 + 60)
    assert (record.field("state"), record.field("cost_micros")) == ("done", "133")
    assert 0 < redis_world.client.ttl(record.key) <= 600


async def test_the_usage_of_an_attempt_that_was_given_up_is_rework_and_reaches_no_ledger(
    redis_world: Any, make: Any
) -> None:
    """P25. Another worker goes on with the response under the next attempt."""
    record, worker = Record(redis_world, attempt=2), redis_world.worker()
    epoch = worker.open()
    worker.publish(StepOutput(usages=[make.usage(prompt_tokens=100, output_tokens=20)]))
    assert record.state() == UNTOUCHED
    assert redis_world.client.xlen(redis_world.keys.usage) == 0
    counted = redis_world.client.hgetall(redis_world.keys.counted(worker.worker_id))
    assert counted == {f"{epoch}:rework_prompt".encode(): b"100", f"{epoch}:rework_output".encode(): b"20"}
    worker.publish(StepOutput(usages=[make.usage(attempt=2, prompt_tokens=100, output_tokens=20)]))
    assert record.field("state") == "done"
    assert redis_world.client.xlen(redis_world.keys.usage) == 1


async def test_a_card_lives_ten_minutes_beyond_the_end_of_its_response(redis_world: Any, make: Any) -> None:
    card = redis_world.keys.card("aurora", "r1")
    redis_world.client.set(card, "as it was asked for", ex=86_400)
    Record(redis_world, card=card)
    worker = redis_world.worker()
    worker.open()
    worker.publish(StepOutput(usages=[make.usage()]))
    assert 0 < redis_world.client.ttl(card) <= 600


async def test_a_cost_is_rounded_up_once_for_the_whole_response(redis_world: Any, make: Any) -> None:
    record, worker = Record(redis_world, price_prompt=1, price_cached=1, price_output=1), redis_world.worker()
    worker.open()
    worker.publish(StepOutput(usages=[make.usage(prompt_tokens=5, cached_tokens=2, output_tokens=3)]))
    assert record.field("cost_micros") == "1"


async def test_a_refund_never_lifts_a_bucket_above_its_capacity(redis_world: Any, make: Any) -> None:
    record, worker = Record(redis_world), redis_world.worker()
    redis_world.client.hset(record.bucket, "level", 900)
    worker.open()
    worker.publish(StepOutput(usages=[make.usage(prompt_tokens=1, output_tokens=1)]))
    assert record.state()[1] == 1_000


@pytest.mark.parametrize(
    ("terminal", "tokens_left", "requests_left", "settled"),
    [
        ("cancelled_client", 400 + 600 - 120, 59, 100 + 160),
        ("shed", 1_000, 60, 100),
        ("failed_platform", 1_000, 60, 100),
        ("expired", 1_000, 59, 100),
    ],
)
async def test_what_each_end_costs(
    redis_world: Any, make: Any, terminal: str, tokens_left: int, requests_left: int, settled: int
) -> None:
    record, worker = Record(redis_world), redis_world.worker()
    worker.open()
    worker.publish(StepOutput(usages=[make.usage(terminal=terminal)]))
    assert record.state() == ({b"other"}, tokens_left, requests_left, 0, settled)


async def test_a_release_gives_everything_back_and_tells_the_ledger(redis_world: Any) -> None:
    record, reader = Record(redis_world), redis_world.usage_reader()
    released = Released(response_id="r1", tenant_id="aurora", reason="client gone")
    await redis_world.gateway().append_usage(released)
    assert record.state() == ({b"other"}, 1_000, 60, 0, 100)
    assert [entry.message for entry in reader.read(10, 0.0)] == [released]


async def test_the_usage_of_an_older_attempt_settles_nothing(redis_world: Any, make: Any) -> None:
    record, worker = Record(redis_world, attempt=2), redis_world.worker()
    worker.open()
    worker.publish(StepOutput(usages=[make.usage(attempt=1)]))
    assert record.state() == UNTOUCHED
    worker.publish(StepOutput(usages=[make.usage(attempt=2)]))
    assert record.field("state") == "done"


async def test_a_fenced_workers_usage_settles_nothing(redis_world: Any, make: Any) -> None:
    record, worker = Record(redis_world), redis_world.worker()
    await redis_world.gateway().fence("w1", worker.open())
    with pytest.raises(Fenced):
        worker.publish(StepOutput(usages=[make.usage()]))
    assert record.state() == UNTOUCHED


async def test_a_broken_record_is_marked_and_does_not_stop_the_others(redis_world: Any, make: Any) -> None:
    record, worker = Record(redis_world, token_refunds="no json"), redis_world.worker()
    worker.open()
    worker.publish(StepOutput({"g1": [make.tokens("r1", 0, (1,))]}, usages=[make.usage("r1"), make.usage("r2")]))
    assert record.field("state") == "broken"
    reader = redis_world.usage_reader()
    messages = [entry.message for entry in reader.read(10, 0.0)]
    assert [message.response_id for message in messages if isinstance(message, Usage)] == ["r1", "r2"]
    assert len(await redis_world.gateway().receive(0.0)) == 1
