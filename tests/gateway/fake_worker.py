"""A worker that does what a test scripts, on the real Bus."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scheduler_engine.policy import PriorityClass
from tests.loads import quiet_class, quiet_load
from wire.bus import BadEntry, Fenced, FinishedOutput, StepOutput
from wire.messages import (
    GRAMMAR,
    LOGPROBS,
    Attach,
    Cancel,
    ChoiceEnd,
    ChoiceFinished,
    EngineCounters,
    Finished,
    LoadSnapshot,
    Rejected,
    Submit,
    ToGateway,
    TokenLogprob,
    Tokens,
    ToWorker,
    Usage,
)
from wire.redis_bus import RedisWorkerBus
from wire.redis_keys import Keys

MODEL = "simulated"
COUNTERS = EngineCounters(queue_us=2_000, total_us=9_000)


@dataclass(slots=True)
class Script:
    """What the worker does with a Submit."""

    answer: bytes | Sequence[int] = b"Hello, Aurora."
    reason: str = "stop"
    visible_bytes: int | None = None
    reject: tuple[str, int | None] | None = None
    hang: bool = False  # takes the work and never says anything
    tokens_per_step: int = 1
    logprobs: bool = True  # made-up ones, where they are asked for
    prompt_first: bool = False  # stays in prefill until told otherwise
    counters: EngineCounters = COUNTERS


@dataclass(slots=True)
class _Work:
    submit: Submit
    script: Script
    gateway_id: str
    done: int = 0
    sent: int = 0

    @property
    def limit(self) -> int:
        return min(len(self.script.answer), self.submit.max_tokens)

    @property
    def choices(self) -> range:
        return range(self.submit.num_choices)

    def answer_of(self, choice: int) -> Sequence[int]:
        """Siblings say the same, each behind as many marks as its number; the longest is the last to end."""
        return bytes(self.script.answer[: self.limit - choice])


class FakeWorker:
    """Speaks the worker's side of the Bus from a thread of its own, one step per ``step_s``."""

    def __init__(self, url: str, keys: Keys, worker_id: str = "worker-1") -> None:
        self.bus = RedisWorkerBus(url, worker_id, keys=keys)
        self.script = Script()
        self.step_s = 0.0
        self.listen_s = 0.001  # between steps; with a server it lasts until its next tick, up to 100 ms; 0: no wait
        self.step = 0
        self.submits: list[Submit] = []
        self.cancels: list[tuple[int, Cancel]] = []
        self.attaches: list[Attach] = []
        self.generated: dict[str, int] = {}
        self.last_step: dict[str, int] = {}
        self.closed: dict[PriorityClass, int | None] = {}
        self.max_model_len = 32_768
        self.features: tuple[str, ...] = (LOGPROBS, GRAMMAR)
        self.num_cache_tokens = 0
        self.beating = True
        self._restart_asked = threading.Event()
        self._works: dict[str, _Work] = {}
        self._stop = threading.Event()
        self.epoch = self.bus.open()
        self._thread = threading.Thread(target=self._run, name="fake worker")

    def go_on(self) -> None:
        """End every prefill that was held."""
        for work in self._works.values():
            work.script.prompt_first = False

    def answer_to(self, gateway_id: str) -> None:
        """All that is under way goes to this gateway from now on."""
        for work in list(self._works.values()):
            work.gateway_id = gateway_id

    def freeze(self) -> None:
        """No more snapshots and no more tokens, like a process that was stopped."""
        self.beating = False
        for work in self._works.values():
            work.script.hang = True

    def restart(self) -> None:
        """Come back under a new epoch, knowing nothing any more; returns once that is so."""
        self._restart_asked.set()
        while self._restart_asked.is_set():
            time.sleep(0.001)

    def _restart(self) -> None:
        self._works.clear()
        self.epoch = self.bus.open()
        self._restart_asked.clear()

    def start(self) -> None:
        self.bus.publish_load(self.load())
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self.bus.close()

    def load(self) -> LoadSnapshot:
        rows = tuple(
            quiet_class(each, closed=each in self.closed, retry_after_us=self.closed.get(each))
            for each in PriorityClass
        )
        return quiet_load(
            worker_id=self.bus.worker_id,
            epoch=self.epoch,
            model=MODEL,
            max_model_len=self.max_model_len,
            step=self.step,
            classes=rows,
            features=self.features,
            num_cache_tokens=self.num_cache_tokens,
        )

    def _run(self) -> None:
        """Until stopped, or declared dead."""
        with contextlib.suppress(Fenced):
            self._serve()

    def _serve(self) -> None:
        beat_at = 0.0
        while not self._stop.is_set():
            if self._restart_asked.is_set():
                self._restart()
            if self.beating and time.monotonic() >= beat_at:
                self.bus.publish_load(self.load())
                beat_at = time.monotonic() + 0.05
            for message in self.bus.receive(self.listen_s if self._works else 0.02):
                self._take(message)
            self._advance()
            if self.step_s:
                time.sleep(self.step_s)

    def _take(self, message: ToWorker | BadEntry) -> None:
        match message:
            case Submit():
                delivered = len(message.delivered_token_ids[0]) if message.delivered_token_ids else 0
                work = _Work(message, replace(self.script), message.gateway_id, delivered, delivered)
                self._works[message.response_id] = work
                self.submits.append(message)
            case Attach():
                attached = self._works.get(message.response_id)
                if attached is not None and attached.submit.attempt == message.attempt:
                    self.attaches.append(message)
                    attached.gateway_id, attached.sent = message.gateway_id, message.from_index
            case Cancel():
                self.cancels.append((self.step, message))
                work = self._works.get(message.response_id)
                if work is not None and not work.script.hang and work.submit.attempt == message.attempt:
                    self._cancelled(work, message.reason)
            case _:
                pass

    def _cancelled(self, work: _Work, reason: str) -> None:
        messages, usage = self._end(work, "cancelled")
        (finished,) = messages
        assert isinstance(finished, Finished)
        assert usage is not None
        terminal = "cancelled_client" if reason == "client" else "failed_platform"
        choices = tuple(replace(end, detail=reason) for end in finished.choices)
        finished = replace(finished, choices=choices)
        outputs = {work.submit.response_id: self._output(work, finished)}
        usages = [replace(usage, terminal=terminal)]
        self.bus.publish(StepOutput({work.gateway_id: [finished]}, usages, outputs))

    def _advance(self) -> None:
        ready = [w for w in self._works.values() if not w.script.hang and not w.script.prompt_first]
        if not ready:
            return
        self.step += 1
        by_gateway: dict[str, list[ToGateway]] = {}
        usages: list[Usage] = []
        outputs: dict[str, FinishedOutput] = {}
        for work in ready:
            messages, usage = self._one_step(work)
            by_gateway.setdefault(work.gateway_id, []).extend(messages)
            if usage is not None:
                usages.append(usage)
            if messages and isinstance(messages[-1], Finished):
                outputs[work.submit.response_id] = self._output(work, messages[-1])
        self.bus.publish(StepOutput(to_gateways=by_gateway, usages=usages, outputs=outputs))

    def _output(self, work: _Work, finished: Finished) -> FinishedOutput:
        return FinishedOutput(finished, [list(work.answer_of(choice)[: work.done]) for choice in work.choices])

    def _one_step(self, work: _Work) -> tuple[list[ToGateway], Usage | None]:
        script, response_id, limit = work.script, work.submit.response_id, work.limit
        if script.reject is not None:
            return self._reject(work)
        before, work.done = work.done, min(limit, work.done + script.tokens_per_step)
        messages: list[ToGateway] = [self._tokens(work)]
        self.generated[response_id] = work.done
        self.last_step[response_id] = self.step
        for choice in work.choices:
            if before < len(work.answer_of(choice)) <= work.done < limit:
                end = ChoiceEnd(choice=choice, reason=script.reason)
                messages.append(ChoiceFinished(response_id=response_id, attempt=work.submit.attempt, end=end))
        if work.done < limit:
            return messages, None
        reason = "length" if work.done == work.submit.max_tokens < len(script.answer) else script.reason
        finished, usage = self._end(work, reason)
        return [*messages, *finished], usage

    def _tokens(self, work: _Work) -> Tokens:
        news = [tuple(work.answer_of(choice)[work.sent : work.done]) for choice in work.choices]
        rows = [(choice, new) for choice, new in zip(work.choices, news, strict=True) if new]
        first, work.sent = work.sent, work.done
        asked = work.submit.sampling.num_top_logprobs
        logprobs = () if asked is None else tuple(tuple(_logprob(i, asked) for i in new) for _, new in rows)
        return Tokens(
            worker_id=self.bus.worker_id,
            epoch=self.epoch,
            step=self.step,
            response_ids=(work.submit.response_id,) * len(rows),
            attempts=(work.submit.attempt,) * len(rows),
            choices=tuple(choice for choice, _ in rows),
            first_indexes=(first,) * len(rows),
            token_ids=tuple(new for _, new in rows),
            logprobs=logprobs,
        )

    def _reject(self, work: _Work) -> tuple[list[ToGateway], Usage | None]:
        assert work.script.reject is not None
        reason, retry_after_us = work.script.reject
        del self._works[work.submit.response_id]
        rejected = Rejected(
            response_id=work.submit.response_id,
            attempt=work.submit.attempt,
            reason=reason,
            retry_after_us=retry_after_us,
        )
        return [rejected], self._usage(work, "shed", 0)

    def _end(self, work: _Work, reason: str) -> tuple[list[ToGateway], Usage | None]:
        del self._works[work.submit.response_id]
        prompt = len(work.submit.prompt_token_ids)
        ends = tuple(
            ChoiceEnd(choice=choice, reason=reason, visible_bytes=work.script.visible_bytes) for choice in work.choices
        )
        finished = Finished(
            response_id=work.submit.response_id,
            attempt=work.submit.attempt,
            choices=ends,
            prompt_tokens=prompt,
            cached_tokens=0,
            output_tokens=self._num_output(work),
            counters=work.script.counters,
        )
        terminal = {"cancelled": "cancelled_client", "failed": "failed_platform"}.get(reason, "completed")
        return [finished], self._usage(work, terminal, prompt)

    def _num_output(self, work: _Work) -> int:
        return sum(min(work.done, len(work.answer_of(choice))) for choice in work.choices)

    def _usage(self, work: _Work, terminal: str, prompt_tokens: int) -> Usage:
        submit = work.submit
        return Usage(
            response_id=submit.response_id,
            attempt=submit.attempt,
            tenant_id=submit.tenant_id,
            project_id=submit.project_id,
            key_id=submit.key_id,
            priority_class=submit.priority_class,
            model=submit.model,
            prompt_tokens=prompt_tokens,
            cached_tokens=0,
            output_tokens=self._num_output(work),
            terminal=terminal,
            policy_version=submit.policy_version,
            price_version=submit.price_version,
            counters=EngineCounters(),
            requested_class=submit.requested_class,
        )


def _logprob(token_id: int, num_top: int) -> TokenLogprob:
    top = ((token_id, -0.5), *((token_id + 1 + n, -1.0 - n) for n in range(20)))
    return TokenLogprob(token_id=token_id, logprob=-0.5, top=top[:num_top])
