"""What a known prefix saves: time to the first token of a prompt that is new, of the same prompt once more, and of a
chat's second turn, which begins with the first prompt and the answer.

The worker's loop on the model of ``--model``, in this process, without Redis and without a gateway.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import machine, quantile, report, say
from gpu_worker.answers.prefix_keys import PrefixKeys
from gpu_worker.clock import MonotonicClock
from gpu_worker.demo_model import DEFAULT_FOLDER, DEMO
from gpu_worker.device.building import build
from gpu_worker.loop import WorkerLoop
from gpu_worker.simulated import BYTE_TOKENS, engine_config
from gpu_worker.telling.telemetry import Telemetry, WorkerIdentity
from scheduler_engine.policy import PolicySnapshot, PriorityClass, cpu_classes
from scheduler_engine.scheduler import Scheduler
from wire.messages import SamplingParameters, Submit

NUM_NEW_TOKENS = 16  # of each prompt, behind the prefix
NUM_ANSWER_TOKENS = 64
NUM_TOKEN_IDS = 256


class Bench:
    """Always: one request at a time, and an empty cache at the beginning."""

    def __init__(self, model: Path, kv_mib: int) -> None:
        executor = build(model, kv_mib=kv_mib, host_kv_mib=1, threads=0)
        self._clock = MonotonicClock()
        config = engine_config(executor.shape, num_slots=8)
        policy = PolicySnapshot(version=0, classes=cpu_classes())
        self._loop = WorkerLoop(
            identity=WorkerIdentity(worker_id="bench", epoch=1, model="bench", max_model_len=config.max_model_len),
            scheduler=Scheduler(config, policy, executor.calibrate()),
            executor=executor,
            clock=self._clock,
            token_bytes=BYTE_TOKENS,
            telemetry=Telemetry(),
            prefix_keys=PrefixKeys(secrets.token_bytes(32), config.block_size),
        )
        self._num_asked = 0

    def ask(self, prompt: Sequence[int], num_answer_tokens: int = 1) -> tuple[int, int, Sequence[int]]:
        """Microseconds to the first token, tokens of the prompt that were found, and the answer."""
        self._num_asked += 1
        submit = Submit(
            response_id=f"response-{self._num_asked}",
            attempt=1,
            gateway_id="bench",
            tenant_id="aurora",
            project_id="project",
            key_id="key",
            priority_class=PriorityClass.INTERACTIVE,
            model="bench",
            prompt_token_ids=tuple(prompt),
            max_tokens=num_answer_tokens,
            cache_salt="aurora",
            sampling=SamplingParameters(temperature=0.0),
        )
        self._loop.take_in(submit, self._clock.now_us())
        while True:
            output = self._loop.turn().output
            for usage in output.usages:
                (answer,) = output.outputs[submit.response_id].token_ids
                return usage.counters.ttft_us or 0, usage.cached_tokens, answer


def new_tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(NUM_TOKEN_IDS) for _ in range(NUM_NEW_TOKENS)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.prefix", description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_FOLDER / Path(DEMO.member).name, metavar="PATH")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that two prompts have in common")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    if found.prefix < 1 or found.repeats < 1:
        parser.error("--prefix and --repeats must be at least 1")
    if not found.model.exists():
        parser.error(f"there is no model at {found.model}: make model fetches one, --model names another")
    say(f"{found.repeats} prompts of {found.prefix} + {NUM_NEW_TOKENS} tokens, each prefix asked twice")
    bench, rng = Bench(found.model, kv_mib=256), random.Random(0)
    misses: list[float] = []
    hits: list[float] = []
    turns: list[float] = []
    cached = turn_cached = 0
    for _ in range(found.repeats):
        prefix = [rng.randrange(NUM_TOKEN_IDS) for _ in range(found.prefix)]
        for durations in (misses, hits):
            ttft_us, cached, _ = bench.ask(prefix + new_tokens(rng))
            durations.append(ttft_us)
        first = prefix + new_tokens(rng)
        _, _, answer = bench.ask(first, NUM_ANSWER_TOKENS)
        ttft_us, turn_cached, _ = bench.ask([*first, *answer, *new_tokens(rng)])
        turns.append(ttft_us)
    miss_us, hit_us, turn_us = (quantile(durations, 0.5) or 0 for durations in (misses, hits, turns))
    result = {
        "bench": "prefix",
        "prefix_tokens": found.prefix,
        "cached_tokens": cached,
        "ttft_miss_ms_p50": round(miss_us / 1_000, 2),
        "ttft_hit_ms_p50": round(hit_us / 1_000, 2),
        "hit_over_miss": round(hit_us / max(1, miss_us), 3),
        "second_turn_tokens": found.prefix + 2 * NUM_NEW_TOKENS + NUM_ANSWER_TOKENS,
        "second_turn_cached_tokens": turn_cached,
        "ttft_second_turn_ms_p50": round(turn_us / 1_000, 2),
        "second_turn_over_miss": round(turn_us / max(1, miss_us), 3),
        **machine(),
    }
    report(result, as_json=found.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
