"""The flood in real time: thousands of batch requests at once, chats that come into them, engine and device together.

Knows the engine and an executor; there is no gateway and no Redis in it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from benchmarks.figures import quantile
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.simulated import engine_config
from scheduler_engine.cost import CostConstants
from scheduler_engine.policy import PolicySnapshot, PriorityClass, gpu_classes
from scheduler_engine.request import Request, RequestId
from scheduler_engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Story:
    """``alone_s``: batch without chats; ``chats_s``: with them, one every ``every_s``. Tokens: (prompt, output)."""

    num_batch: int = 5_000
    batch: tuple[int, int] = (512, 128)
    chat: tuple[int, int] = (256, 32)
    every_s: float = 0.5
    alone_s: float = 25.0
    chats_s: float = 45.0
    num_slots: int = 256


REHEARSAL = Story(num_batch=4, batch=(12, 3), chat=(6, 2), every_s=2.0, alone_s=2.0, chats_s=4.0, num_slots=2)
REHEARSED_COST = CostConstants(
    base_ns=200_000_000,
    prefill_token_ns=10_000_000,
    prefill_context_ns=0,
    decode_row_ns=100_000_000,
    kv_token_ns=100,
    copy_operation_us=1,
    copy_bytes_per_us=1_000,
)


@dataclass(slots=True)
class _Seen:
    """When tokens came, by class. ``ttft_us`` from arrival; gaps between tokens of one request."""

    arrived_us: dict[str, int] = field(default_factory=dict)
    last_us: dict[str, int] = field(default_factory=dict)
    ttft_us: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    gap_us: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    tokens: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    preempted: int = 0

    def token(self, name: str, now_us: int) -> None:
        kind = name.partition(" ")[0]
        self.tokens[kind] += 1
        if name in self.last_us:
            self.gap_us[kind].append(now_us - self.last_us[name])
        else:
            self.ttft_us[kind].append(now_us - self.arrived_us[name])
        self.last_us[name] = now_us


class Flood:
    """Always: time is the machine's own; what is unfinished when a phase ends is cancelled."""

    def __init__(self, executor: ModelExecutor, cost: CostConstants, story: Story) -> None:
        self._executor, self._cost, self._story = executor, cost, story

    def run(self) -> dict[str, Any]:
        alone, through = self._phase(self._story.alone_s, False), self._phase(self._story.chats_s, True)
        return {
            "batch_tokens_per_s_alone": alone["batch_tokens_per_s"],
            **through,
            "batch_share": round(through["batch_tokens_per_s"] / max(1, alone["batch_tokens_per_s"]), 3),
        }

    def _phase(self, seconds: float, with_chats: bool) -> dict[str, Any]:
        config = engine_config(self._executor.shape, self._story.num_slots)
        engine, seen = Scheduler(config, PolicySnapshot(version=0, classes=gpu_classes()), self._cost), _Seen()
        started_ns = time.perf_counter_ns()
        for index in range(self._story.num_batch):
            self._submit(engine, seen, f"batch {index}", PriorityClass.BATCH, self._story.batch, 0)
        num_chats = now_us = 0
        while engine.has_work and now_us < seconds * 1e6:
            while with_chats and num_chats * self._story.every_s * 1e6 <= now_us:
                self._submit(engine, seen, f"chat {num_chats}", PriorityClass.INTERACTIVE, self._story.chat, now_us)
                num_chats += 1
            result = self._executor.execute(engine.plan_step(now_us))
            now_us = (time.perf_counter_ns() - started_ns) // 1_000
            events = engine.apply_step(result, now_us)
            seen.preempted += len(events.preempted)
            for name in events.tokens.request_ids:
                seen.token(name, now_us)
            for end in events.finished:
                self._executor.forget(end.request_id)
        return self._figures(seen, now_us, num_chats)

    def _submit(
        self, engine: Scheduler, seen: _Seen, name: str, rank: PriorityClass, size: tuple[int, int], now_us: int
    ) -> None:
        prompt = [(len(seen.arrived_us) * 31 + position * 7 + 1) % 256 for position in range(size[0])]
        seen.arrived_us[name] = now_us
        engine.submit(
            Request(
                request_id=RequestId(name),
                tenant_id=rank.label,
                priority_class=rank,
                prompt_token_ids=prompt,
                max_tokens=size[1],
            ),
            now_us,
        )

    def _figures(self, seen: _Seen, now_us: int, num_chats: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "seconds": round(now_us / 1e6, 1),
            "batch_tokens_per_s": round(seen.tokens["batch"] / max(1, now_us) * 1e6, 1),
            "preemptions": seen.preempted,
        }
        if num_chats:
            found |= {
                "chats": num_chats,
                "chats_answered": len(seen.ttft_us["chat"]),
                "chat_ttft_p50_ms": _ms(seen.ttft_us["chat"], 0.5),
                "chat_ttft_p99_ms": _ms(seen.ttft_us["chat"], 0.99),
                "chat_gap_p99_ms": _ms(seen.gap_us["chat"], 0.99),
                "batch_gap_p99_ms": _ms(seen.gap_us["batch"], 0.99),
            }
        return found


def _ms(durations_us: list[int], share: float) -> float | None:
    value = quantile(durations_us, share)
    return None if value is None else round(value / 1e3, 1)
