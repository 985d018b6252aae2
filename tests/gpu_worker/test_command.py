"""``python -m gpu_worker`` as an operator meets it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, Any

import pytest

from gateway.embedded import EmbeddedValkey, running
from gpu_worker.__main__ import main
from gpu_worker.config import ConfigError, parse, sized, starting_policy
from gpu_worker.replay import command as replay
from scheduler_engine.policy import PolicySnapshot, cpu_classes, gpu_classes, snapshot_to_dict
from wire.bus import BusError, FinishedOutput
from wire.messages import Finished, Tokens, Usage
from wire.redis_bus import RedisGatewayBus, RedisUsageReader

LIMIT_S = 30.0


class WorkerProcess:
    """A worker in a process of its own. Always: its lines are read as they come, so that it never blocks on a pipe."""

    def __init__(self, url: str, root: Path, worker_id: str = "", *arguments: str) -> None:
        self.worker_id = worker_id or f"w-{uuid.uuid4().hex}"
        command = [sys.executable, "-m", "gpu_worker", "--executor=simulated", "--device-profile=toy", *arguments]
        environment = {**os.environ, "REDIS_URL": url, "PYTHONPATH": f"{root}{os.pathsep}{root / 'platform'}"}
        self.process = subprocess.Popen(
            [*command, f"--worker-id={self.worker_id}"], stderr=subprocess.PIPE, text=True, env=environment, cwd=root
        )
        self.lines: list[str] = []
        self._changed = threading.Condition()
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,))
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        for line in stream:
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()

    def wait_for(self, words: str) -> str:
        """The first line that holds them."""

        def found() -> str | None:
            return next((line for line in self.lines if words in line), None)

        with self._changed:
            assert self._changed.wait_for(lambda: found() is not None, LIMIT_S), self.lines
            return found() or ""

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        status = self.process.wait(LIMIT_S)
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()
        return status


@pytest.fixture
async def gateway(valkey_url: str) -> AsyncIterator[RedisGatewayBus]:
    bus = RedisGatewayBus(valkey_url, f"g-{uuid.uuid4().hex}")
    await bus.open()
    yield bus
    await bus.close()


async def listen(gateway: RedisGatewayBus, until: Callable[[list[int], Finished | None], bool]) -> list[int]:
    """Token ids of the one response that is running, each at the index it claims, until the condition holds."""
    token_ids: list[int] = []
    first_index: int | None = None
    end = None
    async with asyncio.timeout(LIMIT_S):
        while not until(token_ids, end):
            for message in await gateway.receive(1.0):
                if isinstance(message, Tokens):
                    first_index = message.first_indexes[0] if first_index is None else first_index
                    assert message.first_indexes[0] == first_index + len(token_ids)
                    token_ids.extend(message.token_ids[0])
                if isinstance(message, Finished):
                    end = message
    return token_ids


async def ask(gateway: RedisGatewayBus, worker: WorkerProcess, submit: Any) -> tuple[list[int], Finished]:
    """Send and listen to the end: (token ids, end)."""
    ends: list[Finished] = []

    def has_ended(token_ids: list[int], end: Finished | None) -> bool:
        ends.extend([end] if end is not None else [])
        return bool(ends)

    await gateway.send(worker.worker_id, submit)
    token_ids = await listen(gateway, until=has_ended)
    return token_ids, ends[0]


async def test_a_worker_serves_over_redis_and_leaves_with_0_on_sigterm(
    valkey_url: str, project_root: Path, gateway: RedisGatewayBus, small_worker: Any
) -> None:
    worker = WorkerProcess(valkey_url, project_root)
    assert "256 KV blocks" in worker.wait_for("ready")
    submit = small_worker.submit(uuid.uuid4().hex, gateway_id=gateway.gateway_id, max_tokens=25)
    token_ids, end = await ask(gateway, worker, submit)
    assert (len(token_ids), end.output_tokens) == (25, 25)
    assert [load.model for load in await gateway.loads() if load.worker_id == worker.worker_id] == ["simulated"]
    assert await gateway.output(submit.response_id) == FinishedOutput(end, [token_ids])
    worker.process.send_signal(signal.SIGUSR1)
    worker.wait_for("books: balanced")
    assert worker.end(signal.SIGTERM) == 0


async def test_a_worker_that_was_killed_comes_back_under_a_later_epoch_and_without_the_dead_ones_work(
    valkey_url: str, project_root: Path, gateway: RedisGatewayBus, small_worker: Any
) -> None:
    first = WorkerProcess(valkey_url, project_root)
    old_epoch = int(first.wait_for("ready").rsplit(" ", 1)[1])
    assert first.end(signal.SIGKILL) == -signal.SIGKILL
    for_the_dead = small_worker.submit(uuid.uuid4().hex, gateway_id=gateway.gateway_id)
    await gateway.send(first.worker_id, for_the_dead)
    second = WorkerProcess(valkey_url, project_root, first.worker_id)
    assert int(second.wait_for("ready").rsplit(" ", 1)[1]) > old_epoch
    _, end = await ask(
        gateway, second, small_worker.submit(uuid.uuid4().hex, gateway_id=gateway.gateway_id, max_tokens=3)
    )
    assert end.response_id != for_the_dead.response_id
    assert await gateway.output(for_the_dead.response_id) is None
    assert second.end(signal.SIGTERM) == 0


async def test_what_a_worker_recorded_before_it_was_killed_replays_and_explains(
    valkey_url: str,
    project_root: Path,
    gateway: RedisGatewayBus,
    small_worker: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    worker = WorkerProcess(valkey_url, project_root, "", f"--record={tmp_path}")
    worker.wait_for("ready")
    submit = small_worker.submit(uuid.uuid4().hex, gateway_id=gateway.gateway_id, max_tokens=25)
    _, end = await ask(gateway, worker, submit)
    assert sum(wait[3] for wait in end.counters.waits if wait[0] == "queued") == end.counters.queue_us
    await asyncio.sleep(0.5)  # what a worker that stays idle hands to its disk is not acknowledged to anybody
    assert worker.end(signal.SIGKILL) == -signal.SIGKILL
    assert replay.main([str(tmp_path), f"--explain={submit.response_id}/0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["equal"], result["cut"]) == (True, True)
    assert result["steps"] >= 26
    assert result["explanation"]["outcome"] == "length"
    assert result["explanation"]["queue_us"] == end.counters.queue_us


async def test_a_redis_that_restarts_in_the_middle_of_a_stream_costs_a_pause_and_no_token(
    tmp_path: Path, project_root: Path, small_worker: Any
) -> None:
    server = EmbeddedValkey(tmp_path)
    with running(server, tmp_path / "log"):
        worker = WorkerProcess(server.url, project_root)
        worker.wait_for("ready")
        gateway = RedisGatewayBus(server.url, "g1")
        await gateway.open()
        await gateway.send(worker.worker_id, small_worker.submit(max_tokens=400))
        token_ids = await listen(gateway, until=lambda tokens, end: len(tokens) > 20)
    with pytest.raises(BusError):
        await gateway.receive(0.0)
    worker.wait_for("trying again")
    with running(server, tmp_path / "log"):
        token_ids += await listen(gateway, until=lambda tokens, end: end is not None)
        with contextlib.closing(RedisUsageReader(server.url)) as reader:
            (usage,) = [entry.message for entry in reader.read(10, 0.0)]
        assert worker.end(signal.SIGTERM) == 0
        await gateway.close()
    assert isinstance(usage, Usage)
    assert usage.output_tokens == len(token_ids) == 400


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--executor=model"], "--executor model needs --model PATH"),
        (["--executor=model", "--model=/nowhere.gguf"], "nowhere.gguf"),
        (["--executor=simulated", "--policy=/nowhere.json"], "--policy /nowhere.json: No such file"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_one_line(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert sentence in lines[0]


@pytest.mark.parametrize("argument", ["--kv-mib=0", "--slots=-3", "--kv-mib=many", "--device-profile=abacus"])
def test_a_wrong_argument_is_refused_by_name(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([argument])
    assert argument.partition("=")[0] in capsys.readouterr().err


def test_the_prefix_cache_is_on_unless_turned_off() -> None:
    assert [parse(given).prefix_cache for given in ([], ["--prefix-cache=off"])] == [True, False]


def test_pools_and_slots_can_be_sized_on_the_command_line() -> None:
    config = parse(["--executor=simulated", "--device-profile=toy", "--kv-mib=2", "--host-kv-mib=1", "--slots=3"])
    device = sized(config.device, config)
    assert (device.shape.num_blocks, device.shape.num_host_blocks, device.num_slots) == (32, 16, 3)


def test_a_policy_file_may_hold_the_published_document_or_the_bare_policy(tmp_path: Path) -> None:
    policy = PolicySnapshot(version=8, classes=cpu_classes())
    bare, published = tmp_path / "bare.json", tmp_path / "published.json"
    bare.write_text(json.dumps(snapshot_to_dict(policy)))
    published.write_text(json.dumps({"version": 8, "policy": snapshot_to_dict(policy), "prices": []}))
    assert starting_policy(bare, gpu_classes()) == starting_policy(published, gpu_classes()) == policy


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"classes": 3}', "not json", "1" * 5_000])
def test_a_policy_file_that_cannot_be_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"policy\.json"):
        starting_policy(path, gpu_classes())


def test_a_policy_that_names_a_field_twice_is_refused_with_the_name(tmp_path: Path) -> None:
    document = json.dumps(snapshot_to_dict(PolicySnapshot(version=8, classes=cpu_classes())))
    path = tmp_path / "policy.json"
    path.write_text(document.replace('"floor_percent"', '"floor_percent": 9, "floor_percent"', 1))
    with pytest.raises(ConfigError, match="floor_percent is there twice"):
        starting_policy(path, gpu_classes())
