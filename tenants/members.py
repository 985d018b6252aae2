"""Who belongs to a tenant, and as what: invitations, roles, leaving. Refuses to send mail: the link is handed over."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid4

from django.contrib.auth import get_user_model
from django.contrib.auth.base_user import AbstractBaseUser
from django.core.exceptions import ValidationError
from django.utils import timezone

from tenants import rights
from tenants.audit import change_by
from tenants.checks import checked_by_the_database
from tenants.isolation import alias
from tenants.models import Invitation, Membership, Tenant
from tenants.roles import Capability, Role, covers, may

INVITATION_LASTS = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Invited:
    """An invitation and the secret of its link, which is shown once."""

    invitation: Invitation
    token: str


def role_in(user: AbstractBaseUser, tenant_id: UUID) -> Role | None:
    """None for somebody who is no member."""
    found = Membership.objects.filter(user_id=user.pk, tenant_id=tenant_id).values_list("role", flat=True).first()
    return None if found is None else Role(found)


def add_member(*, actor: str, tenant: Tenant, user: AbstractBaseUser, email: str, role: Role) -> Membership:
    """Raises ValidationError for somebody who is a member already, and AboveOneself."""
    rights.require(role, f"make anybody {role}")
    member = Membership(tenant=tenant, user_id=user.pk, email=email, role=role.value)
    with change_by(actor):
        if Membership.objects.filter(tenant=tenant, user_id=user.pk).exists():
            raise ValidationError({"email": f"{email} is a member already"})
        member.full_clean(exclude=["user"], validate_unique=False, validate_constraints=False)
        with checked_by_the_database(Membership, alias()):
            member.save(force_insert=True)
    return member


def invite(*, actor: str, tenant: Tenant, email: str, role: Role, invitation_id: UUID | None = None) -> Invited:
    """An offer for seven days. An open one to the same address is taken back. Raises ValidationError, also where there
    is one of this ``invitation_id``; and AboveOneself, also for what would be taken back. Nothing is taken back then.
    """
    rights.require(role, f"invite anybody as {role}")
    token = secrets.token_urlsafe(32)
    invitation = Invitation(
        id=invitation_id or uuid4(),
        tenant=tenant,
        email=email.strip().lower(),
        role=role.value,
        token_sha256=_digest(token),
        invited_by=actor,
        expires_at=timezone.now() + INVITATION_LASTS,
    )
    invitation.full_clean(exclude=["tenant"], validate_unique=False, validate_constraints=False)
    with change_by(actor):
        if Membership.objects.filter(tenant=tenant, email__iexact=invitation.email).exists():
            raise ValidationError({"email": f"{invitation.email} is a member already"})
        before = Invitation.objects.select_for_update()
        for open_one in before.filter(tenant=tenant, email=invitation.email, ended_at=None):
            _end(open_one)
        with checked_by_the_database(Invitation, alias()):
            invitation.save(force_insert=True)
    return Invited(invitation, token)


def take_back(*, actor: str, invitation_id: UUID) -> bool:
    """False when it had been taken back before. Raises ValidationError where somebody has joined by it, AboveOneself,
    and Invitation.DoesNotExist.
    """
    with change_by(actor):
        offer = Invitation.objects.select_for_update().get(id=invitation_id)
        if offer.ended_at is None:
            _end(offer)
            return True
        if Membership.objects.filter(tenant_id=offer.tenant_id, email=offer.email).exists():
            raise ValidationError(f"{offer.email} has joined already: remove the member instead")
        return False


def find_invitation(token: str) -> Invitation | None:
    """The open invitation behind a link. Not behind a tenant's wall: whoever holds the link is no member yet."""
    found = Invitation.objects.filter(token_sha256=_digest(token), ended_at=None, expires_at__gt=timezone.now())
    return found.select_related("tenant").first()


def accept(*, token: str, user: AbstractBaseUser) -> Membership:
    """Once: a link that two people follow at once makes one member. Raises ValidationError."""
    actor = user.get_username()
    with change_by(actor):
        invitation = find_invitation(token)
        if invitation is None:
            raise ValidationError("this invitation has ended; ask for a new one")
        taken = Invitation.objects.filter(id=invitation.id, ended_at=None).update(ended_at=timezone.now())
        if not taken:
            raise ValidationError("this invitation has ended; ask for a new one")
        role = Role(invitation.role)
        return add_member(actor=actor, tenant=invitation.tenant, user=user, email=invitation.email, role=role)


def change_role(*, actor: str, tenant_id: UUID, member_id: UUID, role: Role, seen: Role | None = None) -> Membership:
    """Open invitations that the member made and may make no more end with it. Raises ValidationError where the tenant
    would have no owner left, or the member's role is no longer the one that was ``seen``; AboveOneself; and
    Membership.DoesNotExist for no member of it.
    """
    with change_by(actor):
        members = _locked(tenant_id)
        member = _one(members, member_id)
        rights.require(Role(member.role), f"change the role of the {member.role} {member.email}")
        rights.require(role, f"make anybody {role}")
        if member.role not in (seen or member.role, role):
            raise ValidationError(f"{member.email} is {member.role}: somebody changed it since this page was opened")
        _keep_an_owner(members, member, role)
        member.role = role.value
        member.save(update_fields=["role"])
        _end_offers_of(member, role)
    return member


def remove(*, actor: str, tenant_id: UUID, member_id: UUID) -> Membership:
    """Who it was; open invitations that they made end with it. Raises ValidationError for the last owner, AboveOneself,
    and Membership.DoesNotExist for no member of the tenant.
    """
    with change_by(actor):
        members = _locked(tenant_id)
        member = _one(members, member_id)
        rights.require(Role(member.role), f"remove the {member.role} {member.email}")
        _keep_an_owner(members, member, None)
        member.delete()
        _end_offers_of(member, None)
    return member


def end_offers(*, tenant_id: UUID, maker: str, role: Role | None = None) -> None:
    """Open invitations live no longer than what their maker may, who has ``role`` now: whoever has left, or may do
    less, hands nobody the way in. Call in a transaction.
    """
    may_invite = may(role, Capability.MANAGE_MEMBERS)
    above = [other.value for other in Role if role is None or not (may_invite and covers(role, other))]
    offers = Invitation.objects.filter(tenant_id=tenant_id, invited_by=maker, ended_at=None, role__in=above)
    offers.update(ended_at=timezone.now())


def _end_offers_of(member: Membership, role: Role | None) -> None:
    name = get_user_model().objects.values_list("username", flat=True).get(pk=member.user_id)
    end_offers(tenant_id=member.tenant_id, maker=name, role=role)


def _end(offer: Invitation) -> None:
    rights.require(Role(offer.role), f"take back the invitation of {offer.email} as {offer.role}")
    offer.ended_at = timezone.now()
    offer.save(update_fields=["ended_at"])


def _locked(tenant_id: UUID) -> list[Membership]:
    """All members, held until the end of the transaction: two owners cannot unmake each other at once."""
    return list(Membership.objects.select_for_update().filter(tenant_id=tenant_id).order_by("id"))


def _one(members: list[Membership], member_id: UUID) -> Membership:
    for member in members:
        if member.id == member_id:
            return member
    raise Membership.DoesNotExist


def _keep_an_owner(members: list[Membership], member: Membership, role: Role | None) -> None:
    others = [other for other in members if other.role == Role.OWNER and other.id != member.id]
    if member.role == Role.OWNER and role is not Role.OWNER and not others:
        raise ValidationError("a tenant keeps at least one owner: make somebody else an owner first")


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()
