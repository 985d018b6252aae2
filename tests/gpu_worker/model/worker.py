"""A whole worker loop over the real model, without threads: Submits in, messages out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpu_worker.clock import Clock, MonotonicClock
from gpu_worker.device.model_executor import ModelExecutor
from gpu_worker.loop import WorkerLoop
from gpu_worker.simulated import BYTE_TOKENS, engine_config
from gpu_worker.telling.telemetry import Telemetry, WorkerIdentity
from scheduler_engine.cost import CostConstants
from scheduler_engine.policy import PolicySnapshot, PriorityClass, cpu_classes
from scheduler_engine.scheduler import Scheduler
from wire.messages import Finished, Rejected, Submit, TokenLogprob, Tokens, Usage

COST = CostConstants(
    base_ns=2_000_000,
    prefill_token_ns=50_000,
    prefill_context_ns=0,
    decode_row_ns=100_000,
    kv_token_ns=100,
    copy_operation_us=1,
    copy_bytes_per_us=5_000,
)


class ModelWorker:
    """Always: books are checked after every turn; ``tokens`` and ``logprobs`` are by (response, choice)."""

    def __init__(
        self,
        executor: ModelExecutor,
        *,
        num_slots: int = 8,
        num_blocks: int | None = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        self.executor = executor
        self.clock = clock or MonotonicClock()
        self.may_repeat = False  # where an Attach asks for tokens once more
        self.num_ends = 0
        shape = replace(executor.shape, num_blocks=num_blocks or executor.shape.num_blocks)
        self.loop = WorkerLoop(
            identity=WorkerIdentity(worker_id="w1", epoch=1, model="tiny", max_model_len=shape.max_model_len),
            scheduler=Scheduler(
                engine_config(shape, num_slots), PolicySnapshot(version=1, classes=cpu_classes()), COST
            ),
            executor=executor,
            clock=self.clock,
            token_bytes=BYTE_TOKENS,
            telemetry=Telemetry(),
            **options,
        )
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.logprobs: dict[tuple[str, int], list[TokenLogprob | None]] = {}
        self.ends: dict[str, Finished | Rejected] = {}
        self.usages: dict[str, Usage] = {}

    def submit(self, response_id: str, prompt: Any = (1, 2, 3), **fields: Any) -> None:
        given: dict[str, Any] = {
            "response_id": response_id,
            "attempt": 1,
            "gateway_id": "g1",
            "tenant_id": "aurora",
            "project_id": "p1",
            "key_id": "k1",
            "priority_class": PriorityClass.INTERACTIVE,
            "model": "tiny",
            "prompt_token_ids": tuple(prompt),
            "max_tokens": 8,
        }
        self.take_in(Submit(**{**given, **fields}))

    def take_in(self, message: Any) -> None:
        self.loop.take_in(message, self.clock.now_us())

    def turn(self) -> None:
        turn = self.loop.turn()
        self.loop.check_books()
        for message in (message for messages in turn.output.to_gateways.values() for message in messages):
            if isinstance(message, Tokens):
                self._hear(message)
            elif isinstance(message, Finished | Rejected):
                self.ends[message.response_id] = message
                self.num_ends += 1
        self.usages.update((usage.response_id, usage) for usage in turn.output.usages)

    def _hear(self, tokens: Tokens) -> None:
        logprobs = tokens.logprobs or (None,) * len(tokens.token_ids)
        columns = (tokens.response_ids, tokens.choices, tokens.first_indexes, tokens.token_ids, logprobs)
        for response_id, choice, first, token_ids, own in zip(*columns, strict=True):
            key = (response_id, choice)
            said = self.tokens.setdefault(key, [])
            num_again = len(said) - first
            assert num_again == 0 or (self.may_repeat and num_again > 0)
            assert said[first:] == list(token_ids[:num_again])
            said += token_ids[num_again:]
            self.logprobs.setdefault(key, []).extend(own or ())

    def run(self, num_turns: int = 500) -> None:
        """To the end of all work."""
        for _ in range(num_turns):
            if not self.loop.has_work:
                return
            self.turn()
        raise AssertionError("the work does not end")
