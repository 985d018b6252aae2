"""At most so many of a tenant's stays so when several add one at once: the last free place is taken once."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db.models import QuerySet

from gateway.batches import services as batches
from gateway.batches.models import Batch, StoredFile
from gateway.webhooks import services as webhooks
from gateway.webhooks.models import EVENTS, Endpoint, Threshold
from tests.gateway.at_once import at_once, overlap_behind
from tests.gateway.management_world import House, open_houses

REFUSALS = (ValidationError, batches.TooManyOpenBatches, batches.TenantStorageFull)


@dataclass(frozen=True)
class Counted:
    """``add``: one more, told apart by the number. ``check``: where it is counted. ``most``: how many there may be."""

    add: Callable[[int], Any]
    kept: Callable[[], int]
    most: int
    check: tuple[Any, str] = (QuerySet, "count")


def endpoints(house: House) -> Counted:
    def add(number: int) -> Any:
        url = f"https://aurora.example/{number}"
        return webhooks.add(actor="tests", tenant=house.tenant, url=url, events=EVENTS)

    return Counted(add, Endpoint.objects.count, webhooks.MOST)


def lines_for_alerts(house: House) -> Counted:
    def add(number: int) -> Any:
        line = {"priority_class": "batch", "measure": "tokens", "amount": number + 1}
        return webhooks.draw(actor="tests", tenant=house.tenant, **line)

    return Counted(add, Threshold.objects.count, webhooks.MOST_THRESHOLDS)


def owner_of(house: House) -> batches.Owner:
    key = house.key.key
    return batches.Owner(
        tenant_id=house.tenant.id, project_id=house.project.id, key_id=key.id, key_public_id=key.public_id
    )


def keep(house: House, limit_bytes: int) -> StoredFile:
    file = batches.NewFile(
        storage_name=uuid.uuid4().hex, filename="in.jsonl", num_bytes=1, purpose="batch", lifetime_s=99
    )
    return batches.keep_file(owner=owner_of(house), file=file, limit_bytes=limit_bytes)


def stored_files(house: House) -> Counted:
    most = 3
    limit_bytes = most * batches.LEAST_BYTES
    return Counted(lambda _: keep(house, limit_bytes), StoredFile.objects.count, most, (batches, "stored_bytes"))


def open_batches(house: House) -> Counted:
    most, file = 3, keep(house, batches.LEAST_BYTES)
    wanted: dict[str, Any] = {
        "owner": owner_of(house),
        "endpoint": batches.ENDPOINTS[0],
        "input_file_id": file.id,
        "completion_window": "24h",
    }
    return Counted(lambda _: batches.create_batch(**wanted, most_open=most), Batch.objects.count, most)


@pytest.mark.parametrize("counted", [endpoints, lines_for_alerts, stored_files, open_batches])
def test_three_who_want_the_last_free_place_at_once_get_it_once(
    transactional_db: None, settings: Any, monkeypatch: pytest.MonkeyPatch, counted: Callable[[House], Counted]
) -> None:
    limit = counted(open_houses(settings)["aurora"])
    for number in range(limit.most - 1):
        limit.add(number)

    def one_more(number: int) -> bool:
        try:
            limit.add(limit.most + number)
        except REFUSALS:
            return False
        return True

    with monkeypatch.context() as patch:
        overlap_behind(patch, *limit.check)
        assert sorted(at_once(one_more)) == [False, False, True]
    assert limit.kept() == limit.most
