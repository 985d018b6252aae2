"""Who asks for what, and when: the arrivals of a simulation. Knows lengths and moments; refuses to know outcomes."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import cast

from gpu_worker.simulated import DEVICES, DeviceProfile
from scheduler_engine.policy import PriorityClass
from wire.messages import Submit

SECOND_US = 1_000_000
_REFERENCE = "h200-8b"  # the device whose lengths and gaps the stories give


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a client. A client that is refused comes back when it was told to, ``num_tries`` times in all, and
    gives up when that is more than ``patience_us`` away: the usual client library waits two minutes and no longer.
    """

    at_us: int
    submit: Submit
    num_tries: int = 1
    patience_us: int | None = 120 * SECOND_US

    def again(self, at_us: int) -> Arrival:
        """The same request once more, after a refusal."""
        name, _, number = self.submit.response_id.partition("~")
        submit = replace(self.submit, response_id=f"{name}~{int(number or 1) + 1}", is_return=True)
        return replace(self, at_us=at_us, submit=submit, num_tries=self.num_tries - 1)


def _prompt(response_id: str, num_tokens: int) -> tuple[int, ...]:
    """A cost model does not read prompts: a range has the length, shares its start with no other, and costs nothing."""
    start = (zlib.crc32(response_id.encode()) % (1 << 18)) << 13
    return cast("tuple[int, ...]", range(start, start + num_tokens))


def submit_of(
    response_id: str,
    tenant_id: str,
    priority_class: PriorityClass,
    *,
    prompt_tokens: int,
    max_tokens: int,
    deadline_us: int | None = None,
    value_micros: int = 1,
) -> Submit:
    """``deadline_us``: to the first token, hard."""
    return Submit(
        response_id=response_id,
        attempt=1,
        gateway_id="simulator",
        tenant_id=tenant_id,
        project_id=tenant_id,
        key_id=tenant_id,
        priority_class=priority_class,
        model="simulated",
        prompt_token_ids=_prompt(response_id, prompt_tokens),
        max_tokens=max_tokens,
        remaining_hard_deadline_us=deadline_us,
        value_micros=value_micros,
    )


class Pace:
    """How a story written for ``h200-8b`` is told on another device: a length keeps its ratio to the tokens a slot has
    room for, a duration its ratio to the device time of one middling request.
    """

    def __init__(self, device: DeviceProfile) -> None:
        reference = DEVICES[_REFERENCE]
        self._length = (_tokens_per_slot(device), _tokens_per_slot(reference))
        self._work = (self._work_ns(device), self._work_ns(reference))

    def tokens(self, count: int) -> int:
        mine, reference = self._length
        return max(1, count * mine // reference)

    def us(self, duration_us: int) -> int:
        mine, reference = self._work
        return duration_us * mine // reference

    def _work_ns(self, device: DeviceProfile) -> int:
        """A prompt of 2,048 tokens and 256 more, with its share of the fixed part of its steps."""
        cost, prompt, output = device.cost, self.tokens(2_048), self.tokens(256)
        row_ns = cost.decode_row_ns + cost.kv_token_ns * (prompt + output // 2) + cost.base_ns // device.num_slots
        return prompt * cost.prefill_token_ns + output * row_ns


def _tokens_per_slot(device: DeviceProfile) -> int:
    return device.shape.num_blocks * device.shape.block_size // device.num_slots
