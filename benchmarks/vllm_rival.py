"""vLLM's own scheduler class on a virtual clock, driven over standard input and output by ``benchmarks/rival.py``.

Runs in a virtual environment that has vLLM and nothing of ours: standard library, torch and vLLM alone. One JSON object
a line each way.
"""

from __future__ import annotations

import heapq
import json
import math
import sys
import tempfile
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

SECOND_US = 1_000_000
TOKEN = 7


def answer(found: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def tiny_model(folder: Path) -> str:
    """A configuration that vLLM accepts; no weights are ever looked for."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 1, "num_key_value_heads": 1}
    rest = {"num_hidden_layers": 1, "vocab_size": 32_000, "max_position_embeddings": 65_536, "torch_dtype": "float32"}
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **shape, **rest})
    )
    return str(folder)


def make_scheduler(model: str, flags: dict[str, Any], *, num_blocks: int, max_model_len: int) -> Scheduler:
    """``flags`` are fields of SchedulerConfig. Prefix caching is off: no two prompts share anything."""
    scheduler_config = SchedulerConfig(
        max_model_len=max_model_len,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
        **flags,
    )
    config = VllmConfig(
        model_config=ModelConfig(model=model, skip_tokenizer_init=True, dtype="float32", max_model_len=max_model_len),
        scheduler_config=scheduler_config,
        cache_config=CacheConfig(block_size=16, gpu_memory_utilization=0.9, enable_prefix_caching=False),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )


def request(name: str, prompt: int, output: int, priority: int, at_us: int) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=[TOKEN] * prompt,
        sampling_params=SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0),
        pooling_params=None,
        priority=priority,
        arrival_time=at_us / SECOND_US,
    )


def output_of(scheduler: Scheduler, names: list[str]) -> ModelRunnerOutput:
    """One made-up token for every row that reached its newest token."""
    requests = scheduler.requests
    tokens = [[] if requests[name].num_computed_tokens < requests[name].num_tokens else [TOKEN] for name in names]
    return ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=tokens
    )


def steady(model: str, asked: dict[str, Any]) -> dict[str, Any]:
    """CPU nanoseconds of quiet steps: everybody decodes, ``waiting`` more wait behind a full set of slots."""
    running, steps, prompt = asked["running"], asked["steps"], asked["prompt"]
    blocks = running * ((prompt + steps + 64) // 16 + 2) + 1_000
    flags = {"max_num_seqs": running, "max_num_batched_tokens": max(8_192, 2 * running), "policy": "priority"}
    scheduler = make_scheduler(model, flags, num_blocks=blocks, max_model_len=65_536)
    for number in range(running):
        scheduler.add_request(request(f"r{number}", prompt, 60_000, 0, number))
    for _ in range(4_000):
        names = list((decided := scheduler.schedule()).num_scheduled_tokens)
        scheduler.update_from_output(decided, output_of(scheduler, names))
        if len(names) == running and set(decided.num_scheduled_tokens.values()) == {1}:
            break
    for number in range(asked["waiting"]):
        scheduler.add_request(request(f"w{number}", prompt, 64, 0, running + number))
    plan_ns, apply_ns = [], []
    for _ in range(steps):
        started = time.process_time_ns()
        decided = scheduler.schedule()
        planned = time.process_time_ns()
        output = output_of(scheduler, list(decided.num_scheduled_tokens))
        computed = time.process_time_ns()
        scheduler.update_from_output(decided, output)
        apply_ns.append(time.process_time_ns() - computed)
        plan_ns.append(planned - started)
    return {"plan_ns": plan_ns, "apply_ns": apply_ns, "rows": len(decided.num_scheduled_tokens)}


class Night:
    """A story told to vLLM's scheduler. Always: the clock moves by what the cost model says of each step."""

    def __init__(self, model: str, asked: dict[str, Any]) -> None:
        self.cost: dict[str, int] = asked["cost"]
        self.until_us: int = asked["until_us"]
        self.arrivals: list[tuple[int, str, str, int, int, int]] = [tuple(each) for each in asked["arrivals"]]
        heapq.heapify(self.arrivals)
        self.batch_in_flight: float = asked["batch_in_flight"] or math.inf  # the clients' own cap
        self.held_back: deque[tuple[int, str, str, int, int, int]] = deque()
        self.num_batch = 0
        self.scheduler = make_scheduler(
            model, asked["flags"], num_blocks=asked["num_blocks"] + 1, max_model_len=asked["max_model_len"]
        )  # one block is vLLM's own null block
        self.now_us = 0
        self.class_of: dict[str, str] = {}
        self.arrived_us: dict[str, int] = {}
        self.last_us: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.ttft: dict[str, Counter[int]] = {}
        self.gaps: dict[str, Counter[int]] = {}
        self.work_ns: Counter[str] = Counter()
        self.recomputed = 0
        self.preempted: Counter[str] = Counter()

    def run(self) -> dict[str, Any]:
        while self.now_us < self.until_us and (self.arrivals or self.held_back or self.scheduler.requests):
            while self.arrivals and self.arrivals[0][0] <= self.now_us:
                arrival = heapq.heappop(self.arrivals)
                if arrival[2] == "batch":
                    self.held_back.append(arrival)
                else:
                    self._send(arrival)
            while self.held_back and self.num_batch < self.batch_in_flight:
                self._send(self.held_back.popleft())
            self._step()
        return {
            "classes": {
                label: {"ttft_us": list(self.ttft[label].items()), "gaps_us": list(self.gaps[label].items())}
                for label in self.ttft
            },
            "work_us": {label: work // 1_000 for label, work in self.work_ns.items()},
            "recomputed_tokens": self.recomputed,
            "preemptions": self.preempted.total(),
            "preempted_most": max(self.preempted.values(), default=0),
        }

    def _send(self, arrival: tuple[int, str, str, int, int, int]) -> None:
        at_us, name, label, prompt, output, priority = arrival
        self.class_of[name], self.arrived_us[name] = label, at_us
        self.num_batch += label == "batch"
        self.scheduler.add_request(request(name, prompt, output, priority, at_us))

    def _step(self) -> None:
        decided = self.scheduler.schedule()
        counts: dict[str, int] = decided.num_scheduled_tokens
        requests = self.scheduler.requests
        for name in decided.preempted_req_ids or ():
            self.preempted[name] += 1
        if not counts:
            self._idle(decided)
            return
        starts = {name: requests[name].num_computed_tokens - count for name, count in counts.items()}
        self.now_us += self._step_us(counts, starts)
        for name, count in counts.items():
            self._progress(name, starts[name], count)
        names = list(counts)
        output = output_of(self.scheduler, names)
        for name, tokens in zip(names, output.sampled_token_ids, strict=True):
            if tokens:
                self._token(name)
        self.scheduler.update_from_output(decided, output)
        self.num_batch -= sum(name not in requests and self.class_of[name] == "batch" for name in names)

    def _idle(self, decided: Any) -> None:
        """Nothing to compute: on to the next arrival. vLLM schedules nobody new in a step that preempted somebody."""
        self.scheduler.update_from_output(decided, output_of(self.scheduler, []))
        if not decided.preempted_req_ids:
            if not self.arrivals:
                raise RuntimeError(f"{len(self.scheduler.requests)} requests, nothing scheduled and nobody to come")
            self.now_us = max(self.now_us, self.arrivals[0][0])

    def _step_us(self, counts: dict[str, int], starts: dict[str, int]) -> int:
        cost = self.cost
        total_ns = cost["base_ns"]
        for name, count in counts.items():
            total_ns += cost["kv_token_ns"] * (starts[name] + count)
            if count == 1:
                total_ns += cost["decode_row_ns"]
            else:
                total_ns += count * (cost["prefill_token_ns"] + cost["prefill_context_ns"] * starts[name])
        return -(-total_ns // 1_000)

    def _progress(self, name: str, start: int, count: int) -> None:
        """Work done for the first time, as ``CostConstants.row_ns`` counts it."""
        cost, before, end = self.cost, self.computed.get(name, 0), start + count
        self.recomputed += min(end, before) - min(start, before)
        new = end - before
        if new <= 0:
            return
        self.computed[name] = end
        if new == 1:
            work_ns = cost["decode_row_ns"] + cost["kv_token_ns"] * end
        else:
            work_ns = new * (cost["prefill_token_ns"] + cost["prefill_context_ns"] * before) + cost["kv_token_ns"] * end
        self.work_ns[self.class_of[name]] += work_ns

    def _token(self, name: str) -> None:
        label, last_us = self.class_of[name], self.last_us.get(name)
        if last_us is None:
            self.ttft.setdefault(label, Counter())[self.now_us - self.arrived_us[name]] += 1
            self.gaps.setdefault(label, Counter())
        else:
            self.gaps[label][self.now_us - last_us] += 1
        self.last_us[name] = self.now_us


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="rival-") as folder:
        model = tiny_model(Path(folder))
        answer({"rival": "vllm", "version": vllm.__version__})
        for line in sys.stdin:
            asked = json.loads(line)
            answer(steady(model, asked) if asked["do"] == "steady" else Night(model, asked).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
