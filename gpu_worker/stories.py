"""Traffic for the simulator: who asks for what, and when. Seeded, so that a story can be told again exactly."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from scheduler_engine.policy import PriorityClass
from wire.messages import Submit

SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class Arrival:
    at_us: int
    submit: Submit


@cache
def _prompt(num_tokens: int) -> tuple[int, ...]:
    return tuple(range(num_tokens))  # a cost model does not read prompts; equal lengths share one


def _submit(
    response_id: str, tenant_id: str, priority_class: PriorityClass, prompt_tokens: int, max_tokens: int
) -> Submit:
    return Submit(
        response_id=response_id,
        attempt=1,
        gateway_id="simulator",
        tenant_id=tenant_id,
        project_id=tenant_id,
        key_id=tenant_id,
        priority_class=priority_class,
        model="simulated",
        prompt_token_ids=_prompt(prompt_tokens),
        max_tokens=max_tokens,
    )


def flood(seed: int) -> list[Arrival]:
    """A night: tenant Bulk drops 5,000 prompts of 3,072 to 5,120 tokens at once (256 tokens out each).

    For the 15 minutes that follow, Aurora and Nova chat in bursts: every 4 s in the mean (exponential gaps) one of them
    sends 1 to 16 chats of 32 to 512 prompt tokens, 16 to 256 tokens out, within 100 ms.
    """
    rng = random.Random(seed)
    arrivals = [
        Arrival(0, _submit(f"bulk-{number}", "bulk", PriorityClass.BATCH, 64 * rng.randint(48, 80), 256))
        for number in range(5_000)
    ]
    arrivals.extend(_bursts(rng, end_us=900 * SECOND_US, mean_gap_us=4 * SECOND_US))
    return sorted(arrivals, key=lambda arrival: arrival.at_us)


def _bursts(rng: random.Random, *, end_us: int, mean_gap_us: int) -> Iterator[Arrival]:
    at_us, number = SECOND_US, 0
    while at_us < end_us:
        tenant_id = rng.choice(("aurora", "nova"))
        for _ in range(rng.randint(1, 16)):
            number += 1
            prompt_tokens, max_tokens = 32 * rng.randint(1, 16), 16 * rng.randint(1, 16)
            chat = _submit(f"chat-{number}", tenant_id, PriorityClass.INTERACTIVE, prompt_tokens, max_tokens)
            yield Arrival(at_us + rng.randrange(SECOND_US // 10), chat)
        at_us += round(rng.expovariate(1 / mean_gap_us))


STORIES: dict[str, Callable[[int], list[Arrival]]] = {"flood": flood}
