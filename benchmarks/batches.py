"""What a batch costs the platform: how fast 50,000 lines are checked, and how fast lines run through the same door.

The device costs nothing (``--executor simulated --device-profile instant``): measured are the upload, the validation,
the owner of batches with admission, dispatch and settlement of every line, and the files that come out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
from openai import OpenAI
from openai.types import Batch

from benchmarks.figures import machine, report, say
from benchmarks.serving import Target, of_demo_file, own_platform

POLL_S = 0.05
PATIENCE_S = 600.0
ENDED = ("completed", "failed", "expired", "cancelled")


class BatchFailed(Exception):
    """A batch of the benchmark did not end well."""


def lines(model: str, count: int) -> bytes:
    """An input file: chats of a dozen words, one token each for an answer."""
    words = "what is the shortest way from the river to the old house"
    body = {"model": model, "messages": [{"role": "user", "content": words}], "max_completion_tokens": 1}
    rows = (
        {"custom_id": f"line-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for number in range(count)
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _until(client: OpenAI, batch: Batch, is_there: Callable[[Batch], bool]) -> tuple[Batch, float]:
    """The batch once it is there, and the seconds that took. Raises BatchFailed."""
    started = time.perf_counter()
    while not is_there(batch):
        if batch.status in ENDED or time.perf_counter() - started > PATIENCE_S:
            raise BatchFailed(f"{batch.id} is {batch.status}: {batch.errors}")
        time.sleep(POLL_S)
        batch = client.batches.retrieve(batch.id)
    return batch, time.perf_counter() - started


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started


def measure(target: Target, *, num_checked: int, num_run: int) -> dict[str, Any]:
    """Raises openai.OpenAIError, BatchFailed."""
    with OpenAI(base_url=f"{target.base_url}/v1", api_key=target.keys["bulk"], max_retries=0) as client:
        checked = _check(client, lines(target.model, num_checked))
        run = _run(client, lines(target.model, num_run), num_run)
    return {"checked_lines": num_checked, **checked, "run_lines": num_run, **run}


def _make(client: OpenAI, content: bytes) -> tuple[Batch, float]:
    file, upload_s = _timed(lambda: client.files.create(file=("lines.jsonl", content), purpose="batch"))
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    ), upload_s


def _check(client: OpenAI, content: bytes) -> dict[str, Any]:
    """Validation alone: the batch is cancelled as soon as it may run."""
    batch, upload_s = _make(client, content)
    batch, validation_s = _until(client, batch, lambda found: found.status != "validating")
    if batch.status == "failed":
        raise BatchFailed(f"{batch.errors}")
    client.batches.cancel(batch.id)
    _until(client, batch, lambda found: found.status == "cancelled")
    return {
        "upload_mb_per_s": round(len(content) / 1e6 / upload_s, 1),
        "validation_s": round(validation_s, 2),
    }


def _run(client: OpenAI, content: bytes, count: int) -> dict[str, Any]:
    batch, _ = _make(client, content)
    batch, _ = _until(client, batch, lambda found: found.status != "validating")
    batch, running_s = _until(client, batch, lambda found: found.status == "completed")
    if batch.output_file_id is None:
        raise BatchFailed(f"{batch.id} has no output")
    output, download_s = _timed(lambda: client.files.content(batch.output_file_id or "").read())
    if output.count(b"\n") != count:
        raise BatchFailed(f"{output.count(10)} lines came out of {count}")
    return {"lines_per_s": round(count / running_s, 1), "download_mb_per_s": round(len(output) / 1e6 / download_s, 1)}


@contextlib.contextmanager
def _target(demo_file: Path | None) -> Iterator[Target]:
    if demo_file is not None:
        yield of_demo_file(demo_file)
        return
    with own_platform(["--executor=simulated", "--device-profile=instant"]) as own:
        yield own


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batches", description=__doc__)
    parser.add_argument("--demo-file", type=Path, help="demo.json of a running platform")
    parser.add_argument("--checked", type=int, default=50_000, help="lines to validate (50,000)")
    parser.add_argument("--run", type=int, default=2_000, help="lines to run; Bulk may send 6,000 a minute")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    if not (1 <= found.checked <= 50_000 and 1 <= found.run <= 50_000):
        parser.error("--checked and --run must be from 1 to 50,000")
    try:
        with _target(found.demo_file) as target:
            say(f"{found.checked} lines to check and {found.run} to run, on {target.base_url}")
            result = measure(target, num_checked=found.checked, num_run=found.run)
    except (openai.OpenAIError, BatchFailed, OSError, ValueError, RuntimeError) as error:
        sys.stderr.write(f"the benchmark broke off: {error}\n")
        return 1
    report({"bench": "batches", **result, **machine()}, as_json=found.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
