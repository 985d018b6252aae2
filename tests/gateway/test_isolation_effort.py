"""P47, P49. What is done to look for another tenant's object is what is done to look for one that never was.

Time follows effort: the same statements to PostgreSQL, told apart only by the id they name. Counted, so that no clock
is needed. (Redis: test_isolation_matrix.py. Cached prefixes: tests/gpu_worker/model/test_prefix_hits.py.)
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from billing import services as billing_services
from gateway.batches import selectors
from gateway.batches import services as batch_services
from gateway.batches.services import NewFile, NoSuchObject, Owner
from gateway.stored.models import StoredResponse
from gateway.webhooks import services as webhooks
from tenants import members
from tenants.isolation import ALIAS, tenant
from tenants.roles import Role
from tests.gateway.management_world import NAMED, PRICES, House, as_owner

CONSOLE = (
    *("batches/{batch}", "batches/{batch}/cancel", "files/{file}", "keys/{key}/rotate", "keys/{key}/revoke"),
    *("statements/{statement}.csv", "members/{member}/role", "members/{member}/remove", "invitations/{invite}"),
    *("webhooks/{endpoint}/off", "live/{batch}/cancel", "deliveries/{endpoint}/replay"),
)
_ID = re.compile(
    r"[0-9a-f]{8}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{4}-?[0-9a-f]{12}|\b[0-9a-z]{32}\b"
)  # also a session's


@pytest.fixture
def houses(transactional_db: None, settings: Any) -> dict[str, House]:
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    version = billing_services.set_prices(actor="tests", prices=PRICES).version
    return {slug: House(slug, version) for slug in ("aurora", "stranger")}


@contextmanager
def statements() -> Iterator[list[str]]:
    """Everything that this thread asks PostgreSQL in the block, in both roles, ids and moments taken out."""
    found: list[str] = []
    with CaptureQueriesContext(connections[ALIAS]) as walled, CaptureQueriesContext(connections["default"]) as open_:
        yield found
    for captured in (walled, open_):
        found += [re.sub(r"\d+", "0", _ID.sub("…", query["sql"])) for query in captured.captured_queries]


def made_by(house: House) -> dict[str, uuid.UUID]:
    """One more of everything that the management API does not name."""
    owner = Owner(
        tenant_id=house.tenant.pk, project_id=house.project.pk, key_id=house.key.key.pk, key_public_id="x" * 12
    )
    content = NewFile(storage_name=uuid.uuid4().hex, filename="in", num_bytes=1, purpose="batch", lifetime_s=3_600)
    file = batch_services.keep_file(owner=owner, file=content, limit_bytes=10_000)
    batch = batch_services.create_batch(
        owner=owner, endpoint="/v1/chat/completions", input_file_id=file.id, completion_window="24h"
    )
    endpoint = webhooks.add(actor="tests", tenant=house.tenant, url="https://x.example/", events=["key.revoked"])
    return {"file": file.id, "batch": batch.id, "endpoint": endpoint.id}


@pytest.mark.parametrize(("method", "route"), NAMED)
def test_the_management_api_asks_the_same_for_anothers_object_as_for_none(
    houses: dict[str, House], method: str, route: str
) -> None:
    houses["aurora"].management_key(Role.OWNER)
    asked = []
    for ids in (houses["stranger"].ids(), {name: str(uuid.uuid4()) for name in houses["aurora"].ids()}):
        with statements() as found:
            as_owner(houses["aurora"], method, route.format(**ids), {} if method == "POST" else None)
        asked.append(found)
    assert asked[0] == asked[1] != []


def test_the_console_answers_and_asks_the_same_for_anothers_object_as_for_none(houses: dict[str, House]) -> None:
    theirs = {**houses["stranger"].ids(), **{name: str(one) for name, one in made_by(houses["stranger"]).items()}}
    ann = User.objects.create_user("ann", "ann@x.example", "x")
    members.add_member(actor="tests", tenant=houses["aurora"].tenant, user=ann, email=ann.email, role=Role.OWNER)
    for slug in ("aurora", "stranger"):
        for page in CONSOLE:
            seen = []
            for ids in (theirs, {name: str(uuid.uuid4()) for name in theirs}):
                client = Client()  # the messages of one request are not shown in the next
                client.force_login(ann)
                with statements() as found:
                    answer = client.post(f"/console/{slug}/{page.format(**ids)}", {"role": "admin", "grace": "0"})
                seen.append((answer.status_code, _ID.sub("…", answer.content.decode()), found))
            assert seen[0][:2] == seen[1][:2], (slug, page)
            differing = [pair for pair in zip_longest(seen[0][2], seen[1][2]) if pair[0] != pair[1]]
            assert differing == [], (slug, page)
            assert seen[0][0] in ((404, 405) if slug == "stranger" else (404, 302, 405)), (slug, page)


def look_ups(of: uuid.UUID) -> dict[str, Callable[[dict[str, uuid.UUID]], object]]:
    """What the archive's routes ask, as one tenant."""
    owner = Owner(tenant_id=of, project_id=uuid.uuid4(), key_id=uuid.uuid4(), key_public_id="x" * 12)

    def create(ids: dict[str, uuid.UUID]) -> object:
        return batch_services.create_batch(
            owner=owner, endpoint="/v1/chat/completions", input_file_id=ids["file"], completion_window="24h"
        )

    def stored(ids: dict[str, uuid.UUID]) -> object:
        return StoredResponse.objects.using(ALIAS).filter(id=ids["response"]).first()

    return {
        "show a file": lambda ids: selectors.file(of, ids["file"], timezone.now()),
        "delete a file": lambda ids: batch_services.delete_file(owner=owner, file_id=ids["file"]),
        "show a batch": lambda ids: selectors.batch(of, ids["batch"]),
        "cancel a batch": lambda ids: batch_services.cancel_batch(owner=owner, batch_id=ids["batch"]),
        "make a batch of a file": create,
        "show a stored response": stored,
    }


def test_the_archive_asks_the_same_for_anothers_object_as_for_none(houses: dict[str, House]) -> None:
    theirs, mine = made_by(houses["stranger"]), houses["aurora"].tenant.pk
    theirs["response"] = uuid.uuid4()
    StoredResponse.objects.create(id=theirs["response"], tenant_id=houses["stranger"].tenant.pk, card=b"", output=b"")
    for what, look in look_ups(mine).items():
        asked = []
        for ids in (theirs, {name: uuid.uuid4() for name in theirs}):
            with statements() as found, tenant(mine):
                try:
                    answer = look(ids)
                except NoSuchObject:
                    answer = None
            assert answer is None, what
            asked.append(found)
        assert asked[0] == asked[1] != [], what
