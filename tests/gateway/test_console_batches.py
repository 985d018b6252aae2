"""Batches in the console: who may, what a file becomes, what is refused, and that foreign ids are unknown ids."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from django.utils import timezone

from gateway.batches import ids, wishes
from gateway.batches.models import Batch, StoredFile
from tenants import services
from tenants.models import ApiKey
from tenants.roles import Capability, Role, may
from tests.gateway.people import person


def request_line(custom_id: str) -> str:
    body = {"model": "simulated", "messages": [{"role": "user", "content": "Hi"}]}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


CONTENT = "\n".join(request_line(str(number)) for number in range(3)).encode()


class House:
    """A tenant with a key and a developer."""

    def __init__(self, slug: str) -> None:
        self.slug = slug
        self.tenant = services.create_tenant(actor="tests", slug=slug, name=slug.title())
        self.project = services.create_project(actor="tests", tenant=self.tenant, name="main")
        self.key = services.issue_key(actor="tests", project=self.project, name="app", env="test").key
        self.client = self.person(Role.DEVELOPER)

    def person(self, role: Role) -> Client:
        return person(self.tenant, role)

    def at(self, page: str) -> str:
        return f"/console/{self.slug}/{page}"

    def upload(self, content: bytes = CONTENT, *, name: str = "lines.jsonl", client: Any = None, **form: str) -> Any:
        given = {"endpoint": "/v1/chat/completions", "key": str(self.key.id), "made_id": uuid.uuid4(), **form}
        file = SimpleUploadedFile(name, content)
        return (client or self.client).post(self.at("batches"), {**given, "file": file})


@pytest.fixture
def wished(monkeypatch: pytest.MonkeyPatch) -> list[uuid.UUID]:
    """Batches for which Celery was asked."""
    found: list[uuid.UUID] = []
    monkeypatch.setattr(wishes, "ask_for", lambda task, batch_id: found.append(batch_id))
    return found


@pytest.fixture
def house(transactional_db: None, settings: Any, tmp_path: Path, wished: list[uuid.UUID]) -> House:
    settings.RUBATO_FILES_DIR = str(tmp_path)
    return House("aurora")


@pytest.fixture
def contents(tmp_path: Path) -> Any:
    return lambda: [path for path in tmp_path.rglob("*") if path.is_file()]


def batch_of(house: House, **changes: Any) -> Batch:
    house.upload()
    Batch.objects.update(**changes)
    return Batch.objects.get()


def text_of(answer: Any) -> str:
    return str(answer.content.decode())


def test_the_pages_are_open_to_who_may_use_batches(house: House) -> None:
    batch = batch_of(house)
    for role in (role for role in Role if role is not Role.DEVELOPER):
        client, allowed = house.person(role), may(role, Capability.USE_PLAYGROUND)
        for page in ("batches", f"batches/{batch.id}"):
            assert client.get(house.at(page)).status_code == (200 if allowed else 403), (role, page)
        assert house.upload(client=client).status_code == (302 if allowed else 403)
        if not allowed:
            assert client.post(house.at(f"batches/{batch.id}/cancel")).status_code == 403
            assert client.get(house.at(f"files/{batch.input_file_id}")).status_code == 403


def test_a_file_becomes_a_batch_in_the_name_of_a_key_and_is_to_be_checked(
    house: House, wished: list[uuid.UUID]
) -> None:
    answer = house.upload(name="../C:\\jobs\\lines.jsonl")
    batch, file = Batch.objects.get(), StoredFile.objects.get()
    assert answer.headers["Location"] == house.at(f"batches/{batch.id}")
    assert (batch.status, batch.endpoint, batch.key_id) == ("validating", "/v1/chat/completions", house.key.id)
    assert (batch.input_file_id, file.filename, file.num_bytes) == (file.id, "lines.jsonl", len(CONTENT))
    assert wished == [batch.id]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"content": b""}, "empty"),
        ({"endpoint": "/v1/files"}, "valid choice"),
        ({"key": str(uuid.uuid4())}, "valid choice"),
    ],
)
def test_a_form_that_is_wrong_says_so_and_keeps_nothing(house: House, contents: Any, form: Any, words: str) -> None:
    assert words in text_of(house.upload(**form))
    assert (Batch.objects.count(), StoredFile.objects.count(), contents()) == (0, 0, [])


def test_keys_that_open_nothing_cannot_be_chosen(house: House) -> None:
    nova = House("nova")
    revoked = services.issue_key(actor="tests", project=house.project, name="old", env="test").key
    services.revoke_key(actor="tests", key_id=revoked.id)
    ended = services.issue_key(actor="tests", project=house.project, name="gone", env="test").key
    ApiKey.objects.filter(id=ended.id).update(expires_at=timezone.now())
    managing = services.issue_key(actor="tests", project=house.project, name="boss", env="test", role=Role.OWNER).key
    for key in (nova.key, revoked, ended, managing):
        assert "valid choice" in text_of(house.upload(key=str(key.id)))
    assert not Batch.objects.exists()


def test_a_file_that_is_too_large_and_a_tenant_that_keeps_too_much_are_told(
    house: House, settings: Any, contents: Any
) -> None:
    settings.RUBATO_FILE_LIMIT_BYTES = len(CONTENT) - 1
    assert "at most" in text_of(house.upload())
    settings.RUBATO_FILE_LIMIT_BYTES, settings.RUBATO_TENANT_FILES_BYTES = 1_000_000, 100
    assert "delete some first" in text_of(house.upload())
    assert (StoredFile.objects.count(), contents()) == (0, [])


def test_the_list_shows_how_far_each_is_and_asks_again_while_one_goes_on(house: House) -> None:
    batch_of(house, status="in_progress", in_progress_at=timezone.now(), num_lines=40, num_completed=11, num_failed=1)
    page = text_of(house.client.get(house.at("batches")))
    assert "12 of 40, 1 failed" in page
    fragment = text_of(house.client.get(house.at("batches"), headers={"HX-Request": "true"}))
    assert "hx-trigger" in fragment
    assert "<html" not in fragment
    Batch.objects.update(status="completed", completed_at=timezone.now())
    assert "hx-trigger" not in text_of(house.client.get(house.at("batches")))


def test_errors_are_shown_with_the_number_of_their_line(house: House) -> None:
    errors = [
        {"line": 7, "param": "custom_id", "message": "'custom_id' '<b>' is that of line 3 too.", "code": "x"},
        {"line": None, "param": None, "message": "The file has no requests.", "code": "x"},
    ]
    batch = batch_of(house, status="failed", failed_at=timezone.now(), errors=errors)
    page = text_of(house.client.get(house.at(f"batches/{batch.id}")))
    assert '<th scope="row">7</th><td>custom_id</td>' in page
    assert "&lt;b&gt;" in page
    assert "The file has no requests." in page
    assert "Cancel the batch" not in page


@pytest.mark.parametrize(("num_errors", "words"), [(1, "1 error"), (99, "99 errors"), (100, "the first 100 errors")])
def test_as_many_errors_as_a_check_tells_are_said_to_be_the_first(house: House, num_errors: int, words: str) -> None:
    wrong = [{"line": number, "param": None, "message": "bad", "code": "x"} for number in range(num_errors)]
    batch = batch_of(house, status="failed", failed_at=timezone.now(), errors=wrong)
    pages = [text_of(house.client.get(house.at(one))) for one in ("batches", f"batches/{batch.id}")]
    assert [f"<small>{words}</small>" in page for page in pages] == [True, True]
    assert ("lines behind them may be wrong too" in pages[1]) == (num_errors == 100)


def test_a_batch_is_cancelled_once_and_not_after_its_end(house: House) -> None:
    batch = batch_of(house)
    where = house.at(f"batches/{batch.id}/cancel")
    assert house.client.get(where).status_code == 405
    house.client.post(where)
    assert Batch.objects.get().status == "cancelling"
    Batch.objects.update(status="completed", completed_at=timezone.now())
    assert "Cannot cancel" in text_of(house.client.post(where, follow=True))


def test_files_come_down_whole_under_their_names(house: House) -> None:
    batch = batch_of(house)
    answer = house.client.get(house.at(f"files/{batch.input_file_id}"))

    async def read() -> bytes:
        return b"".join([piece async for piece in answer.streaming_content])

    assert asyncio.run(read()) == CONTENT
    assert answer.headers["Content-Disposition"] == "attachment; filename*=UTF-8''lines.jsonl"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_what_is_another_tenants_is_not_there(house: House) -> None:  # P47
    nova = House("nova")
    batch = batch_of(nova)
    unknown = uuid.uuid4()
    for page in ("batches/{}", "files/{}"):
        own, foreign = batch.id if "batches" in page else batch.input_file_id, unknown
        answers = [house.client.get(house.at(page.format(one))) for one in (own, foreign)]
        assert [answer.status_code for answer in answers] == [404, 404]
    for one in (batch.id, unknown):
        assert house.client.post(house.at(f"batches/{one}/cancel")).status_code == 404
    assert Batch.objects.get().status == "validating"
    listed = text_of(house.client.get(house.at("batches") + f"?after={ids.shown(ids.BATCH, batch.id)}"))
    assert "No batch yet" in listed


def test_the_list_goes_on_where_a_page_ends(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.console.pages.batches.SHOWN", 2)
    for number in range(3):
        house.upload(name=f"file-{number}.jsonl")
    first = text_of(house.client.get(house.at("batches")))
    assert "file-2" in first
    assert "file-0" not in first
    (older,) = [part.partition('"')[0] for part in first.split('href="?after=')[1:]]
    assert "file-0" in text_of(house.client.get(house.at(f"batches?after={older}")))


def test_who_has_no_key_is_led_to_one(house: House) -> None:
    services.revoke_key(actor="tests", key_id=house.key.id)
    assert "in the name of a key" in text_of(house.client.get(house.at("batches")))
