"""Tokens per second and time to the first token of any server that speaks the OpenAI HTTP API, ours or a rival's.

Without ``--base-url`` it starts ``manage.py up`` with the demo model. Knows a base URL and keys; refuses any address
that is not loopback unless told to.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx2

from benchmarks.chats import Caller, Kind, ServerRefused, Timed, caller, closed_loop, words_for
from benchmarks.figures import machine, quantile, report, say
from benchmarks.serving import Target, is_loopback, own_platform

AT_ONCE = (1, 8, 16)
ROUNDS = 2  # each of those under way sends so many
NUM_CHATS = 5
SETTLE_S = 2.0  # the flood's first prompts are under way before the first chat comes


async def throughput(one: Caller, kind: Kind, at_once: int) -> dict[str, Any]:
    answers, seconds = await closed_loop(one, kind, num_requests=ROUNDS * at_once, at_once=at_once)
    tokens = sum(answer.output_tokens for answer in answers)
    found = {
        "requests": len(answers),
        "output_tokens_per_s": round(tokens / seconds, 2),
        "latency_s_p50": _seconds(quantile([answer.total_s for answer in answers], 0.5)),
        "prompt_tokens_mean": round(sum(answer.prompt_tokens for answer in answers) / len(answers), 1),
        "output_tokens_mean": round(tokens / len(answers), 1),
    }
    say(f"{at_once} at once: {found['output_tokens_per_s']} output tokens/s")
    return found


async def chats(one: Caller, kind: Kind, when: str) -> list[Timed]:
    answers = []
    for _ in range(NUM_CHATS):
        answers.append(await one.streamed(kind))
        say(f"{when}: first token after {answers[-1].first_s * 1_000:.0f} ms")
    return answers


async def flooded(chat: Caller, chat_kind: Kind, batch: Caller, batch_kind: Kind, size: int) -> dict[str, Any]:
    """Chats one after another while ``size`` batch requests are all under way."""
    flood = asyncio.create_task(closed_loop(batch, batch_kind, num_requests=size, at_once=size))
    try:
        await asyncio.sleep(SETTLE_S)
        answers = await chats(chat, chat_kind, "flooded")
        outlasted = not flood.done()
    finally:
        completed, seconds = await flood
    if not outlasted:
        say("the flood ended before the last chat: make it larger with --flood")
    tokens = sum(answer.output_tokens for answer in completed)
    return {
        "ttft": _ttft(answers),
        "flood_outlasted_the_chats": outlasted,
        "batch_requests": len(completed),
        "batch_tokens_per_s": round(tokens / seconds, 2),
    }


def _ttft(answers: Sequence[Timed]) -> dict[str, Any]:
    ttft_ms = [round(answer.first_s * 1_000, 1) for answer in answers]
    return {"p50_ms": quantile(ttft_ms, 0.5), "max_ms": max(ttft_ms), "all_ms": ttft_ms}


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


async def measure(found: argparse.Namespace, target: Target) -> dict[str, Any]:
    """Raises ServerRefused, HTTPError."""
    async with (
        caller(target.base_url, target.keys.get("chat"), seed=1) as chat,
        caller(target.base_url, target.keys.get("batch"), seed=2) as batch,
    ):
        chat_kind = Kind(
            model=target.model,
            num_words=16,
            output_tokens=found.output_tokens,
            tier=found.chat_tier or None,
            extensions=not found.no_extensions,
            fields=found.chat_fields,
        )
        num_words = await words_for(chat, chat_kind, found.prompt_tokens)
        chat_kind = replace(chat_kind, num_words=num_words)
        batch_kind = replace(
            chat_kind, num_words=2 * num_words, tier=found.batch_tier or None, fields=found.batch_fields
        )
        by_load = {str(at_once): await throughput(chat, chat_kind, at_once) for at_once in found.at_once}
        idle = _ttft(await chats(chat, replace(chat_kind, output_tokens=16), "idle"))
        through = await flooded(chat, replace(chat_kind, output_tokens=16), batch, batch_kind, found.flood)
    return {
        "throughput": by_load,
        "idle_ttft": idle,
        "flooded": through,
        "ratio_p50": round(through["ttft"]["p50_ms"] / idle["p50_ms"], 3),
    }


@contextlib.contextmanager
def _target(found: argparse.Namespace) -> Iterator[Target]:
    keys = {"chat": found.key, "batch": found.batch_key or found.key}
    if found.base_url:
        model = found.model or _first_model(found.base_url, found.key)
        given = {name: key for name, key in keys.items() if key}
        yield Target(base_url=found.base_url.rstrip("/").removesuffix("/v1"), model=model, keys=given)
        return
    with own_platform(["--executor=model", f"--weights={found.weights}"]) as own:
        yield replace(own, keys={"chat": own.keys["aurora"], "batch": own.keys["bulk"]})


def _first_model(base_url: str, key: str | None) -> str:
    """Raises HTTPError."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    answer = httpx2.get(base_url.rstrip("/").removesuffix("/v1") + "/v1/models", headers=headers)
    model: str = answer.raise_for_status().json()["data"][0]["id"]
    return model


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(part) for part in text.split(",") if part)
    if not numbers or min(numbers) < 1:
        raise ValueError(text)
    return numbers


def _fields(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(text)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__)
    parser.add_argument("--base-url", help="server to measure (a platform of our own, started for it)")
    parser.add_argument("--model", help="model name (the server's first)")
    parser.add_argument("--key", help="API key of the chats and of the plain throughput")
    parser.add_argument("--batch-key", help="API key of the flood (--key)")
    parser.add_argument("--chat-tier", default="priority", help="service_tier of the chats; '' sends none")
    parser.add_argument("--batch-tier", default="flex", help="service_tier of the flood; '' sends none")
    parser.add_argument("--chat-fields", type=_fields, default={}, help="JSON object that goes into every chat's body")
    parser.add_argument("--batch-fields", type=_fields, default={}, help="the same for the flood")
    parser.add_argument("--no-extensions", action="store_true", help="send neither ignore_eos nor min_tokens")
    parser.add_argument("--at-once", type=_numbers, default=AT_ONCE, help="requests under way (1,8,16)")
    parser.add_argument("--prompt-tokens", type=int, default=128, help="about so many; the flood has twice that")
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--flood", type=int, default=48, help="batch requests of the flood (48)")
    parser.add_argument("--weights", choices=("full", "int8"), default="full", help="of a platform of our own (full)")
    parser.add_argument("--not-loopback", action="store_true", help="let --base-url be another machine")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    if found.base_url and not (found.not_loopback or is_loopback(found.base_url)):
        parser.error(f"{found.base_url} is not on this machine; say --not-loopback if you mean it")
    try:
        with _target(found) as target:
            result = asyncio.run(measure(found, target))
            report(
                {"bench": "engine", "base_url": target.base_url, "model": target.model, **result, **machine()},
                as_json=found.json,
            )
    except (ServerRefused, httpx2.HTTPError, RuntimeError) as error:
        sys.stderr.write(f"the benchmark broke off: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
