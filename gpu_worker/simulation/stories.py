"""The five stories. Seeded, so that each can be told again exactly; one policy for all of them.

Lengths and moments are those on ``h200-8b``; a Pace carries them to another device.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gpu_worker.simulation.traffic import SECOND_US, Arrival, Pace, submit_of
from scheduler_engine.policy import PriorityClass
from wire.messages import Submit

INTERACTIVE, DEFAULT, BATCH = PriorityClass

_NUM_TRIES = 3  # what the common client library does by itself
_PERSISTENT = 1_000


def flood(seed: int, pace: Pace) -> list[Arrival]:
    """A night: tenant Bulk drops 5,000 prompts of 3,072 to 5,120 tokens at once (256 tokens out each).

    For the 15 minutes that follow, Aurora and Nova chat in bursts: every 4 s in the mean (exponential gaps) one of them
    sends 1 to 16 chats of 32 to 512 prompt tokens, 16 to 256 tokens out, within 100 ms.
    """
    rng = random.Random(seed)
    arrivals = [Arrival(0, _batch(pace, f"bulk-{number}", 64 * rng.randint(48, 80), 256)) for number in range(5_000)]
    return _in_order([*arrivals, *_bursts(rng, pace, end_us=900 * SECOND_US, mean_gap_us=4 * SECOND_US)])


def long_decodes(seed: int, pace: Pace) -> list[Arrival]:
    """Memory is tight: Bulk drops 1,500 requests of 512 to 1,536 prompt tokens and 1,536 to 3,072 tokens out at once.

    Together they want more KV than the pool has for as many as there are slots. Chats as in the flood, for 10 minutes.
    """
    rng = random.Random(seed)
    arrivals = [
        Arrival(0, _batch(pace, f"bulk-{number}", 64 * rng.randint(8, 24), 64 * rng.randint(24, 48)))
        for number in range(1_500)
    ]
    return _in_order([*arrivals, *_bursts(rng, pace, end_us=600 * SECOND_US, mean_gap_us=4 * SECOND_US)])


def tenant_flood(seed: int, pace: Pace) -> list[Arrival]:
    """Nova drops 1,000 interactive requests within 100 ms, 10 s after quiet Aurora began to chat about once a second.

    Both are of the same class. Nova's clients come back whenever they are told to, until they are served.
    """
    rng = random.Random(seed)
    arrivals = [
        Arrival(
            pace.us(10 * SECOND_US + rng.randrange(SECOND_US // 10)),
            _chat(pace, f"nova-{number}", "nova", 64 * rng.randint(2, 16), 16 * rng.randint(4, 12)),
            num_tries=_PERSISTENT,
            patience_us=None,
        )
        for number in range(1_000)
    ]
    arrivals.extend(
        Arrival(
            at_us,
            _chat(pace, f"aurora-{number}", "aurora", 32 * rng.randint(1, 16), 16 * rng.randint(1, 12)),
            num_tries=_NUM_TRIES,
        )
        for number, at_us in enumerate(_poisson(rng, pace, end_us=100 * SECOND_US, mean_gap_us=SECOND_US))
    )
    return _in_order(arrivals)


OVERLOAD_VALUES = {"gold": 100, "silver": 10, "bronze": 1}
_OVERLOAD_PER_S = (
    (60, 11),
    (180, 44),
    (240, 11),
)  # (until this second, requests a second): half and twice the capacity


def overload(seed: int, pace: Pace) -> list[Arrival]:
    """Twice what the device can do, for two minutes, between two calm minutes at half of it.

    Three tenants ask alike, with tokens worth 100, 10 and 1: 512 to 1,024 prompt tokens, 32 to 96 out, the first within
    1 s or not at all. Who is refused comes back when told to, twice, if that is within two minutes. 600 batch requests
    wait beside them.
    """
    rng = random.Random(seed)
    arrivals = [
        Arrival(0, _batch(pace, f"bulk-{number}", 64 * rng.randint(16, 48), 256), num_tries=_NUM_TRIES)
        for number in range(600)
    ]
    start_us = number = 0
    for until_s, per_s in _OVERLOAD_PER_S:
        end_us = until_s * SECOND_US
        for at_us in _poisson(rng, pace, start_us=start_us, end_us=end_us, mean_gap_us=SECOND_US // per_s):
            number += 1
            tenant_id = rng.choice(tuple(OVERLOAD_VALUES))
            submit = submit_of(
                f"{tenant_id}-{number}",
                tenant_id,
                INTERACTIVE,
                prompt_tokens=pace.tokens(64 * rng.randint(8, 16)),
                max_tokens=pace.tokens(16 * rng.randint(2, 6)),
                deadline_us=pace.us(SECOND_US),
                value_micros=OVERLOAD_VALUES[tenant_id],
            )
            arrivals.append(Arrival(at_us, submit, num_tries=_NUM_TRIES))
        start_us = end_us
    return _in_order(arrivals)


_HOUR_US = 60 * SECOND_US  # an hour of the day in a minute
_CHATS_PER_MINUTE = (60, 36, 24, 18, 18, 30, 60, 140, 280, 420, 520, 560, 520, 560, 600, 580, 520, 440, 360, 320, 280)
_CHATS_IN_HOUR = (*_CHATS_PER_MINUTE, 200, 140, 90)  # of 24, from midnight


def mixed_day(seed: int, pace: Pace) -> list[Arrival]:
    """A day in 24 minutes, from 08:00 on: chats of Aurora and Nova by day, batch by night, tools in between.

    At 20:00 Bulk drops 1,500 long prompts (as in the flood), at 02:00 500 long decodes: the mix changes twice, and
    nobody touches the policy. Aurora's tools ask in the default class, once a second, day and night.
    """
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    for hour in range(24):
        per_hour = _CHATS_IN_HOUR[(8 + hour) % 24]
        start_us, end_us = hour * _HOUR_US, (hour + 1) * _HOUR_US
        for at_us in _poisson(rng, pace, start_us=start_us, end_us=end_us, mean_gap_us=_HOUR_US // per_hour):
            tenant_id = "aurora" if rng.random() < 0.7 else "nova"
            name = f"chat-{len(arrivals)}"
            arrivals.append(
                Arrival(at_us, _chat(pace, name, tenant_id, 32 * rng.randint(1, 32), 16 * rng.randint(1, 16)))
            )
    for number, at_us in enumerate(_poisson(rng, pace, end_us=24 * _HOUR_US, mean_gap_us=SECOND_US)):
        prompt, output = pace.tokens(64 * rng.randint(8, 32)), pace.tokens(16 * rng.randint(4, 16))
        submit = submit_of(f"tool-{number}", "aurora", DEFAULT, prompt_tokens=prompt, max_tokens=output)
        arrivals.append(Arrival(at_us, submit))
    evening_us, night_us = pace.us(12 * _HOUR_US), pace.us(18 * _HOUR_US)
    for number in range(1_500):
        arrivals.append(Arrival(evening_us, _batch(pace, f"evening-{number}", 64 * rng.randint(48, 80), 256)))
    for number in range(500):
        submit = _batch(pace, f"night-{number}", 64 * rng.randint(8, 24), 64 * rng.randint(24, 48))
        arrivals.append(Arrival(night_us, submit))
    return _in_order(arrivals)


def _batch(pace: Pace, name: str, prompt_tokens: int, max_tokens: int) -> Submit:
    prompt_tokens, max_tokens = pace.tokens(prompt_tokens), pace.tokens(max_tokens)
    return submit_of(name, "bulk", BATCH, prompt_tokens=prompt_tokens, max_tokens=max_tokens)


def _chat(pace: Pace, name: str, tenant_id: str, prompt_tokens: int, max_tokens: int) -> Submit:
    prompt_tokens, max_tokens = pace.tokens(prompt_tokens), pace.tokens(max_tokens)
    return submit_of(name, tenant_id, INTERACTIVE, prompt_tokens=prompt_tokens, max_tokens=max_tokens)


def _bursts(rng: random.Random, pace: Pace, *, end_us: int, mean_gap_us: int) -> Iterator[Arrival]:
    at_us, number = SECOND_US, 0
    while at_us < end_us:
        tenant_id = rng.choice(("aurora", "nova"))
        for _ in range(rng.randint(1, 16)):
            number += 1
            prompt_tokens, max_tokens = 32 * rng.randint(1, 16), 16 * rng.randint(1, 16)
            chat = _chat(pace, f"chat-{number}", tenant_id, prompt_tokens, max_tokens)
            yield Arrival(pace.us(at_us + rng.randrange(SECOND_US // 10)), chat)
        at_us += round(rng.expovariate(1 / mean_gap_us))


def _poisson(rng: random.Random, pace: Pace, *, start_us: int = 0, end_us: int, mean_gap_us: int) -> Iterator[int]:
    at_us = start_us + round(rng.expovariate(1 / mean_gap_us))
    while at_us < end_us:
        yield pace.us(at_us)
        at_us += round(rng.expovariate(1 / mean_gap_us))


def _in_order(arrivals: list[Arrival]) -> list[Arrival]:
    return sorted(arrivals, key=lambda arrival: arrival.at_us)


@dataclass(frozen=True, slots=True)
class Story:
    """``tell(seed, pace)`` gives its arrivals in order. The rest says what ``--compare`` asks of it."""

    tell: Callable[[int, Pace], list[Arrival]]
    window_s: tuple[int, int]  # while classes or tenants are in each other's way
    has_targets: bool = False  # those of an H200; a trace has none
    loud_tenant: str | None = (
        None  # the others' tail against their tail without it; its end against that without tenants
    )
    has_deadlines: bool = False  # goodput against what the device does when nobody is in a hurry


STORIES = {
    "flood": Story(flood, (0, 900), has_targets=True),
    "long_decodes": Story(long_decodes, (0, 600), has_targets=True),
    "tenant_flood": Story(tenant_flood, (10, 100), has_targets=True, loud_tenant="nova"),
    "overload": Story(overload, (60, 180), has_deadlines=True),
    "mixed_day": Story(mixed_day, (0, 1_440)),
}
