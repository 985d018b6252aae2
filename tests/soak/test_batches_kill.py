"""kill -9 of each process while a batch of 1,000 lines runs: one output line per custom_id, and right books."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from tests.end_to_end.running_up import Up

pytestmark = pytest.mark.soak

UP_ARGUMENTS = ("--device-profile=toy", "--kv-mib=8")
NUM_LINES = 1_000
ENDED_S = 400.0
SETTLED_S = 150.0  # what lost its owner and its worker is released after 90 s
ANSWERED_S = 60.0


def lines(model: str) -> list[dict[str, Any]]:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "from the river to the old house"}],
        "max_completion_tokens": 24,
        "ignore_eos": True,
    }
    return [
        {"custom_id": f"line {n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for n in range(NUM_LINES)
    ]


def patiently(call: Callable[[], Any]) -> Any:
    """The platform may be without a gateway or a database for a while."""
    deadline = time.monotonic() + ANSWERED_S
    while True:
        try:
            return call()
        except (openai.APIConnectionError, openai.InternalServerError):
            assert time.monotonic() < deadline
            time.sleep(0.5)


def until(client: OpenAI, batch: Batch, is_there: Callable[[Batch], bool]) -> Batch:
    deadline = time.monotonic() + ENDED_S
    while not is_there(batch := patiently(lambda: client.batches.retrieve(batch.id))):
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
    return batch


@pytest.mark.parametrize("victim", ["batches", "gateway", "worker", "celery", "settler", "valkey", "postgres"])
def test_a_batch_comes_out_whole_and_once_whatever_dies(platform: Up, victim: str) -> None:
    demo = platform.demo
    with OpenAI(base_url=f"{demo['base_url']}/v1", api_key=demo["keys"]["bulk"], max_retries=0) as client:
        wanted = lines(demo["model"])
        content = b"".join(json.dumps(line).encode() + b"\n" for line in wanted)
        file = patiently(lambda: client.files.create(file=("night.jsonl", content), purpose="batch"))
        batch = patiently(
            lambda: client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        )
        batch = until(client, batch, lambda found: bool(found.request_counts and found.request_counts.completed > 100))
        killed = platform.pid_of(victim)
        os.kill(killed, signal.SIGKILL)
        platform.wait_for(lambda: platform.pid_of(victim) != killed)
        batch = until(client, batch, lambda found: found.status in ("completed", "failed", "expired", "cancelled"))
        assert (batch.status, batch.error_file_id) == ("completed", None)
        output = patiently(lambda: client.files.content(batch.output_file_id or "").read())
    found = Counter(json.loads(line)["custom_id"] for line in output.splitlines())
    assert found == Counter(line["custom_id"] for line in wanted)
    assert batch.usage is not None
    assert batch.usage.output_tokens == 24 * NUM_LINES
    _books_are_right(platform)


def _books_are_right(platform: Up) -> None:
    """Once nothing stands reserved any more."""
    deadline = time.monotonic() + SETTLED_S
    while True:
        found = platform.reconcile(drain_s=5)
        if found["is_right"] and not found["ledger_money"]["open_micros"]:
            break
        assert time.monotonic() < deadline, found
    assert found["num_open_alerts"] == 0, found
