"""One small worker for the tests of the loop and its threads: the toy device, the real engine, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from gpu_worker.clock import Clock
from gpu_worker.loop import WorkerLoop
from gpu_worker.simulated import BYTE_TOKENS, DEVICES, SimulatedExecutor
from gpu_worker.telling.telemetry import Telemetry, WorkerIdentity
from scheduler_engine.policy import PolicySnapshot, PriorityClass, gpu_classes
from scheduler_engine.scheduler import Scheduler
from tests.gpu_worker.service_stage import Stage
from wire.messages import Submit


class SmallWorker:
    """Builds loops and submits. Always: text of an executor with alphabet "a" is a row of a's."""

    def loop(
        self,
        clock: Clock,
        *,
        epoch: int = 1,
        alphabet: str = "abc",
        scale: float = 1.0,
        executor: Any = None,
        grammars: Any = None,
    ) -> WorkerLoop:
        device = DEVICES["toy"]
        letters: Sequence[int] = alphabet.encode()
        return WorkerLoop(
            identity=WorkerIdentity(worker_id="w1", epoch=epoch, model="toy", max_model_len=device.shape.max_model_len),
            scheduler=Scheduler(device.engine_config(), PolicySnapshot(version=1, classes=gpu_classes()), device.cost),
            executor=executor or SimulatedExecutor(device, clock, alphabet=letters, scale=scale),
            clock=clock,
            token_bytes=BYTE_TOKENS,
            telemetry=Telemetry(),
            policy_version=1,
            grammars=grammars,
        )

    def submit(self, response_id: str = "r1", **changes: Any) -> Submit:
        fields: dict[str, Any] = {
            "response_id": response_id,
            "attempt": 1,
            "gateway_id": "g1",
            "tenant_id": "aurora",
            "project_id": "p1",
            "key_id": "k1",
            "priority_class": PriorityClass.INTERACTIVE,
            "model": "toy",
            "prompt_token_ids": tuple(b"hello"),
            "max_tokens": 4,
        }
        return Submit(**{**fields, **changes})


@pytest.fixture(scope="session")
def small_worker() -> SmallWorker:
    return SmallWorker()


@pytest.fixture
def stage(small_worker: SmallWorker) -> Iterator[Stage]:
    stage = Stage(small_worker)
    stage.start()
    yield stage
    stage.stop()
