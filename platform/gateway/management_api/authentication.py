"""Who calls the management API: a management key, its tenant and its role. Refuses inference keys and sessions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.views import APIView

from gateway.auth import key_of_request
from gateway.errors import Reason, Refusal
from tenants import api_keys
from tenants.api_keys import Match
from tenants.models import ApiKey
from tenants.roles import Capability, Role, may

SCHEME = "Bearer"
_WRONG_KEY = Refusal(
    reason=Reason.INVALID_KEY,
    message="Incorrect API key provided. The management API takes management keys, which the console makes.",
)


@dataclass(frozen=True, slots=True)
class Principal:
    """A management key that opened. Always: every change it makes is on record as ``actor``."""

    tenant_id: UUID
    key_id: UUID
    actor: str
    role: Role
    is_authenticated: bool = True

    def may(self, capability: Capability) -> bool:
        return may(self.role, capability)


class ManagementKey(BaseAuthentication):
    """Always: an unknown key, a wrong secret and an inference key get the same words."""

    def authenticate(self, request: Request) -> tuple[Principal, None]:
        given = request.headers.get("Authorization")
        headers = [] if given is None else [(b"authorization", given.encode("latin-1", "replace"))]
        found = principal_of(headers, request.META.get("QUERY_STRING", "").encode("latin-1", "replace"))
        if isinstance(found, Refusal):
            raise AuthenticationFailed(found.message)
        return found, None

    def authenticate_header(self, request: Request) -> str:
        return SCHEME


def principal_of(headers: Iterable[tuple[bytes, bytes]], query_string: bytes) -> Principal | Refusal:
    """Whose management key these headers bring. Looks into the database."""
    text = key_of_request(headers, query_string)
    if isinstance(text, Refusal):
        return text
    try:
        parsed = api_keys.parse(text)
    except api_keys.MalformedKey:
        return _WRONG_KEY
    key = ApiKey.objects.select_related("tenant").filter(public_id=parsed.public_id).first()
    match = api_keys.match(parsed.secret, *((key.secret_sha256, key.previous_sha256) if key else ("", "")))
    if key is None or match is Match.NONE or not key.role or key.has_ended or not key.tenant.is_active:
        return _WRONG_KEY
    if match is Match.PREVIOUS and key.previous_good_until is None:
        return _WRONG_KEY
    return Principal(key.tenant_id, key.id, key.actor, Role(key.role))


class NeedsCapability(BasePermission):
    """A view names what each of its methods needs in ``needs``; a method that is not named there is refused."""

    def has_permission(self, request: Request, view: APIView) -> bool:
        method = "GET" if request.method == "HEAD" else request.method
        capability = getattr(view, "needs", {}).get(method)
        if capability is None:  # a method that the view does not have is answered 405, and OPTIONS shows nothing
            return method not in view.allowed_methods or method == "OPTIONS"
        principal: Any = request.user  # what ManagementKey answers; DRF's types know Django's users only
        if not principal.may(capability):
            raise PermissionDenied(f"The role {principal.role.value} of this key may not {capability.value}.")
        return True
