"""/v1/files through the official client: whole objects, clear refusals, nothing left behind."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import threading
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from django.utils import timezone

from gateway.auth import Caller
from gateway.batches import tasks
from gateway.batches.archive import Archive
from gateway.batches.models import StoredFile
from gateway.batches.storage import Draft, Storage
from gateway.v1 import files
from gateway.v1.http import Exchange
from scheduler_engine.policy import PriorityClass
from tests.gateway.batches.conftest import Platform, jsonl, request_line, until, uuid_of

DAY_S = 86_400
CONTENT = jsonl(request_line("a"), request_line("b"))


def upload(platform: Platform, content: bytes = CONTENT, tenant: str = "aurora", **changes: Any) -> Any:
    return platform.client(tenant).files.create(file=("night.jsonl", content), purpose="batch", **changes)


def post(platform: Platform, content: bytes, content_type: str, tenant: str = "aurora") -> httpx2.Response:
    headers = {"authorization": f"Bearer {platform.keys[tenant]}", "content-type": content_type}
    return httpx2.post(f"{platform.base_url}/v1/files", content=content, headers=headers)


def form(*parts: tuple[str, bytes]) -> bytes:
    """A body with the boundary ``cut``; a part is (the rest of its disposition, its value)."""
    body = b"".join(
        b"--cut\r\ncontent-disposition: form-data; " + head.encode() + b"\r\n\r\n" + value + b"\r\n"
        for head, value in parts
    )
    return body + b"--cut--\r\n"


PURPOSE = ('name="purpose"', b"batch")
FILE = ('name="file"; filename="night.jsonl"', CONTENT)


def test_a_file_comes_back_as_it_was_sent(platform: Platform) -> None:
    made = upload(platform)
    assert (made.object, made.purpose, made.filename, made.bytes) == ("file", "batch", "night.jsonl", len(CONTENT))
    assert made.expires_at == made.created_at + 30 * DAY_S
    assert platform.client().files.retrieve(made.id) == made
    assert platform.client().files.content(made.id).read() == CONTENT


def test_the_content_is_private_on_the_disk_and_carries_no_name_of_the_client(platform: Platform) -> None:
    before = set(platform.contents())
    upload(platform)
    (path,) = set(platform.contents()) - before
    assert "night" not in str(path.relative_to(platform.files))
    assert path.read_bytes() == CONTENT


def test_an_upload_may_say_when_it_expires(platform: Platform) -> None:
    made = upload(platform, expires_after={"anchor": "created_at", "seconds": 3_600})
    assert made.expires_at == made.created_at + 3_600


def test_pages_follow_each_other_in_either_order(platform: Platform) -> None:
    made = [upload(platform, tenant="nova").id for _ in range(5)]
    client = platform.client("nova")
    assert [file.id for file in client.files.list(limit=2)] == made[::-1]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == made
    first = client.files.list(limit=2)
    assert (len(first.data), first.has_more) == (2, True)
    assert not client.files.list(purpose="batch_output").data


def test_a_deleted_file_is_gone_at_once_and_its_content_with_the_next_sweep(platform: Platform) -> None:
    made = upload(platform)
    name = StoredFile.objects.get(id=uuid_of(made.id)).storage_name
    deleted = platform.client().files.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for call in (platform.client().files.retrieve, platform.client().files.content, platform.client().files.delete):
        with pytest.raises(openai.NotFoundError):
            call(made.id)
    tasks.sweep(platform.storage, timezone.now())
    assert name not in {path.name for path in platform.contents()}
    assert not StoredFile.objects.filter(id=uuid_of(made.id)).exists()


def test_an_expired_file_is_gone_as_if_it_were_deleted(platform: Platform) -> None:
    made = upload(platform, expires_after={"anchor": "created_at", "seconds": 3_600})
    StoredFile.objects.filter(id=uuid_of(made.id)).update(expires_at=timezone.now())
    with pytest.raises(openai.NotFoundError):
        platform.client().files.content(made.id)
    assert tasks.sweep(platform.storage, timezone.now() + timedelta(seconds=1)) == 1


def test_a_sweep_takes_what_belongs_to_nobody_and_leaves_what_is_young(platform: Platform) -> None:
    with platform.storage.draft() as draft:
        draft.write(b"orphan")
        name = draft.keep()
    tasks.sweep(platform.storage, timezone.now())
    (path,) = [path for path in platform.contents() if path.name == name]
    os.utime(path, (0, 0))
    tasks.sweep(platform.storage, timezone.now())
    assert not path.exists()


@pytest.mark.parametrize(
    ("parts", "param"),
    [
        ((FILE,), "purpose"),
        ((PURPOSE,), "file"),
        ((('name="purpose"', b"fine-tune"), FILE), "purpose"),
        ((PURPOSE, ('name="file"; filename="empty"', b"")), "file"),
        ((PURPOSE, FILE, FILE), "file"),
        ((PURPOSE, ('name="other"; filename="x"', b"x")), "other"),
        ((PURPOSE, FILE, ('name="colour"', b"red")), "colour"),
        ((PURPOSE, FILE, ('name="expires_after[seconds]"', b"3600")), "expires_after[anchor]"),
        (
            (PURPOSE, FILE, ('name="expires_after[anchor]"', b"created_at"), ('name="expires_after[seconds]"', b"60")),
            "expires_after[seconds]",
        ),
        ((PURPOSE, ('name="purpose2"', b"x" * 2_000), FILE), "purpose2"),
    ],
)
def test_a_form_that_is_wrong_names_its_field_and_leaves_nothing(
    platform: Platform, parts: tuple[tuple[str, bytes], ...], param: str
) -> None:
    before = platform.contents()
    answer = post(platform, form(*parts), "multipart/form-data; boundary=cut")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert platform.contents() == before


@pytest.mark.parametrize(
    ("content", "content_type", "status", "code"),
    [
        (form(PURPOSE, FILE)[:-20], "multipart/form-data; boundary=cut", 400, "invalid_request"),
        (form(PURPOSE, FILE), "multipart/form-data; boundary=other", 400, "invalid_request"),
        (form(PURPOSE, FILE), "multipart/form-data", 415, "unsupported_media_type"),
        (b"{}", "application/json", 415, "unsupported_media_type"),
        (form(PURPOSE, FILE), "multipart/form-data; boundary=" + "x" * 300, 400, "invalid_request"),
        (form(PURPOSE, (FILE[0], b"x" * 300_001)), "multipart/form-data; boundary=cut", 413, "request_too_large"),
        (form(PURPOSE, (FILE[0], b"x" * 400_000)), "multipart/form-data; boundary=cut", 413, "request_too_large"),
    ],
)
def test_a_body_that_is_no_form_or_too_large_is_refused_and_leaves_nothing(
    platform: Platform, content: bytes, content_type: str, status: int, code: str
) -> None:
    before = platform.contents()
    answer = post(platform, content, content_type)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert platform.contents() == before


def test_an_upload_whose_client_leaves_is_forgotten(platform: Platform) -> None:
    before = set(platform.contents())
    host, port = platform.base_url.removeprefix("http://").split(":")
    body = form(PURPOSE, FILE)
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {platform.keys['aurora']}\r\n"
        f"content-type: multipart/form-data; boundary=cut\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body[:-10])
        until(lambda: set(platform.contents()) > before)  # else there is nothing yet that could be forgotten
    until(lambda: set(platform.contents()) == before)


def test_a_full_disk_is_said_and_nothing_is_kept(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = set(platform.contents())
    monkeypatch.setattr("gateway.batches.storage.os.fsync", full)
    with pytest.raises(openai.InternalServerError) as refused:
        upload(platform)
    assert (refused.value.status_code, refused.value.code) == (503, "storage_full")
    assert int(refused.value.response.headers["retry-after"]) >= 1
    assert set(platform.contents()) == before


def test_one_tenants_files_together_are_bounded(platform: Platform, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = platform.runtime.archive
    assert archive is not None
    monkeypatch.setattr("gateway.batches.services.stored_bytes", lambda: archive.tenant_limit_bytes)
    before = set(platform.contents())
    with pytest.raises(openai.BadRequestError) as refused:
        upload(platform)
    assert refused.value.code == "storage_quota_exceeded"
    assert set(platform.contents()) == before


@pytest.mark.parametrize("name", ["../../etc/passwd", "C:\\night\\x.jsonl", "a\x07b.jsonl", ".", "é" * 300])
def test_a_file_name_is_only_ever_a_name(platform: Platform, name: str) -> None:
    made = platform.client().files.create(file=(name, CONTENT), purpose="batch")
    assert "/" not in made.filename
    assert made.filename.isprintable()
    assert platform.client().files.content(made.id).read() == CONTENT


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=10001", "limit=two", "after=me", "order=up", "colour=red", "limit=1&limit=2", "purpose=%00"],
)
def test_a_wrong_query_names_its_parameter(platform: Platform, query: str) -> None:
    headers = {"authorization": f"Bearer {platform.keys['aurora']}"}
    answer = httpx2.get(f"{platform.base_url}/v1/files?{query}", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def test_a_method_that_is_not_served_is_told_which_are(platform: Platform) -> None:
    answer = httpx2.put(f"{platform.base_url}/v1/files")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST, GET")


def test_a_draft_that_is_not_kept_leaves_nothing(tmp_path: Path) -> None:
    with Draft(tmp_path) as draft:
        draft.write(b"half")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def contents_of(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


class Gate:
    """Stands before a function: says that it was called, and lets it go on when told."""

    def __init__(self, work: Any) -> None:
        self.was_called, self.may_go_on = threading.Event(), threading.Event()
        self._work = work

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.was_called.set()
        assert self.may_go_on.wait(30)
        return self._work(*arguments, **named)


@pytest.mark.parametrize("where", ["the first byte", "the name for good", "the row"])
async def test_an_upload_that_is_cancelled_leaves_a_whole_file_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    rows: list[str] = []

    def row(*, file: Any, **_: Any) -> StoredFile:
        rows.append(file.storage_name)
        return StoredFile(storage_name=file.storage_name)

    monkeypatch.setattr(files.services, "keep_file", row)
    owner, name = {
        "the first byte": (Draft, "write"),
        "the name for good": (Draft, "keep"),
        "the row": (files.services, "keep_file"),
    }[where]
    gate = Gate(getattr(owner, name))
    monkeypatch.setattr(owner, name, lambda *arguments, **named: gate(*arguments, **named))
    archive = Archive(storage=Storage(tmp_path), file_limit_bytes=10_000, tenant_limit_bytes=10_000)
    body = form(PURPOSE, FILE)

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"multipart/form-data; boundary=cut")]
    exchange = Exchange({"path": "/v1/files", "method": "POST", "headers": headers}, receive, receive)
    ids = [str(uuid.uuid4()) for _ in range(3)]
    caller = Caller(ids[0], "public", ids[1], ids[2], PriorityClass.DEFAULT)
    uploading = asyncio.create_task(files._create(exchange, archive, caller))
    await asyncio.to_thread(gate.was_called.wait, 30)
    uploading.cancel()
    await asyncio.sleep(0)
    gate.may_go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await uploading
    assert contents_of(tmp_path) == rows
    assert not archive.uploads
    archive.threads.close()
