"""What an edit would have refused at the door, of the calls that came."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from billing.models import UsageRequest
from gateway.desk.door_preview import Call, refused
from tenants import selectors, services
from tenants.models import QuotaPolicy
from tests.gateway.desk_world import act, drafted, form_of, open_house

PLACE = "aurora default"


SECOND = 1_000_000


def call(at_s: float, length_s: float = 0.0, reserved: int = 10, used: int = 10) -> Call:
    return Call(int(at_s * SECOND), int((at_s + length_s) * SECOND), PLACE, reserved, used)


def would_refuse(calls: list[Call], **limits: Any) -> dict[str, int]:
    none = {"allowed": True, "requests_per_minute": None, "tokens_per_minute": None, "concurrency": None}
    (found,) = refused(calls, {PLACE: {**none, **limits}})
    assert found.num_calls == len(calls)
    return dict(found.by_limit)


def test_without_limits_nothing_is_refused() -> None:
    assert would_refuse([call(0.0) for _ in range(99)]) == {}


def test_a_class_that_is_taken_away_refuses_all() -> None:
    assert would_refuse([call(0.0), call(1.0)], allowed=False) == {"not allowed": 2}


def test_requests_a_minute_refill_with_time() -> None:
    assert would_refuse([call(0.0), call(0.0), call(0.0)], requests_per_minute=2) == {"requests a minute": 1}
    assert would_refuse([call(0.0), call(0.0), call(30.0)], requests_per_minute=2) == {}
    assert would_refuse([call(0.0), call(0.0), call(29.9)], requests_per_minute=2) == {"requests a minute": 1}


def test_tokens_that_were_not_used_come_back_at_the_end_of_a_call() -> None:
    long, short = call(0.0, 5.0, reserved=100, used=10), call(6.0, reserved=85)
    assert would_refuse([long, short], tokens_per_minute=100) == {}
    assert would_refuse([long, call(4.0, reserved=85)], tokens_per_minute=100) == {"tokens a minute": 1}


def test_a_call_that_would_be_refused_takes_nothing() -> None:
    assert would_refuse(
        [call(0.0, reserved=99), call(0.0, reserved=50), call(0.0, reserved=1)], tokens_per_minute=100
    ) == {"tokens a minute": 1}


def test_calls_at_once_are_counted_until_they_end() -> None:
    assert would_refuse([call(0.0, 2.0), call(1.0), call(2.0)], concurrency=1) == {"at once": 1}


def test_places_without_an_edit_are_not_looked_at() -> None:
    assert refused([call(0.0)], {"nova batch": {}}) == []


@pytest.fixture
def house(transactional_db: None, valkey: str, settings: Any) -> Any:
    return open_house(settings, valkey)


def came(house: Any, count: int, ago: timedelta) -> None:
    """Calls of the default class, each under way for a minute."""
    at = timezone.now() - ago
    for number in range(count):
        UsageRequest.objects.create(
            id=f"00000000-0000-7000-8000-{number:012d}",
            tenant_id=house.tenant.id,
            priority_class="default",
            reserved_at=at,
            ended_at=at + timedelta(minutes=1),
            state="completed",
            reserved_tokens=10,
        )


def test_the_door_is_asked_about_the_calls_of_the_last_hour(house: Any) -> None:
    came(house, 3, timedelta(minutes=5))
    proposal = drafted(house.alice, default__concurrency="1")
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert "3 calls came; refused would have been 2 (at once)" in page


def grant_batch(is_granted: bool) -> None:
    batch = QuotaPolicy.objects.get(priority_class="batch")
    batch.allowed = is_granted
    services.save_quota(actor="tests", policy=selectors.tenant_class_policy(batch))


@pytest.mark.parametrize(
    ("is_granted", "words"),
    [(True, "sent to batch, as far as its limits hold, would have been 1"), (False, "refused would")],
)
def test_calls_are_said_to_overflow_only_where_the_lower_class_is_granted(
    house: Any, is_granted: bool, words: str
) -> None:
    grant_batch(is_granted)
    came(house, 2, timedelta(minutes=1))
    proposal = drafted(house.alice, default__requests_per_minute="1", default__overflow_to="batch")
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert words in page
    assert "<td>overflow_to</td><td>refused</td><td>batch</td>" in page


def test_a_door_to_which_nobody_came_says_so(house: Any) -> None:
    proposal = drafted(house.alice, default__concurrency="1")
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert "At the door, over the last hour" in page
    assert "No call came in the last hour to what this edit touches" in page


def test_an_edit_of_class_parameters_is_not_about_the_door(house: Any) -> None:
    proposal = drafted(house.alice, "/operator/policy/classes", batch__floor_percent="7")
    assert "At the door" not in house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()


@pytest.mark.parametrize("is_granted", [True, False])
def test_an_overflow_into_a_class_that_is_not_granted_is_warned_of(house: Any, is_granted: bool) -> None:
    grant_batch(is_granted)
    proposal = drafted(house.alice, default__overflow_to="batch")
    page = house.alice.get(f"/operator/policy/edits/{proposal.id}").content.decode()
    assert ("<b>Aurora, default</b> is to overflow into a class that this tenant is not granted" in page) != is_granted


def test_taking_the_lower_class_away_is_warned_of_where_another_overflows_into_it(house: Any) -> None:
    grant_batch(True)
    act(house.alice, drafted(house.alice, default__overflow_to="batch"), action="send")
    form = form_of(house.alice)
    del form[next(name for name in form if name.endswith("batch.allowed"))]
    place = house.alice.post("/operator/policy/", form)["Location"]
    assert "<b>Aurora, default</b> is to overflow" in house.alice.get(place).content.decode()


def test_the_door_is_asked_about_the_edit_made_to_the_policy_in_force(house: Any) -> None:
    came(house, 3, timedelta(minutes=5))
    place = f"/operator/policy/pause/{house.tenant.id}/default"
    house.alice.post(place, {"action": "pause"})
    form = form_of(house.alice, default__concurrency="1")
    house.alice.post(place, {"action": "resume"})
    page = house.alice.post("/operator/policy/", form, follow=True).content.decode()
    assert "3 calls came; refused would have been 2 (at once)" in page
