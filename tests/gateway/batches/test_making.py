"""How a batch is made through the official client: what is refused by name, and once under a key."""

from __future__ import annotations

import time
from typing import Any

import openai
import pytest
import redis
from django.conf import settings

from gateway.batches.models import Batch as BatchRow
from tests.gateway.batches.conftest import CHAT, Platform, create, jsonl, request_line, uuid_of


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"a": "b\0"}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, "output_expires_after.seconds"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ],
)
def test_a_batch_that_is_asked_for_wrongly_names_its_field(
    platform: Platform, changes: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        create(platform, [request_line("a")], **changes)
    assert refused.value.param == param


def test_a_name_in_the_metadata_that_is_too_long_is_told_with_the_field_and_the_bound(platform: Platform) -> None:
    with pytest.raises(openai.BadRequestError, match=r"Invalid 'metadata': a name in it: .* length <= 64") as refused:
        create(platform, [request_line("a")], metadata={"k" * 65: "v"})
    assert (refused.value.param, refused.value.code) == ("metadata", "invalid_value")


def test_a_batch_whose_gateway_died_before_it_kept_the_answer_is_made_once_under_its_key(platform: Platform) -> None:
    """Whoever sends it again, when the key's lease is over, is shown the batch of the first time."""
    client = platform.client("bulk")
    file = client.files.create(file=("in.jsonl", jsonl(request_line("a"))), purpose="batch")
    wanted: dict[str, Any] = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
    keyed = {"Idempotency-Key": f"made once {file.id}"}
    made = client.batches.create(**wanted, extra_headers=keyed)
    with redis.Redis.from_url(settings.REDIS_URL) as gate_keeper:
        (name,) = gate_keeper.scan_iter(f"{settings.RUBATO_REDIS_PREFIX}idempotency:*")
        while not gate_keeper.hdel(name, "status", "headers", "body"):
            time.sleep(0.01)
        gate_keeper.hset(name, mapping={"owner": "dead", "until_ms": 0})
    again = client.batches.create(**wanted, extra_headers=keyed)
    assert again.id == made.id
    assert BatchRow.objects.filter(input_file_id=uuid_of(file.id)).count() == 1
