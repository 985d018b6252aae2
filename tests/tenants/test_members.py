"""Members: invited by a link that works once, with roles that say what they may do, and always an owner."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.utils import timezone

from tenants import members, services
from tenants.isolation import tenant
from tenants.models import Invitation, Membership
from tenants.rights import acting_as
from tenants.roles import CAPABILITIES, Capability, Role, may


def person(name: str) -> User:
    return User.objects.create_user(name, f"{name}@aurora.example", "x")


def member(aurora: Any, name: str, role: Role) -> Membership:
    user = person(name)
    return members.add_member(actor="tests", tenant=aurora.tenant, user=user, email=user.email, role=role)


def test_an_invitation_makes_its_reader_a_member_once(aurora: Any) -> None:
    invited = members.invite(actor="ann", tenant=aurora.tenant, email="Bob@Aurora.example ", role=Role.DEVELOPER)
    bob, eve = person("bob"), person("eve")
    assert members.accept(token=invited.token, user=bob).email == "bob@aurora.example"
    assert members.role_in(bob, aurora.tenant.id) is Role.DEVELOPER
    with pytest.raises(ValidationError, match="has ended"):
        members.accept(token=invited.token, user=eve)
    assert members.role_in(eve, aurora.tenant.id) is None


def test_the_secret_of_a_link_is_stored_nowhere(aurora: Any) -> None:
    invited = members.invite(actor="ann", tenant=aurora.tenant, email="bob@aurora.example", role=Role.ADMIN)
    assert invited.token not in str(Invitation.objects.values())


@pytest.mark.parametrize("ending", ["expired", "taken back", "invited again"])
def test_an_invitation_that_ended_opens_nothing(aurora: Any, ending: str) -> None:
    offer = {"actor": "ann", "tenant": aurora.tenant, "email": "bob@aurora.example", "role": Role.ADMIN}
    invited = members.invite(**offer)
    if ending == "expired":
        Invitation.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
    elif ending == "taken back":
        assert members.take_back(actor="ann", invitation_id=invited.invitation.id)
    else:
        members.invite(**offer)
    with pytest.raises(ValidationError, match="has ended"):
        members.accept(token=invited.token, user=person("bob"))


@pytest.mark.parametrize("became", [None, Role.DEVELOPER, Role.BILLING, Role.OWNER])
def test_an_invitation_lives_no_longer_than_what_its_maker_may(aurora: Any, became: Role | None) -> None:
    maker = member(aurora, "max", Role.ADMIN)
    member(aurora, "ann", Role.OWNER)
    offers = {
        role: members.invite(actor="max", tenant=aurora.tenant, email=f"{role}@aurora.example", role=role)
        for role in (Role.ADMIN, Role.DEVELOPER)
    }
    others = members.invite(actor="ann", tenant=aurora.tenant, email="bob@aurora.example", role=Role.ADMIN)
    if became is None:
        members.remove(actor="ann", tenant_id=aurora.tenant.id, member_id=maker.id)
    else:
        members.change_role(actor="ann", tenant_id=aurora.tenant.id, member_id=maker.id, role=became)
    still_open = [role for role, offer in offers.items() if members.find_invitation(offer.token)]
    assert still_open == ([*offers] if became is Role.OWNER else [])
    assert members.find_invitation(others.token)


def test_an_invitation_that_a_key_made_ends_with_the_key(aurora: Any) -> None:
    keys = [
        services.issue_key(actor="ann", project=aurora.project, name="ci", env="test", role=Role.ADMIN) for _ in "ab"
    ]
    first, second = (
        members.invite(actor=made.key.actor, tenant=aurora.tenant, email=f"{n}@aurora.example", role=Role.ADMIN)
        for n, made in enumerate(keys)
    )
    services.revoke_key(actor="ann", key_id=keys[0].key.id)
    assert not members.find_invitation(first.token)
    assert members.find_invitation(second.token)


@pytest.mark.parametrize("email", ["", "bob", "bob@", "x" * 300 + "@aurora.example"])
def test_an_address_that_is_none_is_refused_by_name(aurora: Any, email: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        members.invite(actor="ann", tenant=aurora.tenant, email=email, role=Role.ADMIN)
    assert list(refusal.value.message_dict) == ["email"]


def test_a_member_is_not_invited_again(aurora: Any) -> None:
    member(aurora, "bob", Role.ADMIN)
    with pytest.raises(ValidationError, match="is a member already"):
        members.invite(actor="ann", tenant=aurora.tenant, email="BOB@aurora.example", role=Role.OWNER)


def test_the_last_owner_can_neither_leave_nor_be_made_less(aurora: Any) -> None:
    ann = member(aurora, "ann", Role.OWNER)
    for attempt in (
        lambda: members.change_role(actor="ann", tenant_id=ann.tenant_id, member_id=ann.id, role=Role.ADMIN),
        lambda: members.remove(actor="ann", tenant_id=ann.tenant_id, member_id=ann.id),
    ):
        with pytest.raises(ValidationError, match="at least one owner"):
            attempt()
    member(aurora, "bob", Role.OWNER)
    members.remove(actor="bob", tenant_id=ann.tenant_id, member_id=ann.id)
    assert [one.email for one in Membership.objects.all()] == ["bob@aurora.example"]


def test_a_member_of_another_tenant_cannot_be_named(aurora: Any, stranger: Any) -> None:
    ann = member(aurora, "ann", Role.OWNER)
    with pytest.raises(Membership.DoesNotExist):
        members.remove(actor="eve", tenant_id=stranger.tenant.id, member_id=ann.id)


def test_behind_the_wall_members_are_changed_with_the_tenants_own_role(transactional_db: None) -> None:
    aurora, stranger = (
        SimpleNamespace(tenant=services.create_tenant(actor="tests", slug=slug, name=slug))
        for slug in ("aurora", "stranger")
    )
    ann = member(aurora, "ann", Role.OWNER)
    bob = member(aurora, "bob", Role.DEVELOPER)
    with tenant(stranger.tenant.id), acting_as(Role.OWNER), pytest.raises(Membership.DoesNotExist):
        members.change_role(actor="eve", tenant_id=aurora.tenant.id, member_id=bob.id, role=Role.OWNER)
    with tenant(aurora.tenant.id), acting_as(Role.OWNER):
        members.change_role(actor="ann", tenant_id=aurora.tenant.id, member_id=bob.id, role=Role.ADMIN)
        members.remove(actor="bob", tenant_id=aurora.tenant.id, member_id=bob.id)
    assert [one.id for one in Membership.objects.all()] == [ann.id]


def test_an_owner_may_everything_and_nobody_nothing() -> None:
    assert all(may(Role.OWNER, capability) for capability in Capability)
    assert not any(may(None, capability) for capability in Capability)


def test_who_pays_sees_money_and_who_develops_makes_keys() -> None:
    seers = {role for role in Role if may(role, Capability.SEE_MONEY)}
    makers = {role for role in Role if may(role, Capability.MANAGE_KEYS)}
    assert seers == {Role.OWNER, Role.ADMIN, Role.BILLING, Role.AUDITOR}
    assert makers == {Role.OWNER, Role.ADMIN, Role.DEVELOPER}


def test_every_role_has_its_capabilities_written_down() -> None:
    assert set(CAPABILITIES) == set(Role)
