"""What the processes of one machine are told on their command lines."""

from __future__ import annotations

import os
from pathlib import Path

import redis

from gateway.supervision.platform_processes import WORKER_ID, PlatformOptions, platform_stages
from tests.loads import quiet_load
from wire.redis_bus import RedisWorkerBus
from wire.redis_keys import Keys


def test_the_worker_records_into_the_data_folder(tmp_path: Path) -> None:
    options = PlatformOptions(root=tmp_path, data=tmp_path, port=8000, executor="simulated", model=None)
    specs = {spec.name: spec for stage in platform_stages(options, {"REDIS_URL": ""}) for spec in stage}
    assert f"--record={tmp_path / 'recorded'}" in specs["worker"].command()


def test_the_prefix_cache_can_be_turned_off_for_the_worker(tmp_path: Path) -> None:
    options = PlatformOptions(
        root=tmp_path, data=tmp_path, port=8000, executor="simulated", model=None, prefix_cache="off"
    )
    specs = {spec.name: spec for stage in platform_stages(options, {"REDIS_URL": ""}) for spec in stage}
    assert "--prefix-cache=off" in specs["worker"].command()


def test_a_worker_that_is_started_again_is_not_ready_by_the_last_word_of_the_one_before(
    valkey: str, tmp_path: Path
) -> None:
    dead = RedisWorkerBus(valkey, WORKER_ID)
    dead.publish_load(quiet_load(worker_id=WORKER_ID, epoch=dead.open()))
    options = PlatformOptions(root=tmp_path, data=tmp_path, port=8000, executor="simulated", model=None)
    stages = platform_stages(options, {**os.environ, "REDIS_URL": valkey})
    (worker,) = [spec for stage in stages for spec in stage if spec.name == "worker"]
    assert worker.is_ready is not None
    assert worker.is_ready()  # whoever asks now is told of the dead
    with redis.Redis.from_url(valkey) as client:
        assert client.pttl(Keys().load(WORKER_ID)) <= worker.asked_after_s * 1_000
    dead.close()
