"""What the processes of one machine are told on their command lines."""

from __future__ import annotations

from pathlib import Path

from gateway.supervision.platform_processes import PlatformOptions, platform_stages


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
