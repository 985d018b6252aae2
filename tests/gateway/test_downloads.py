"""Files that people and programs fetch: whole, for a client that takes gzip, however large they are."""

from __future__ import annotations

import random
import uuid
import zlib
from pathlib import Path
from typing import Any

import httpx2
import pytest
from django.http import HttpResponse, StreamingHttpResponse
from django.test import Client, RequestFactory
from django.utils import timezone

from billing.models import UsageRequest
from gateway.batches.models import StoredFile
from gateway.batches.storage import Storage
from gateway.downloads import Pieces, WholeGzip, spooled
from tenants.roles import Role
from tests.gateway.management_world import House, call, open_houses, whole

NUM_OPERATIONS = 10_000
LEAST_BYTES = 1_048_576
GZIP = {"Accept-Encoding": "gzip"}


@pytest.fixture
def aurora(transactional_db: None, settings: Any) -> House:
    return open_houses(settings)["aurora"]


def read(answer: Any) -> bytes:
    """What httpx2 makes of an answer. A packed one is one gzip member to its last byte."""
    body = whole(answer)
    if answer.get("Content-Encoding") == "gzip":
        unpacker = zlib.decompressobj(wbits=31)
        unpacker.decompress(body)
        assert (unpacker.eof, unpacker.unused_data) == (True, b"")
    return httpx2.Response(200, headers=dict(answer.headers), content=body).content


@pytest.mark.parametrize("shape", ["csv", "ndjson", "cloudevents"])
def test_an_export_of_more_than_a_mebibyte_is_read_whole_by_who_takes_gzip(aurora: House, shape: str) -> None:
    now = timezone.now()
    UsageRequest.objects.bulk_create(
        UsageRequest(id=uuid.uuid4(), tenant_id=aurora.tenant.id, state="completed", ended_at=now)
        for _ in range(NUM_OPERATIONS)
    )
    answer = call(aurora.management_key(Role.OWNER), "GET", f"usage/export?format={shape}", headers=GZIP)
    assert answer["Content-Encoding"] == "gzip"
    content = read(answer)
    assert len(content) > LEAST_BYTES
    assert len(content.splitlines()) == NUM_OPERATIONS + 1 + (shape == "csv")  # the house's own; the names of columns


def test_a_batch_s_file_of_more_than_a_mebibyte_is_read_whole_by_who_takes_gzip(
    aurora: House, settings: Any, tmp_path: Path
) -> None:
    settings.RUBATO_FILES_DIR = str(tmp_path)
    content = random.Random(7).randbytes(2 * LEAST_BYTES + 1)
    with Storage(tmp_path).draft() as draft:
        draft.write(content)
        row = StoredFile.objects.create(
            tenant_id=aurora.tenant.id,
            project_id=aurora.project.id,
            filename="lines.jsonl",
            purpose="batch",
            num_bytes=len(content),
            storage_name=draft.keep(),
        )
    browser = Client()
    browser.force_login(aurora.member.user, backend="django.contrib.auth.backends.ModelBackend")
    assert read(browser.get(f"/console/aurora/files/{row.id}", headers=GZIP)) == content


@pytest.mark.parametrize("num_bytes", [0, 1, 262_144, 262_145, 3_000_000])
def test_what_is_sent_in_pieces_is_one_gzip_member(num_bytes: int) -> None:
    text = "".join(random.Random(7).choices("0123456789", k=num_bytes))

    sent = StreamingHttpResponse(Pieces(spooled([text])), headers={"ETag": '"one"'})
    answer = WholeGzip(lambda request: HttpResponse()).process_response(RequestFactory().get("/", headers=GZIP), sent)
    assert (answer["Content-Encoding"], answer["ETag"]) == ("gzip", 'W/"one"')
    assert read(answer).decode() == text
