"""A worker's side of the Bus on Redis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from wire import codec
from wire.bus import BadEntry, BusFull, Fenced, StepOutput
from wire.messages import LoadSnapshot, Submit, ToWorker
from wire.redis_bus.connection import (
    MAX_ENTRIES_PER_READ,
    MAX_STREAM_LENGTH,
    block_ms,
    bus_errors,
    connect,
    decoded,
    entries_of,
    script,
)
from wire.redis_bus.policy import PolicyPoll
from wire.redis_keys import LOAD_LIFETIME_MS, Keys

MAX_DELIVERED = 64


class RedisWorkerBus:
    """A worker's side. Always: nothing is published or taken under an epoch that is no longer this worker's."""

    def __init__(
        self, url: str, worker_id: str, *, keys: Keys | None = None, max_stream_length: int = MAX_STREAM_LENGTH
    ) -> None:
        self.worker_id = worker_id
        self._keys = keys or Keys()
        self._max_stream_length = max_stream_length
        self._client = connect(url)
        self._open = self._client.register_script(script("open"))
        self._take = self._client.register_script(script("take"))
        self._load = self._client.register_script(script("load"))
        self._publish = self._client.register_script(script("settle", "publish"))
        self._epoch = 0
        self._last_inbox_id: str | bytes = "0"
        self._delivered: list[bytes] = []  # entries that were read and are still in the inbox
        self._policy = PolicyPoll(self._client, self._keys)
        self._sequence = 0
        self._unconfirmed: StepOutput | None = None

    def open(self) -> int:
        keys, worker_id = self._keys, self.worker_id
        names = (keys.epoch(worker_id), keys.inbox(worker_id), keys.sent(worker_id), keys.workers)
        with bus_errors():
            self._epoch = int(cast(bytes, self._open(keys=names, args=[worker_id])))
        self._last_inbox_id, self._delivered = "0", []
        self._policy = PolicyPoll(self._client, self._keys)
        self._sequence, self._unconfirmed = 0, None
        return self._epoch

    def receive(self, timeout_s: float) -> Sequence[ToWorker | BadEntry]:
        """What the inbox holds is noted last: after a BusError all of it comes again."""
        with bus_errors():
            if news := self._policy.look():
                return news
            found = self._read_inbox(block_ms(min(timeout_s, self._policy.wait_s)))
            messages = decoded(found)
            known = max((each.policy_version for each in messages if isinstance(each, Submit)), default=0)
            news = self._policy.catch_up(known)
            if found:
                self._delivered += [entry_id for entry_id, _ in found]
                self._last_inbox_id = self._delivered[-1]
            return [*news, *messages]

    def _read_inbox(self, block: int | None) -> list[tuple[bytes, bytes]]:
        """What was read before is taken out when nothing comes, or much at once: hardly a request waits for that."""
        inbox = self._keys.inbox(self.worker_id)
        if len(self._delivered) >= MAX_DELIVERED:
            self._take_out()
        found = entries_of(self._client.xread({inbox: self._last_inbox_id}, count=MAX_ENTRIES_PER_READ, block=block))
        if self._delivered and not found:
            self._take_out()
        return found

    def _take_out(self) -> None:
        keys = (self._keys.epoch(self.worker_id), self._keys.inbox(self.worker_id))
        self._check(self._take(keys=keys, args=[self._epoch, *self._delivered]))
        self._delivered = []

    def publish(self, output: StepOutput) -> None:
        if output is not self._unconfirmed:
            self._sequence += 1
            self._unconfirmed = output
        names, arguments = self._publish_call(output)
        with bus_errors():
            answer = int(cast(int, self._publish(keys=names, args=arguments)))
        self._check(answer)
        if answer == -2:
            raise BusFull("the usage stream stands at its hard length")
        if answer > 0:
            gateway_id = list(output.to_gateways)[answer - 1]
            raise BusFull(f"the outbox of gateway {gateway_id} stands at its hard length", gateway_id)
        self._unconfirmed = None

    def _publish_call(self, output: StepOutput) -> tuple[list[str], list[str | bytes | int]]:
        keys = self._keys
        names = [keys.epoch(self.worker_id), keys.sent(self.worker_id), keys.usage]
        names.extend(keys.outbox(gateway_id) for gateway_id in output.to_gateways)
        names.extend(keys.response(usage.response_id) for usage in output.usages)
        names.extend(keys.output(response_id) for response_id in output.outputs)
        names.append(keys.counted(self.worker_id))
        arguments: list[str | bytes | int] = [
            self._epoch,
            self._sequence,
            self._max_stream_length,
            self._max_stream_length,
            len(output.to_gateways),
            len(output.usages),
            len(output.outputs),
        ]
        arguments.extend(codec.encode(messages) for messages in output.to_gateways.values())
        for usage in output.usages:
            arguments.extend((codec.encode([usage]), usage.response_id, usage.attempt, usage.terminal))
            arguments.extend((usage.prompt_tokens, usage.cached_tokens, usage.output_tokens))
        arguments.extend(codec.encode_output(finished) for finished in output.outputs.values())
        return names, arguments

    def publish_load(self, load: LoadSnapshot) -> None:
        names = (self._keys.epoch(self.worker_id), self._keys.load(self.worker_id))
        with bus_errors():
            answer = self._load(keys=names, args=[self._epoch, codec.encode_load(load), LOAD_LIFETIME_MS])
        self._check(answer)

    def _check(self, answer: object) -> None:
        if answer == -1:
            raise Fenced(f"epoch {self._epoch} of worker {self.worker_id} has been fenced")

    def live_gateways(self) -> frozenset[str]:
        with bus_errors():
            names = [name.decode() for name in cast(set[bytes], self._client.smembers(self._keys.gateways))]
            if not names:
                return frozenset()
            alive = cast(list[bytes | None], self._client.mget([self._keys.alive(name) for name in names]))
            dead = [name for name, beat in zip(names, alive, strict=True) if beat is None]
            if dead:
                self._client.srem(self._keys.gateways, *dead)
        return frozenset(names).difference(dead)

    def close(self) -> None:
        self._client.close()
