"""P47, P49: whatever Bulk has made, in whatever state it is, Stranger sees what it sees of an id that never was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import httpx2
import pytest
from django.utils import timezone

from gateway.batches import services, tasks
from gateway.batches.ids import BATCH, FILE, shown
from gateway.batches.models import Batch, StoredFile
from gateway.batches.services import NewFile
from tests.gateway.batches.conftest import Platform, jsonl, owner_of, request_line

STATES = [status.value for status in Batch.Status]
FILE_STATES = ["live", "deleted", "expired", "output"]
ROUTES = [
    ("GET", "/v1/files/{file}"),
    ("GET", "/v1/files/{file}/content"),
    ("DELETE", "/v1/files/{file}"),
    ("GET", "/v1/batches/{batch}"),
    ("POST", "/v1/batches/{batch}/cancel"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/files?after={file}"),
    ("GET", "/v1/batches?after={batch}"),
]


@pytest.fixture(scope="module")
def of_bulk(platform: Platform) -> Iterator[dict[str, list[str]]]:
    """Bulk's files in every state, and batches in every status."""
    owner, content, now = owner_of(platform.keys["bulk"]), jsonl(request_line("a")), timezone.now()
    files, batches = [], []
    for state in FILE_STATES:
        with platform.storage.draft() as draft:
            draft.write(content)
            purpose = "batch_output" if state == "output" else "batch"
            new = NewFile(
                storage_name=draft.keep(), filename=state, num_bytes=len(content), purpose=purpose, lifetime_s=3_600
            )
            files.append(services.keep_file(owner=owner, file=new, limit_bytes=10**9).id)
    StoredFile.objects.filter(filename="deleted").update(deleted_at=now)
    StoredFile.objects.filter(filename="expired").update(expires_at=now - timedelta(seconds=1))
    for status in STATES:
        made = services.create_batch(
            owner=owner, endpoint="/v1/chat/completions", input_file_id=files[0], completion_window="24h"
        )
        moment = {} if status == "validating" else {f"{status}_at": now}
        Batch.objects.filter(id=made.id).update(status=status, **moment)
        batches.append(made.id)
    yield {"file": [shown(FILE, one) for one in files], "batch": [shown(BATCH, one) for one in batches]}
    Batch.objects.all().delete()
    StoredFile.objects.all().delete()


def ask(platform: Platform, method: str, pattern: str, **names: str) -> tuple[int, str, dict[str, str]]:
    """Status, body and headers, with the ids that were asked for and those of the exchange taken out."""
    path = pattern.format(**names)
    body: Any = None
    if (method, pattern) == ("POST", "/v1/batches"):
        body = {"input_file_id": names["file"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    headers = {"authorization": f"Bearer {platform.keys['stranger']}"}
    answer = httpx2.request(method, platform.base_url + path, headers=headers, json=body)
    told = answer.text
    for name in names.values():
        told = told.replace(name, "…")
    of_the_answer = {name: value for name, value in answer.headers.items() if name not in ("date", "x-request-id")}
    return answer.status_code, told, {name: re.sub(r"\d+", "0", value) for name, value in of_the_answer.items()}


@pytest.mark.parametrize(("method", "pattern"), ROUTES)
def test_somebody_elses_object_in_any_state_is_one_that_never_was(
    platform: Platform, of_bulk: dict[str, list[str]], method: str, pattern: str
) -> None:
    never = ask(platform, method, pattern, file=shown(FILE, uuid4()), batch=shown(BATCH, uuid4()))
    if "after" not in pattern:
        assert never[0] == 404
    kind = "file" if "{file}" in pattern or pattern == "/v1/batches" else "batch"
    other = "batch" if kind == "file" else "file"
    for name in of_bulk[kind]:
        assert ask(platform, method, pattern, **{kind: name, other: of_bulk[other][0]}) == never


def test_lists_and_counts_show_nothing_of_others(platform: Platform, of_bulk: dict[str, list[str]]) -> None:
    for path in ("/v1/files", "/v1/batches", "/v1/files?purpose=batch_output", "/v1/files?order=asc"):
        _, told, _ = ask(platform, "GET", path)
        assert told == '{"object":"list","data":[],"first_id":null,"last_id":null,"has_more":false}'
    assert Batch.objects.filter(status="cancelling").count() == 1
    assert tasks.sweep(platform.storage, timezone.now()) == 2
