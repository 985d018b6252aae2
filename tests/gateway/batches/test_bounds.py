"""What one tenant may ask of files and batches: so many open batches, so many calls, and an answer in time."""

from __future__ import annotations

import time
from dataclasses import replace

import openai
import pytest
from openai.types import Batch
from redis.asyncio import Redis

from gateway.celery import app as celery_app
from tests.gateway.batches.conftest import Platform, jsonl, request_line


def create(platform: Platform, tenant: str) -> Batch:
    client = platform.client(tenant)
    file = client.files.create(file=("in.jsonl", jsonl(request_line("a"))), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def bound(platform: Platform, monkeypatch: pytest.MonkeyPatch, **bounds: int) -> None:
    archive = platform.runtime.archive
    assert archive is not None
    monkeypatch.setattr(platform.runtime, "archive", replace(archive, **bounds))


def test_a_tenant_has_only_so_many_open_batches_and_others_have_their_own(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(platform, monkeypatch, open_batches=2)
    made = [create(platform, "aurora") for _ in range(2)]
    with pytest.raises(openai.RateLimitError) as refused:
        create(platform, "aurora")
    assert refused.value.code == "batch_limit_reached"
    assert refused.value.response.headers["x-should-retry"] == "false"
    create(platform, "nova")
    platform.client().batches.cancel(made[0].id)
    assert [batch.status for batch in platform.client().batches.list()] == ["validating", "cancelling"]


def test_calls_to_files_and_batches_are_counted_together_for_a_tenant(
    platform: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound(platform, monkeypatch, calls_per_minute=0)
    for ask in (platform.client().files.list, platform.client().batches.list):
        with pytest.raises(openai.RateLimitError) as refused:
            ask()
        assert refused.value.code == "rate_limit_exceeded"
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60


def test_a_batch_is_made_at_once_also_while_redis_is_down(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beat asks for its validation when Redis is back."""
    file = platform.client("bulk").files.create(file=("in.jsonl", jsonl(request_line("a"))), purpose="batch")
    monkeypatch.setattr(celery_app.conf, "broker_url", "redis://127.0.0.1:1/0")
    monkeypatch.setattr(platform.runtime, "redis", Redis(host="127.0.0.1", port=1))
    started_at_s = time.monotonic()
    made = platform.client("bulk").batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert made.status == "validating"
    assert time.monotonic() - started_at_s < 3
