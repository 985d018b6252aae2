"""``python -m gpu_worker``: load, calibrate, serve until SIGTERM, then drain and leave with 0."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from gpu_worker.answers.grammars import GrammarCompiler
from gpu_worker.answers.prefix_keys import PrefixKeys
from gpu_worker.clock import Clock, MonotonicClock
from gpu_worker.config import MIB, ConfigError, WorkerConfig, parse, sized, starting_policy
from gpu_worker.executor import DeviceLost, Executor
from gpu_worker.loop import WorkerLoop
from gpu_worker.serving.garbage import keep_out_of_steps
from gpu_worker.serving.outage import say
from gpu_worker.serving.service import WorkerService
from gpu_worker.simulated import BYTE_TOKENS, SimulatedExecutor, engine_config, readable_tokens
from gpu_worker.telling.telemetry import Telemetry, WorkerIdentity
from scheduler_engine.config import EngineConfig
from scheduler_engine.cost import CostConstants
from scheduler_engine.policy import PolicySnapshot
from scheduler_engine.scheduler import Scheduler
from wire.bus import WorkerBus
from wire.gguf_header import ModelFileError
from wire.grammars import is_supported
from wire.messages import GRAMMAR, LOGPROBS
from wire.redis_bus import RedisWorkerBus
from wire.vocabulary import load as load_vocabulary

if TYPE_CHECKING:
    from gpu_worker.replay.recording import Recorder
    from wire.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Device:
    """A device that is ready to be planned for."""

    executor: Executor
    engine: EngineConfig
    cost: CostConstants
    model: str
    token_bytes: Sequence[bytes]
    grammars: GrammarCompiler | None = None
    features: tuple[str, ...] = ()


def open_device(config: WorkerConfig, clock: Clock) -> Device:
    """Load and calibrate. Raises ConfigError, ModelFileError or WeightsError with a sentence."""
    vocabulary = None if config.model is None else load_vocabulary(config.model)
    if config.executor == "simulated":
        return _simulated_device(config, clock, vocabulary)
    if config.model is None or vocabulary is None:
        raise ConfigError("--executor model needs --model PATH: a GGUF file or a Hugging Face folder")
    # Read when torch loads OpenMP. Threads that spin at a barrier made steps 4x as long beside one busy neighbour.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from gpu_worker.device.building import build  # torch: only where a model is run

    executor = build(
        config.model,
        kv_mib=config.kv_mib,
        host_kv_mib=config.host_kv_mib or 192,
        threads=config.threads or 0,
        device=config.torch_device,
        precision=config.weights,
        spare_weights=config.spare_weights,
    )
    say(f"worker {config.worker_id}: {executor.described}")
    engine = engine_config(executor.shape, config.slots or config.device.num_slots)
    grammars, features = None, [LOGPROBS]
    if is_supported() and vocabulary.stop_token_ids:
        grammars = GrammarCompiler(vocabulary.token_bytes, vocabulary.stop_token_ids)
        features.append(GRAMMAR)
    cost = executor.calibrate()
    return Device(executor, engine, cost, vocabulary.name, vocabulary.token_bytes, grammars, tuple(features))


def _simulated_device(config: WorkerConfig, clock: Clock, vocabulary: Vocabulary | None) -> Device:
    profile = sized(config.device, config)
    token_bytes = BYTE_TOKENS if vocabulary is None else vocabulary.token_bytes
    stops = () if vocabulary is None else vocabulary.stop_token_ids
    executor = SimulatedExecutor(profile, clock, alphabet=readable_tokens(token_bytes, stops))
    name = "simulated" if vocabulary is None else vocabulary.name
    return Device(executor, profile.engine_config(), profile.cost, name, token_bytes)


def build_service(
    config: WorkerConfig,
    device: Device,
    policy: PolicySnapshot,
    bus: WorkerBus,
    clock: Clock,
    recorder: Recorder | None = None,
) -> WorkerService:
    """The service; each epoch gets a fresh engine and fresh counters."""

    def engine_of(epoch: int) -> Scheduler:
        made_of = (device.engine, policy, device.cost)
        return Scheduler(*made_of) if recorder is None else recorder.scheduler(*made_of, epoch=epoch)

    def make_loop(epoch: int) -> WorkerLoop:
        return WorkerLoop(
            identity=WorkerIdentity(
                worker_id=config.worker_id,
                epoch=epoch,
                model=device.model,
                max_model_len=device.engine.max_model_len,
                features=device.features,
                num_cache_tokens=device.engine.num_blocks * device.engine.block_size,
                bytes_per_block=device.engine.bytes_per_block,
                version=software_version(),
            ),
            scheduler=engine_of(epoch),
            executor=device.executor,
            clock=clock,
            token_bytes=device.token_bytes,
            telemetry=Telemetry(),
            policy_version=policy.version,
            grammars=device.grammars,
            prefix_keys=PrefixKeys(secrets.token_bytes(32), device.engine.block_size) if config.prefix_cache else None,
        )

    def on_ready(epoch: int) -> None:
        engine = device.engine
        mib = engine.num_blocks * engine.bytes_per_block // MIB
        say(
            f"worker {config.worker_id} ready: {device.model}, {engine.num_blocks} KV blocks ({mib} MiB), "
            f"{engine.num_host_blocks} on the host, {engine.num_slots} slots, epoch {epoch}"
        )

    return WorkerService(
        bus=bus, make_loop=make_loop, clock=clock, drain_limit_s=config.drain_limit_s, on_ready=on_ready
    )


def software_version() -> str:
    """Of the installed package; "source" where it runs from a folder."""
    try:
        return version("rubato")
    except PackageNotFoundError:
        return "source"


def _recorder(config: WorkerConfig, device: Device) -> Recorder | None:
    if config.record is None:
        return None
    from gpu_worker.replay.recording import Recorder  # msgspec: only where a log is written

    return Recorder(config.record, config.record_mib * MIB, worker_id=config.worker_id, model=device.model)


def main(arguments: Sequence[str] | None = None) -> int:
    config = parse(arguments)
    if config.self_test:
        from gpu_worker import self_test  # torch: only where a model is run

        return self_test.run()
    clock = MonotonicClock()
    try:
        device = open_device(config, clock)
        policy = starting_policy(config.policy, config.device.classes)
    except (ConfigError, ModelFileError) as error:
        say(f"gpu_worker: {error}")
        return 2
    recorder = _recorder(config, device)
    bus = RedisWorkerBus(config.redis_url, config.worker_id)
    service = build_service(config, device, policy, bus, clock, recorder)
    signal.signal(signal.SIGTERM, lambda number, frame: service.ask_drain())
    signal.signal(signal.SIGINT, lambda number, frame: service.ask_drain())
    signal.signal(signal.SIGUSR1, lambda number, frame: service.ask_dump())
    keep_out_of_steps()
    try:
        all_sent = service.run()
    except DeviceLost as error:
        say(f"gpu_worker: {error}; the worker ends, its requests are taken up elsewhere")
        return 1
    finally:
        if recorder is not None:
            recorder.close()
    device.executor.close()
    return 0 if all_sent else 1


if __name__ == "__main__":
    sys.exit(main())
