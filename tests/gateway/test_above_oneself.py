"""Nobody reaches above themselves: each act on what holds a role, by each role, on each role, by console and by key."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.contrib.auth.models import User
from django.urls import get_resolver

from gateway.console import urls as console_urls
from gateway.management_api import urls as management_urls
from tenants import members, rights, services
from tenants.isolation import tenant
from tenants.models import ApiKey, Invitation, Membership
from tenants.roles import Capability, Role, covers, may
from tests.gateway.management_world import call
from tests.gateway.tenant_console import House, open_house, text_of

WAYS = ("console", "key")
NUMBERS = itertools.count()


@pytest.fixture
def house(transactional_db: None, settings: Any) -> House:
    house = open_house(settings)
    key = services.issue_key
    house.keys = {role: key(actor="tests", project=house.project, name=role, env="test", role=role) for role in Role}
    return house


def a_key(house: House, role: Role) -> UUID:
    made = services.issue_key(actor="tests", project=house.project, name=f"k{next(NUMBERS)}", env="test", role=role)
    return made.key.id


def a_member(house: House, role: Role) -> UUID:
    user = User.objects.create_user(f"m{next(NUMBERS)}")
    email = f"{user.username}@aurora.example"
    return members.add_member(actor="tests", tenant=house.tenant, user=user, email=email, role=role).id


def an_invitation(house: House, role: Role) -> Invitation:
    email = f"i{next(NUMBERS)}@aurora.example"
    return members.invite(actor="tests", tenant=house.tenant, email=email, role=role).invitation


# An act: what it makes ready for the role of its object -> (the console's page and form, the API's route and body,
# what is compared before and after). A body of None is a DELETE.
Act = tuple[str, dict[str, Any], str, Any, Callable[[], Any]]


def make_a_key(house: House, role: Role) -> Act:
    form = {"name": "new", "project": house.project.id, "made_id": uuid4(), "role": role}
    route, body = f"projects/{house.project.id}/api_keys", {"name": "new", "role": role}
    return "keys", form, route, body, lambda: ApiKey.objects.filter(role=role).count()


def rotate_a_key(house: House, role: Role) -> Act:
    key_id = a_key(house, role)
    digest = lambda: ApiKey.objects.get(id=key_id).secret_sha256  # noqa: E731
    return f"keys/{key_id}/rotate", {"grace": "0"}, f"api_keys/{key_id}/rotate", {}, digest


def make_a_member(house: House, role: Role) -> Act:
    return _changed(a_member(house, Role.BILLING if role is Role.AUDITOR else Role.AUDITOR), role)


def unmake_a_member(house: House, role: Role) -> Act:
    return _changed(a_member(house, role), Role.BILLING if role is Role.AUDITOR else Role.AUDITOR)


def _changed(member_id: UUID, to: Role) -> Act:
    state = lambda: Membership.objects.get(id=member_id).role  # noqa: E731
    return f"members/{member_id}/role", {"role": to}, f"users/{member_id}", {"role": to}, state


def remove_a_member(house: House, role: Role) -> Act:
    member_id = a_member(house, role)
    is_there = Membership.objects.filter(id=member_id).exists
    return f"members/{member_id}/remove", {}, f"users/{member_id}", None, is_there


def invite(house: House, role: Role) -> Act:
    body = {"email": f"i{next(NUMBERS)}@aurora.example", "role": role}
    return "members", {**body, "made_id": uuid4()}, "invites", body, Invitation.objects.filter(**body).count


def invite_over_another(house: House, role: Role) -> Act:
    offer = an_invitation(house, role)
    body = {"email": offer.email, "role": "auditor"}
    return "members", {**body, "made_id": uuid4()}, "invites", body, _is_open(offer)


def take_back(house: House, role: Role) -> Act:
    offer = an_invitation(house, role)
    return f"invitations/{offer.id}", {}, f"invites/{offer.id}", None, _is_open(offer)


def _is_open(offer: Invitation) -> Callable[[], bool]:
    return lambda: Invitation.objects.get(id=offer.id).ended_at is None


ACTS = {
    make_a_key: Capability.MANAGE_KEYS,
    rotate_a_key: Capability.MANAGE_KEYS,
    make_a_member: Capability.MANAGE_MEMBERS,
    unmake_a_member: Capability.MANAGE_MEMBERS,
    remove_a_member: Capability.MANAGE_MEMBERS,
    invite: Capability.MANAGE_MEMBERS,
    invite_over_another: Capability.MANAGE_MEMBERS,
    take_back: Capability.MANAGE_MEMBERS,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("act", ACTS)
def test_an_act_on_a_role_is_open_to_those_who_may_do_as_much(house: House, act: Any, way: str) -> None:
    for actor, of in itertools.product(Role, Role):
        page, form, route, body, state = act(house, of)
        before = state()
        if way == "console":
            answer = house.people[actor].post(house.at(page), form)
        else:
            answer = call(house.keys[actor].text, "DELETE" if body is None else "POST", route, body)
        done = state() != before
        assert done == (may(actor, ACTS[act]) and covers(actor, of)), (actor, of, answer.content)
        if not done and way == "key":
            assert answer.status_code == 403, (actor, of)
            refused = answer.json()["error"]
            assert (refused["code"], f"{actor}" in refused["message"]) == ("permission_denied", True)
        elif not done:
            is_refused = answer.status_code == 403 or "Select a valid choice" in text_of(answer)
            assert is_refused, (actor, of)
        assert done or "sk_" not in text_of(answer)


@pytest.mark.parametrize("way", WAYS)
def test_a_key_of_any_role_is_revoked_by_all_who_manage_keys(house: House, way: str) -> None:
    """A leak waits for no owner, and who revokes a key has nothing of it."""
    for actor, of in itertools.product(Role, Role):
        key_id = a_key(house, of)
        if way == "console":
            house.people[actor].post(house.at(f"keys/{key_id}/revoke"))
        else:
            call(house.keys[actor].text, "DELETE", f"api_keys/{key_id}")
        revoked = ApiKey.objects.get(id=key_id).revoked_at is not None
        assert revoked == may(actor, Capability.MANAGE_KEYS), (actor, of)


def test_pages_offer_no_act_above_oneself(house: House) -> None:
    for of in Role:
        a_member(house, of), a_key(house, of), an_invitation(house, of)
    for actor in Role:
        page = text_of(house.people[actor].get(house.at("members")))
        for one in Membership.objects.all():
            offered = [f"members/{one.id}/{deed}" in page for deed in ("role", "remove")]
            assert set(offered) == {may(actor, Capability.MANAGE_MEMBERS) and covers(actor, Role(one.role))}
        for offer in Invitation.objects.filter(ended_at=None):
            may_end = may(actor, Capability.MANAGE_MEMBERS) and covers(actor, Role(offer.role))
            assert (f"invitations/{offer.id}" in page) == may_end
        offered_roles = set(re.findall(r'<option value="(\w+)"', page))
        assert offered_roles <= {role.value for role in Role if covers(actor, role)}
        keys = text_of(house.people[actor].get(house.at("keys")))
        for key in ApiKey.objects.all():
            may_rotate = may(actor, Capability.MANAGE_KEYS) and (not key.role or covers(actor, Role(key.role)))
            place = house.at(f"keys/{key.id}/rotate")
            assert (place in keys) == may_rotate
            assert house.people[actor].get(place).status_code == (200 if may_rotate else 403)


def test_who_did_not_say_as_what_they_act_reaches_nothing_inside_a_wall(house: House) -> None:
    lowest = a_key(house, Role.AUDITOR)
    arguments = {"actor": "somebody", "key_id": lowest, "env": "test", "grace": services.LONGEST_GRACE}
    with tenant(house.tenant.id), pytest.raises(rights.AboveOneself, match="Without a role"):
        services.rotate_key(**arguments)
    assert services.rotate_key(**arguments).text  # an operator, outside


def routes(patterns: Any) -> Iterator[str]:
    for one in get_resolver(patterns).url_patterns:
        yield str(one.pattern)


def test_every_route_to_something_with_a_role_is_walked() -> None:
    """A new one comes into this list, and into ``ACTS`` where it changes something."""
    named = re.compile(r".*(key_id|member_id|invitation_id)")
    walked = {
        *("console/<slug:slug>/keys/<uuid:key_id>/rotate", "console/<slug:slug>/keys/<uuid:key_id>/revoke"),
        *("console/<slug:slug>/members/<uuid:member_id>/role", "console/<slug:slug>/members/<uuid:member_id>/remove"),
        *("console/<slug:slug>/invitations/<uuid:invitation_id>", "api_keys/<uuid:key_id>"),
        *("api_keys/<uuid:key_id>/rotate", "users/<uuid:member_id>", "invites/<uuid:invitation_id>"),
    }
    found = {route for where in (console_urls, management_urls) for route in routes(where) if named.match(route)}
    assert found == walked
