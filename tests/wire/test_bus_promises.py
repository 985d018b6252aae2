"""The promises of ``wire.bus``, kept in memory and on Redis alike."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from scheduler_engine.policy import PolicySnapshot, gpu_classes
from wire.bus import BusFull, Fenced, StepOutput
from wire.messages import Cancel, Moved, PolicyChanged, Released, Tokens


async def test_messages_reach_a_worker_in_the_order_they_were_sent(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    worker.open()
    sent = [make.submit("r1"), make.submit("r2"), Cancel(response_id="r1", attempt=1, reason="client")]
    for message in sent:
        await gateway.send("w1", message)
    assert list(worker.receive(1.0)) == sent
    assert list(worker.receive(0.0)) == []


async def test_a_new_epoch_finds_an_empty_inbox(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    first = worker.open()
    await gateway.send("w1", make.submit("for the dead"))
    assert worker.open() > first
    assert list(worker.receive(0.0)) == []


async def test_a_burst_of_5000_tokens_arrives_whole_and_in_order(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    worker.open()
    await gateway.open()
    received: list[int] = []

    async def read() -> None:
        while len(received) < 5_000:
            for message in await gateway.receive(1.0):
                assert isinstance(message, Tokens)
                assert message.first_indexes[0] == len(received)
                received.extend(message.token_ids[0])

    def burst() -> None:
        for first in range(0, 5_000, 10):
            while True:
                try:
                    worker.publish(StepOutput({"g1": [make.tokens("r1", first, tuple(range(first, first + 10)))]}))
                    break
                except BusFull:
                    continue

    async with asyncio.timeout(30):
        await asyncio.gather(read(), asyncio.to_thread(burst))
    assert received == list(range(5_000))


async def test_a_full_inbox_is_refused_and_the_message_does_not_arrive(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    worker.open()
    for number in range(10):
        await gateway.send("w1", make.submit(f"r{number}"))
    with pytest.raises(BusFull):
        await gateway.send("w1", make.submit("one too many"))
    assert [message.response_id for message in worker.receive(0.0)] == [f"r{number}" for number in range(10)]


async def test_what_is_sent_together_arrives_together_and_in_order_or_not_at_all(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    worker.open()
    await gateway.send("w1", *(make.submit(f"r{number}") for number in range(3)))
    assert [message.response_id for message in worker.receive(0.0)] == ["r0", "r1", "r2"]

    async def until_full() -> None:
        for number in range(11):
            await gateway.send("w1", make.submit(f"first {number}"), make.submit(f"second {number}"))

    with pytest.raises(BusFull):
        await until_full()
    arrived = [message.response_id for message in worker.receive(0.0)]
    assert [name.split()[0] for name in arrived] == ["first", "second"] * (len(arrived) // 2)


async def test_a_full_outbox_names_its_gateway_and_nothing_of_the_step_is_visible(world: Any, make: Any) -> None:
    worker, slow, reader = world.worker(), world.gateway("slow"), world.usage_reader()
    worker.open()
    for index in range(10):
        worker.publish(StepOutput({"slow": [make.tokens("r1", index, (1,))]}))
    step = StepOutput(
        {"g1": [make.tokens("r2", 0, (1,))], "slow": [make.tokens("r1", 10, (1,))]},
        usages=[make.usage("r2")],
        outputs={"r2": make.output([[1]], "r2")},
    )
    with pytest.raises(BusFull) as caught:
        worker.publish(step)
    assert caught.value.gateway_id == "slow"
    assert list(await world.gateway("g1").receive(0.0)) == []
    assert list(reader.read(10, 0.0)) == []
    assert await slow.output("r2") is None


async def test_a_full_usage_stream_refuses_a_step_that_ends_a_response(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    worker.open()
    for number in range(10):
        await gateway.append_usage(Released(response_id=f"r{number}", tenant_id="aurora", reason="gave up"))
    with pytest.raises(BusFull) as caught:
        worker.publish(StepOutput(usages=[make.usage("r99")]))
    assert caught.value.gateway_id is None


async def test_a_worker_declared_dead_can_say_nothing_more(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    epoch = worker.open()
    assert await gateway.fence("w1", epoch)
    with pytest.raises(Fenced):
        worker.publish(StepOutput({"g1": [make.tokens("r1", 0, (1,))]}, usages=[make.usage()]))
    with pytest.raises(Fenced):
        worker.publish_load(make.load(epoch=epoch))
    assert list(await gateway.receive(0.0)) == []


async def test_a_fence_for_an_epoch_that_is_gone_does_not_hit_its_successor(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    old = worker.open()
    worker.open()
    assert not await gateway.fence("w1", old)
    worker.publish(StepOutput({"g1": [make.tokens("r1", 0, (7,))]}))
    assert len(await gateway.receive(0.0)) == 1


async def test_a_step_published_twice_is_seen_once(world: Any, make: Any) -> None:
    worker, gateway, reader = world.worker(), world.gateway(), world.usage_reader()
    worker.open()
    step = StepOutput({"g1": [make.tokens("r1", 0, (7,))]}, usages=[make.usage()])
    worker.publish(step)
    replay(worker, step)
    assert len(await gateway.receive(0.0)) == 1
    assert len(reader.read(10, 0.0)) == 1


def replay(worker: Any, step: StepOutput) -> None:
    """Publish as after an answer that was lost on its way."""
    if hasattr(worker, "_unconfirmed"):
        worker._unconfirmed = step
    worker.publish(step)


async def test_one_gateway_can_tell_another(world: Any, make: Any) -> None:
    told = Moved(response_id="r1", gateway_id="g2")
    await world.gateway("g2").tell_gateway("g1", told)
    assert list(await world.gateway("g1").receive(0.0)) == [told]


async def test_a_finished_output_can_be_fetched_for_ten_minutes(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    worker.open()
    kept = make.output([[5, 6], [7]])
    worker.publish(StepOutput(usages=[make.usage()], outputs={"r1": kept}))
    world.let_pass(590)
    assert await gateway.output("r1") == kept
    world.let_pass(20)
    assert await gateway.output("r1") is None


async def test_a_usage_comes_again_until_it_is_acknowledged(world: Any, make: Any) -> None:
    worker, reader = world.worker(), world.usage_reader()
    worker.open()
    worker.publish(StepOutput(usages=[make.usage("r1"), make.usage("r2")]))
    first, second = reader.read(10, 0.0)
    assert [entry.message.response_id for entry in (first, second)] == ["r1", "r2"]
    reader.acknowledge([first.entry_id])
    again = world.usage_reader()
    assert list(again.read(10, 0.0)) == [second]
    again.acknowledge([second.entry_id])
    assert list(world.usage_reader().read(10, 0.0)) == []


async def test_a_policy_arrives_once_per_version(world: Any) -> None:
    worker = world.worker()
    worker.open()
    for version in (1, 2):
        policy = PolicySnapshot(version=version, classes=gpu_classes())
        world.set_policy(policy)
        received: list[Any] = []
        for _ in range(20):
            received.extend(worker.receive(0.1))
        assert received == [PolicyChanged(snapshot=policy)]


async def test_a_submit_comes_behind_the_policy_that_it_was_made_under(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    worker.open()
    old, new = (PolicySnapshot(version=version, classes=gpu_classes()) for version in (1, 2))
    world.set_policy(old)
    assert list(worker.receive(0.0)) == [PolicyChanged(snapshot=old)]
    world.set_policy(new)
    submit = make.submit(policy_version=2)
    await gateway.send("w1", submit)
    assert list(worker.receive(1.0)) == [PolicyChanged(snapshot=new), submit]


async def test_an_older_policy_than_the_one_in_force_is_refused_and_reaches_nobody(world: Any) -> None:
    worker = world.worker()
    worker.open()
    old, new = (PolicySnapshot(version=version, classes=gpu_classes()) for version in (9, 10))
    assert world.set_policy(new)
    assert not world.set_policy(old)
    assert list(worker.receive(0.0)) == [PolicyChanged(snapshot=new)]
    assert world.set_policy(new)


async def test_a_worker_that_says_nothing_for_two_seconds_is_not_listed(world: Any, make: Any) -> None:
    worker, gateway = world.worker(), world.gateway()
    load = make.load(epoch=worker.open())
    worker.publish_load(load)
    assert list(await gateway.loads()) == [load]
    world.let_pass(3)
    assert list(await gateway.loads()) == []


async def test_a_gateway_without_heartbeat_for_nine_seconds_is_lost(world: Any) -> None:
    worker, gateway, other = world.worker(), world.gateway("g1"), world.gateway("g2")
    await gateway.open()
    await other.open()
    world.let_pass(6)
    await other.heartbeat()
    assert worker.live_gateways() == {"g1", "g2"}
    world.let_pass(6)
    assert worker.live_gateways() == {"g2"}
