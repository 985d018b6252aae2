"""What the worker is told on its command line, and the policy it starts with. Wrong input is one clear sentence."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu_worker.simulated import DEVICES, DeviceProfile
from scheduler_engine.errors import PolicyError
from scheduler_engine.policy import ClassPolicy, PolicySnapshot, snapshot_from_dict

MIB = 1_048_576
REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")  # not on the command line: it may hold a password


class ConfigError(Exception):
    """The worker cannot start as asked; the sentence says what would be right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    executor: str
    redis_url: str
    worker_id: str
    model: Path | None
    kv_mib: int | None
    host_kv_mib: int | None
    slots: int | None
    threads: int | None
    device: DeviceProfile
    policy: Path | None
    drain_limit_s: int
    record: Path | None
    record_mib: int
    self_test: bool
    torch_device: str = "auto"
    weights: str = "full"
    spare_weights: bool = False
    prefix_cache: bool = True


def parse(arguments: Sequence[str] | None = None) -> WorkerConfig:
    """From ``sys.argv`` when none are given. Ends the process with a usage line when an argument is wrong."""
    parser = argparse.ArgumentParser(prog="python -m gpu_worker", description="Drives one device for the platform.")
    parser.add_argument("--executor", choices=("model", "simulated"), default="model")
    parser.add_argument("--redis", default=REDIS_URL, metavar="URL", help="where REDIS_URL does not say it")
    parser.add_argument("--worker-id", default="worker-1")
    parser.add_argument("--model", type=Path, metavar="PATH", help="GGUF file or Hugging Face folder")
    parser.add_argument("--kv-mib", type=positive, metavar="N", help="KV memory on the device")
    parser.add_argument("--host-kv-mib", type=positive, metavar="N", help="memory for KV that is swapped out")
    parser.add_argument("--slots", type=positive, metavar="N", help="requests that may run at once")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads of the model")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda where there is one (auto)"
    )
    parser.add_argument(
        "--weights", choices=("full", "int8"), default="full", help="int8: a quarter of the memory, on CPUs"
    )
    parser.add_argument(
        "--spare-weights",
        action="store_true",
        help="a second copy of the weights on a CPU: a request alone is quicker",
    )
    parser.add_argument(
        "--prefix-cache", choices=("on", "off"), default="on", help="off: every prompt is computed from its first token"
    )
    parser.add_argument("--device-profile", choices=sorted(DEVICES), default="cpu-smollm2")
    parser.add_argument("--policy", type=Path, metavar="FILE", help="policy to start with, as JSON")
    parser.add_argument("--drain-limit", type=positive, default=20, metavar="SECONDS")
    parser.add_argument("--record", type=Path, metavar="DIR", help="write down all that the engine is told, for replay")
    parser.add_argument("--record-mib", type=positive, default=256, metavar="N", help="of the newest are kept (256)")
    parser.add_argument("--self-test", action="store_true", help="check engine and kernels on this machine, and leave")
    found = parser.parse_args(arguments)
    return WorkerConfig(
        executor=found.executor,
        redis_url=found.redis,
        worker_id=found.worker_id,
        model=found.model,
        kv_mib=found.kv_mib,
        host_kv_mib=found.host_kv_mib,
        slots=found.slots,
        threads=found.threads,
        device=DEVICES[found.device_profile],
        policy=found.policy,
        drain_limit_s=found.drain_limit,
        record=found.record,
        record_mib=found.record_mib,
        self_test=found.self_test,
        torch_device=found.device,
        weights=found.weights,
        spare_weights=found.spare_weights,
        prefix_cache=found.prefix_cache == "on",
    )


def positive(text: str) -> int:
    """An argparse type."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, not {text!r}")
    return number


def sized(device: DeviceProfile, config: WorkerConfig) -> DeviceProfile:
    """The profile with the pools and slots that were asked for."""
    shape = device.shape
    if config.kv_mib is not None:
        shape = replace(shape, num_blocks=max(1, config.kv_mib * MIB // shape.bytes_per_block))
    if config.host_kv_mib is not None:
        shape = replace(shape, num_host_blocks=config.host_kv_mib * MIB // shape.bytes_per_block)
    return replace(device, shape=shape, num_slots=config.slots or device.num_slots)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON leaves open which of two values of one name counts; a policy does not."""
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is there twice")
    return dict(pairs)


def starting_policy(path: Path | None, classes: tuple[ClassPolicy, ClassPolicy, ClassPolicy]) -> PolicySnapshot:
    """The file's policy, or the device's defaults at version 0 until one arrives over the Bus. Raises ConfigError."""
    if path is None:
        return PolicySnapshot(version=0, classes=classes)
    try:
        document = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_each_once)
        return snapshot_from_dict(document.get("policy", document) if isinstance(document, dict) else document)
    except OSError as error:
        raise ConfigError(f"--policy {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--policy {path}: is no JSON in UTF-8: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"--policy {path}: is nested too deeply for a policy") from error
    except (ValueError, TypeError, PolicyError) as error:
        raise ConfigError(f"--policy {path}: {error}") from error
