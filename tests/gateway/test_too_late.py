"""An act on the console's pages that another tab has overtaken: never told as done, and never a bare error page."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.utils.html import escape

from gateway.webhooks import services as webhooks
from gateway.webhooks.models import Endpoint, Threshold
from tenants import members, services
from tenants.models import ApiKey, Invitation, Membership
from tenants.roles import Role
from tests.gateway.management_world import call
from tests.gateway.tenant_console import House, open_house, text_of

Late = tuple[str, dict[str, Any], Callable[[], Any], str]


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    settings.RUBATO_WEBHOOKS_MAY_BE_PRIVATE = True
    return open_house(settings)


# What the page sends -> what another tab or person has done before, and the words that say so.
def taking_back_what_was_accepted(house: House) -> Late:
    joins = lambda: house.person("bob", None).post(f"/invitation/{house.token}")  # noqa: E731
    return f"invitations/{house.invitation.id}", {}, joins, "bob@aurora.example has joined already"


def taking_back_what_was_taken_back(house: House) -> Late:
    taken = lambda: members.take_back(actor="tests", invitation_id=house.invitation.id)  # noqa: E731
    return f"invitations/{house.invitation.id}", {}, taken, "had ended before"


def removing_who_is_removed(house: House) -> Late:
    return f"members/{house.member.id}/remove", {}, lambda: _gone(house), "is not here any more"


def changing_who_is_removed(house: House) -> Late:
    form = {"role": "auditor", "seen": "developer"}
    return f"members/{house.member.id}/role", form, lambda: _gone(house), "is not here any more"


def changing_who_was_changed(house: House) -> Late:
    form, member = (
        {"role": "auditor", "seen": "developer"},
        {"tenant_id": house.tenant.id, "member_id": house.member.id},
    )
    changed = lambda: members.change_role(actor="tests", role=Role.BILLING, **member)  # noqa: E731
    return f"members/{house.member.id}/role", form, changed, "is billing: somebody changed it since"


def revoking_what_is_revoked(house: House) -> Late:
    return f"keys/{house.key.id}/revoke", {}, lambda: _revoked(house), "had ended before"


def rotating_what_is_revoked(house: House) -> Late:
    form = {"grace": "0", "seen": house.key.last4}
    return f"keys/{house.key.id}/rotate", form, lambda: _revoked(house), "has ended, and cannot be rotated"


def switching_off_what_is_removed(house: House) -> Late:
    made = _endpoint(house)
    removed = lambda: webhooks.remove(actor="tests", endpoint_id=made.id)  # noqa: E731
    return f"webhooks/{made.id}/off", {}, removed, "There is no such endpoint"


def removing_what_is_removed(house: House) -> Late:
    made = _endpoint(house)
    removed = lambda: webhooks.remove(actor="tests", endpoint_id=made.id)  # noqa: E731
    return f"webhooks/{made.id}/remove", {}, removed, "There is no such endpoint"


def wiping_what_is_wiped(house: House) -> Late:
    line = webhooks.draw(actor="tests", tenant=house.tenant, priority_class="batch", measure="tokens", amount=9)
    wiped = lambda: webhooks.wipe(actor="tests", threshold_id=line.id)  # noqa: E731
    return f"alerts/{line.id}/remove", {}, wiped, "There is no such line"


def _gone(house: House) -> None:
    members.remove(actor="tests", tenant_id=house.tenant.id, member_id=house.member.id)


def _revoked(house: House) -> None:
    services.revoke_key(actor="tests", key_id=house.key.id)


def _endpoint(house: House) -> Endpoint:
    url, events = "https://192.0.2.1/hook", ["batch.completed"]
    return webhooks.add(actor="tests", tenant=house.tenant, url=url, events=events)


EVERY = [
    *(taking_back_what_was_accepted, taking_back_what_was_taken_back, removing_who_is_removed),
    *(changing_who_is_removed, changing_who_was_changed, revoking_what_is_revoked, rotating_what_is_revoked),
    *(switching_off_what_is_removed, removing_what_is_removed, wiping_what_is_wiped),
]


def rows() -> list[Any]:
    return [
        list(kind.objects.order_by("pk").values()) for kind in (ApiKey, Membership, Invitation, Endpoint, Threshold)
    ]


def sent(client: Client, place: str, form: dict[str, Any]) -> tuple[int, str]:
    answer = client.post(place, form, follow=True)
    return answer.status_code, " ".join(re.findall(r'<p class="notice[^>]*>(.*?)</p>', text_of(answer)))


@pytest.mark.parametrize("late", EVERY)
def test_what_comes_too_late_changes_nothing_and_says_what_is_so(house: House, late: Any) -> None:
    page, form, before, words = late(house)
    before()
    stood = rows()
    status, told = sent(house.people[Role.OWNER], house.at(page), form)
    assert (status, escape(words) in told) == (200, True), told
    assert rows() == stood


@pytest.mark.parametrize("late", EVERY)
def test_what_comes_in_time_is_done_and_says_so_otherwise(house: House, late: Any) -> None:
    page, form, _, words = late(house)
    stood = rows()
    status, told = sent(house.people[Role.OWNER], house.at(page), form)
    assert (status, escape(words) in told) == (200, False), told
    assert rows() != stood


def test_a_member_who_is_not_here_any_more_is_told_from_nobody_else(house: House) -> None:
    """Another tenant's, and one that never was, say the same."""
    owner, nobody = house.people[Role.OWNER], "00000000-0000-4000-8000-00000000000f"
    other = services.create_tenant(actor="tests", slug="other", name="Other")
    user = Membership.objects.get(role="billing").user
    foreign = members.add_member(actor="tests", tenant=other, user=user, email=user.email, role=Role.BILLING)
    _gone(house)
    told = [sent(owner, house.at(f"members/{one}/remove"), {}) for one in (house.member.id, foreign.id, nobody)]
    assert len(set(told)) == 1
    assert Membership.objects.filter(id=foreign.id).exists()


def test_the_page_of_members_sends_the_role_that_it_showed(house: House) -> None:
    page = text_of(house.people[Role.OWNER].get(house.at("members")))
    seen = re.findall(r'members/([-0-9a-f]+)/role".*?name="seen" value="(\w+)"', page, flags=re.DOTALL)
    assert dict(seen) == {str(one.id): one.role for one in Membership.objects.all()}


def test_who_removes_themselves_is_led_out(house: House) -> None:
    admin = Membership.objects.get(role="admin")
    status, told = sent(house.people[Role.ADMIN], house.at(f"members/{admin.id}/remove"), {})
    assert (status, "no longer belongs to Aurora" in told) == (200, True)


def test_by_program_an_invitation_that_was_accepted_is_not_deleted(house: House) -> None:
    key = services.issue_key(actor="tests", project=house.project, name="m", env="test", role=Role.OWNER).text
    house.person("bob", None).post(f"/invitation/{house.token}")
    answer = call(key, "DELETE", f"invites/{house.invitation.id}")
    assert (answer.status_code, "has joined already" in answer.json()["error"]["message"]) == (400, True)
    assert "deleted" not in answer.json()


def test_by_program_what_is_ended_twice_is_ended(house: House) -> None:
    """A call that is sent again since its answer was lost."""
    key = services.issue_key(actor="tests", project=house.project, name="m", env="test", role=Role.OWNER).text
    for route in (f"invites/{house.invitation.id}", f"api_keys/{house.key.id}"):
        assert [call(key, "DELETE", route).json()["deleted"] for _ in range(2)] == [True, True]
