"""``python -m gpu_worker --self-test``: the real engine over a tiny random model, on whatever this machine has.

Needs torch and nothing else: no model file, no Redis, no Django. Each check is a promise that a worker makes; a text
is right when it is the text that its request gets alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gpu_worker.device.building import assemble
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.kernels import cpu_self_test
from gpu_worker.kernels.checking import KernelMismatch
from gpu_worker.kernels.in_place import decode_attention
from gpu_worker.models.llama import Llama
from gpu_worker.models.random_weights import TINY, RandomWeights
from gpu_worker.serving.outage import say
from gpu_worker.simulated import engine_config
from scheduler_engine.cost import CostConstants
from scheduler_engine.policy import PolicySnapshot, PriorityClass, cpu_classes
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler
from wire.messages import SamplingParameters

NUM_TOKENS = 24
NOT_A_TOKEN = 1 << 20
GREEDY = SamplingParameters(temperature=0.0)
MOST_STEPS = 2_000
STEP_US = 3_000  # every step is said to last so long, so that plans do not depend on this machine
COST = CostConstants(
    base_ns=2_000_000,
    prefill_token_ns=50_000,
    prefill_context_ns=0,
    decode_row_ns=100_000,
    kv_token_ns=100,
    copy_operation_us=1,
    copy_bytes_per_us=5_000,
)


class CheckFailed(AssertionError):
    """A promise was not kept; the sentence says which."""


class Bench:
    """One executor and one engine after the other. Always: books are checked after every step."""

    def __init__(self) -> None:
        self.executor: ModelExecutor = assemble(Llama(RandomWeights(TINY)), kv_mib=1, host_kv_mib=1)
        self.levers: Counter[str] = Counter()
        self.failed: list[str] = []

    def run(
        self, arrivals: Sequence[tuple[int, Request]], num_blocks: int, num_host_blocks: int
    ) -> dict[str, list[int]]:
        """Texts by request. ``arrivals``: (step, request) in order."""
        shape = replace(self.executor.shape, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        policy = PolicySnapshot(version=0, classes=cpu_classes())
        engine = Scheduler(engine_config(shape, num_slots=4), policy, COST)
        texts: dict[str, list[int]] = {request.request_id: [] for _, request in arrivals}
        now_us = num_in = 0
        for step in range(MOST_STEPS):
            while num_in < len(arrivals) and arrivals[num_in][0] <= step:
                engine.submit(arrivals[num_in][1], now_us)
                num_in += 1
            if num_in == len(arrivals) and not engine.has_work:
                return texts
            result = self.executor.execute(engine.plan_step(now_us))
            now_us += STEP_US
            events = engine.apply_step(replace(result, duration_us=STEP_US), now_us)
            engine.check_books()
            self.levers.update(preempted.lever.value for preempted in events.preempted)
            for end in events.finished:
                self.executor.forget(end.request_id)
                self.failed += [end.request_id] if end.reason.value == "failed" else []
            for name, token_id in zip(events.tokens.request_ids, events.tokens.token_ids, strict=True):
                texts[name].append(token_id)
        raise CheckFailed("the work does not end")

    def alone(self, arrivals: Sequence[tuple[int, Request]]) -> dict[str, list[int]]:
        """The same requests one after the other."""
        texts: dict[str, list[int]] = {}
        for _, request in arrivals:
            texts |= self.run([(0, request)], num_blocks=32, num_host_blocks=0)
        return texts


def request(name: str, rank: PriorityClass, prompt: Sequence[int], sampling: SamplingParameters = GREEDY) -> Request:
    return Request(
        request_id=RequestId(name),
        tenant_id=rank.label,
        priority_class=rank,
        prompt_token_ids=prompt,
        max_tokens=NUM_TOKENS,
        sampling=sampling,
    )


def flood_and_chats() -> list[tuple[int, Request]]:
    """Eight long ones at once, and three chats that come into the full pool."""
    arrivals = []
    for index in range(8):
        prompt = [(index * 17 + j * 3 + 1) % TINY.vocab_size for j in range(40 + index)]
        sampling = SamplingParameters(seed=index, top_p=0.9) if index % 3 == 0 else GREEDY
        arrivals.append((0, request(f"bulk {index}", PriorityClass.BATCH, prompt, sampling)))
    for index in range(3):
        prompt = [(index * 29 + j * 5 + 7) % TINY.vocab_size for j in range(60)]
        arrivals.append((9 * index + 9, request(f"chat {index}", PriorityClass.INTERACTIVE, prompt)))
    return arrivals


def pressed(bench: Bench, lever: str, num_host_blocks: int) -> str:
    arrivals, before = flood_and_chats(), bench.levers[lever]
    texts = bench.run(arrivals, num_blocks=24, num_host_blocks=num_host_blocks)
    if bench.levers[lever] == before:
        raise CheckFailed(f"nobody gave way by {lever}")
    if texts != bench.alone(arrivals):
        raise CheckFailed(f"a text changed on its way through {lever}")
    return f"{len(arrivals)} texts in a pool that is too small, each as it is alone"


def poisoned(bench: Bench) -> str:
    good = (0, request("good", PriorityClass.BATCH, [5] * 20))
    bad = (2, request("bad", PriorityClass.BATCH, [5, NOT_A_TOKEN]))
    texts = bench.run([good, bad], num_blocks=32, num_host_blocks=0)
    if bench.failed != ["bad"] or texts["good"] != bench.alone([good])["good"]:
        raise CheckFailed("a request that cannot be computed took more than itself")
    return "a request that cannot be computed ends alone"


def attention(bench: Bench) -> str:
    attend = decode_attention()
    if attend is None:
        return bench.executor.described.rpartition("; attention ")[2]
    found = cpu_self_test.cases(attend)
    for name, check in found:
        try:
            check(torch.device("cpu"), torch.float32)
        except KernelMismatch as error:
            raise CheckFailed(f"{name}: {error}") from error
    return f"reads contexts in place, as its reference has it in {len(found)} cases"


CHECKS: dict[str, Callable[[Bench], str]] = {
    "attention": attention,
    "swap": lambda bench: pressed(bench, "swap", 64),
    "recompute": lambda bench: pressed(bench, "recompute", 0),
    "poison": poisoned,
}


def run() -> int:
    """0 when every promise is kept, 1 with a sentence otherwise."""
    started_s = time.monotonic()
    bench = Bench()
    for name, check in CHECKS.items():
        try:
            say(f"{name}: {check(bench)}")
        except CheckFailed as error:
            say(f"{name}: FAILED: {error}")
            return 1
    say(f"self-test passed in {time.monotonic() - started_s:.1f} s")
    return 0
