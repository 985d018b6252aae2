"""Projects, keys, members, invitations and the audit trail of one tenant, as routes."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.shortcuts import get_object_or_404
from rest_framework import exceptions, serializers
from rest_framework.request import Request
from rest_framework.response import Response

from gateway.management_api.schema import LIMIT, PAGED, answers, query
from gateway.management_api.shapes import (
    KEY,
    LABELS,
    ROLES,
    DeletedKeyShape,
    EventShape,
    InvitationShape,
    KeyShape,
    MemberShape,
    NewInvitationShape,
    NewKeyShape,
    ProjectShape,
    RotatedKeyShape,
    deleted,
    listing,
)
from gateway.management_api.views import View, limit_of, listed, page
from scheduler_engine.policy import PriorityClass
from tenants import isolation, members, services
from tenants.models import ApiKey, AuditEvent, Invitation, Membership, Project, Tenant
from tenants.news import News
from tenants.roles import Capability, Role

SEE, KEYS, PROJECTS = Capability.SEE_USAGE, Capability.MANAGE_KEYS, Capability.MANAGE_PROJECTS
PEOPLE, SEE_PEOPLE = Capability.MANAGE_MEMBERS, Capability.SEE_MEMBERS
AFTER_EVENT = query("after", {"type": "string", "pattern": "^[0-9]+$"}, "the last id seen")


class Strict(serializers.Serializer[Any]):
    """Always: a field that is not known is refused by name."""

    def to_internal_value(self, data: Any) -> Any:
        if isinstance(data, dict) and (unknown := [name for name in data if name not in self.fields]):
            raise exceptions.ValidationError({str(unknown[0])[:64]: ["This body does not take it."]}, code="unknown")
        return super().to_internal_value(data)


class ProjectIn(Strict):
    name = serializers.CharField(max_length=120)
    default_class = serializers.ChoiceField(choices=LABELS, default="default")


class KeyIn(Strict):
    name = serializers.CharField(max_length=120)
    expires_at = serializers.DateTimeField(required=False, allow_null=True, default=None)
    role = serializers.ChoiceField(choices=ROLES, required=False, default="", help_text="makes it a management key")


class RotateIn(Strict):
    grace_seconds = serializers.IntegerField(min_value=0, max_value=30 * 86_400, default=86_400)
    end_previous_secret = serializers.BooleanField(
        default=False,
        help_text="while the secret before the last rotation still opens (previous_secret_until): it ends now. Without"
        " this such a key is not rotated, and the answer is 409",
    )


class InvitationIn(Strict):
    email = serializers.EmailField()
    role = serializers.ChoiceField(choices=ROLES)


class RoleIn(Strict):
    role = serializers.ChoiceField(choices=ROLES)


def read(kind: type[Strict], request: Request) -> dict[str, Any]:
    found = kind(data=request.data)
    found.is_valid(raise_exception=True)
    values: dict[str, Any] = found.validated_data
    return values


class Projects(View):
    needs = {"GET": SEE, "POST": PROJECTS}
    sent_again = "A second project of one name is refused."

    @answers(listing(ProjectShape), asks=PAGED)
    def get(self, request: Request) -> Response:
        return page(request, Project.objects.all(), ProjectShape)

    @answers(ProjectShape, status=201, body=ProjectIn)
    def post(self, request: Request) -> Response:
        asked = read(ProjectIn, request)
        made = services.create_project(
            actor=self.principal.actor,
            tenant=Tenant.objects.get(),
            name=asked["name"],
            default_class=PriorityClass.from_label(asked["default_class"]),
        )
        return Response(ProjectShape(made).data, status=201)


class OneProject(View):
    needs = {"GET": SEE, "POST": PROJECTS}

    @answers(ProjectShape)
    def get(self, request: Request, project_id: UUID) -> Response:
        return Response(ProjectShape(get_object_or_404(Project, id=project_id)).data)

    @answers(ProjectShape, body=ProjectIn)
    def post(self, request: Request, project_id: UUID) -> Response:
        asked = read(ProjectIn, request)
        label = PriorityClass.from_label(asked["default_class"])
        changed = services.update_project(
            actor=self.principal.actor, project_id=project_id, name=asked["name"], default_class=label
        )
        return Response(ProjectShape(changed).data)


class Keys(View):
    needs = {"GET": SEE, "POST": KEYS}
    sent_again = "Each call makes a key: look through the project's keys before you send it again."

    @answers(listing(KeyShape), asks=PAGED)
    def get(self, request: Request, project_id: UUID) -> Response:
        project = get_object_or_404(Project, id=project_id)
        return page(request, ApiKey.objects.filter(project=project), KeyShape)

    @answers(NewKeyShape, status=201, body=KeyIn)
    def post(self, request: Request, project_id: UUID) -> Response:
        asked = read(KeyIn, request)
        role = Role(asked["role"]) if asked["role"] else None
        issued = services.issue_key(
            actor=self.principal.actor,
            project=get_object_or_404(Project, id=project_id),
            name=asked["name"],
            env=settings.RUBATO_KEY_ENVIRONMENT,
            expires_at=asked["expires_at"],
            role=role,
        )
        return Response({**KeyShape(issued.key).data, "value": issued.text}, status=201)


class OneKey(View):
    needs = {"GET": SEE, "DELETE": KEYS}

    @answers(KeyShape)
    def get(self, request: Request, key_id: UUID) -> Response:
        return Response(KeyShape(get_object_or_404(ApiKey, id=key_id)).data)

    @answers(DeletedKeyShape)
    def delete(self, request: Request, key_id: UUID) -> Response:
        key = get_object_or_404(ApiKey, id=key_id)
        news = services.revoke_key(actor=self.principal.actor, key_id=key.id)
        return _with_news({"id": str(key.id), "object": f"{KEY}.deleted", "deleted": True}, news)


class RotateKey(View):
    needs = {"POST": KEYS}
    sent_again = (
        "While the former secret still opens a second rotation is refused; with grace_seconds 0 or"
        " end_previous_secret, look at the key's rotated_at before you send it again."
    )

    @answers(RotatedKeyShape, body=RotateIn)
    def post(self, request: Request, key_id: UUID) -> Response:
        asked = read(RotateIn, request)
        issued = services.rotate_key(
            actor=self.principal.actor,
            key_id=get_object_or_404(ApiKey, id=key_id).id,
            env=settings.RUBATO_KEY_ENVIRONMENT,
            grace=timedelta(seconds=asked["grace_seconds"]),
            end_previous=asked["end_previous_secret"],
        )
        return _with_news({**KeyShape(issued.key).data, "value": issued.text}, issued.news)


def _with_news(body: dict[str, Any], news: News | None) -> Response:
    """Whether gateways were told is known at the end of the transaction, and written into the answer there."""
    answer = Response({**body, "gateways_told": None})
    if news is not None:
        transaction.on_commit(lambda: answer.data.update(gateways_told=news.is_told), using=isolation.ALIAS)
    return answer


class Members(View):
    needs = {"GET": SEE_PEOPLE}

    @answers(listing(MemberShape), asks=PAGED)
    def get(self, request: Request) -> Response:
        return page(request, Membership.objects.all(), MemberShape)


class OneMember(View):
    needs = {"GET": SEE_PEOPLE, "POST": PEOPLE, "DELETE": PEOPLE}

    @answers(MemberShape)
    def get(self, request: Request, member_id: UUID) -> Response:
        return Response(MemberShape(get_object_or_404(Membership, id=member_id)).data)

    @answers(MemberShape, body=RoleIn)
    def post(self, request: Request, member_id: UUID) -> Response:
        role = Role(read(RoleIn, request)["role"])
        changed = members.change_role(
            actor=self.principal.actor, tenant_id=self.principal.tenant_id, member_id=member_id, role=role
        )
        return Response(MemberShape(changed).data)

    @answers(deleted("organization.user"))
    def delete(self, request: Request, member_id: UUID) -> Response:
        members.remove(actor=self.principal.actor, tenant_id=self.principal.tenant_id, member_id=member_id)
        return Response({"id": str(member_id), "object": "organization.user.deleted", "deleted": True})


class Invitations(View):
    needs = {"GET": SEE_PEOPLE, "POST": PEOPLE}
    sent_again = "A new invitation takes back the open one to the same address."

    @answers(listing(InvitationShape), asks=PAGED)
    def get(self, request: Request) -> Response:
        return page(request, Invitation.objects.filter(ended_at=None), InvitationShape)

    @answers(NewInvitationShape, status=201, body=InvitationIn)
    def post(self, request: Request) -> Response:
        asked = read(InvitationIn, request)
        role = Role(asked["role"])
        made = members.invite(actor=self.principal.actor, tenant=Tenant.objects.get(), email=asked["email"], role=role)
        return Response({**InvitationShape(made.invitation).data, "token": made.token}, status=201)


class OneInvitation(View):
    needs = {"DELETE": PEOPLE}

    @answers(deleted("organization.invite"))
    def delete(self, request: Request, invitation_id: UUID) -> Response:
        found = get_object_or_404(Invitation, id=invitation_id)
        members.take_back(actor=self.principal.actor, invitation_id=found.id)
        return Response({"id": str(found.id), "object": "organization.invite.deleted", "deleted": True})


class AuditLog(View):
    """Newest first; ``after`` is the id of the last event seen."""

    needs = {"GET": Capability.SEE_AUDIT}

    @answers(listing(EventShape), asks=[LIMIT, AFTER_EVENT])
    def get(self, request: Request) -> Response:
        events = AuditEvent.objects.order_by("-id")
        after = request.query_params.get("after", "")
        if after:
            if not (after.isascii() and after.isdigit()):
                raise exceptions.ValidationError({"after": ["must be the id of an event"]})
            events = events.filter(id__lt=min(int(after), 2**63 - 1))
        limit = limit_of(request)
        return Response(listed(EventShape, list(events[: limit + 1]), limit))
