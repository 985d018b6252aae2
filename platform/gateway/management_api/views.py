"""The base of every management view: behind the tenant's wall, signed, with the request id on the trail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from uuid import UUID

from django.core.exceptions import ObjectDoesNotExist
from django.db.models import Q, QuerySet
from rest_framework import exceptions
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from gateway.management_api.authentication import ManagementKey, NeedsCapability, Principal
from gateway.management_api.parsing import PlainJSON
from gateway.management_api.schema import asks_of
from gateway.management_api.shapes import Shape
from tenants import audit, rights
from tenants.isolation import tenant
from tenants.roles import Capability

MOST = 100
LISTS = frozenset({"group_by", "project_ids", "api_key_ids", "models", "service_tiers"})  # may come several times
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_REASON = "X-Audit-Reason"
_ONCE = "Idempotency-Key"


class View(APIView):
    """Always: a handler runs inside its tenant's wall and one transaction; foreign ids do not exist there."""

    authentication_classes = (ManagementKey,)
    permission_classes = (NeedsCapability,)
    parser_classes = (PlainJSON,)
    renderer_classes = (JSONRenderer,)
    needs: ClassVar[dict[str, Capability]] = {}
    elsewhere: ClassVar[dict[str, str]] = {}  # a parameter of the query that is looked for here -> where it is taken
    sent_again: ClassVar[str] = "Sent again, this call changes nothing more."  # what a retry of a writing call meets

    def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.request_id = request.request_id
        return super().dispatch(request, *args, **kwargs)

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super().initial(request, *args, **kwargs)
        name = (request.method or "").lower()
        handler = getattr(self, name, None)
        if handler is not None:
            self._refuse_unknown(request, asks_of(handler))
            self._refuse_idempotency_key(request)
            setattr(self, name, self._walled(handler))

    def _refuse_unknown(self, request: Request, known: Sequence[str]) -> None:
        """Raises ValidationError: nothing that is asked for is left out in silence."""
        for name, values in request.query_params.lists():
            is_list = name.removesuffix("[]") in LISTS
            if (name.removesuffix("[]") if is_list else name) not in known:
                taken = f"This route takes {', '.join(known) or 'none'}."
                raise exceptions.ValidationError({name[:64]: [self.elsewhere.get(name, taken)]}, code="unknown")
            if len(values) > 1 and not is_list:
                raise exceptions.ValidationError({name: ["It is given more than once."]})

    def _refuse_idempotency_key(self, request: Request) -> None:
        """Raises ValidationError: whoever names a call to have it done once would believe that it is."""
        if request.method not in SAFE and _ONCE in request.headers:
            words = f"The management API takes no such header. {self.sent_again}"
            raise exceptions.ValidationError({_ONCE: [words]}, code="unsupported")

    def _walled(self, handler: Callable[..., Response]) -> Callable[..., Response]:
        def inside(request: Request, *args: Any, **kwargs: Any) -> Response:
            reason = request.headers.get(_REASON, "")
            me = self.principal
            with tenant(me.tenant_id), rights.acting_as(me.role), audit.request(self.request_id, reason):
                return handler(request, *args, **kwargs)

        return inside

    @property
    def principal(self) -> Principal:
        user: Any = self.request.user
        assert isinstance(user, Principal)
        return user


def page(request: Request, rows: QuerySet[Any], shape: type[Shape], moment: str = "created_at") -> Response:
    """A page in OpenAI's list shape, newest first. ``limit`` is 1 to 100 (20), ``after`` the last id seen."""
    limit, after = limit_of(request), request.query_params.get("after")
    if after:
        last = _row(rows, after)
        older = {f"{moment}__lt": getattr(last, moment)}
        as_old = {moment: getattr(last, moment), "pk__lt": last.pk}
        rows = rows.filter(Q(**older) | Q(**as_old))
    found = list(rows.order_by(f"-{moment}", "-pk")[: limit + 1])
    return Response(listed(shape, found, limit))


def listed(shape: type[Shape], found: Sequence[Any], limit: int) -> dict[str, Any]:
    """OpenAI's list shape over rows of which one too many was read, where there are more."""
    shown: Any = shape(found[:limit], many=True).data
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(found) > limit,
    }


def _row(rows: QuerySet[Any], after: str) -> Any:
    try:
        return rows.get(pk=UUID(after))
    except (ValueError, ObjectDoesNotExist) as error:
        raise exceptions.ValidationError({"after": ["is no id of this list"]}) from error


def limit_of(request: Request, default: int = 20, most: int = MOST) -> int:
    text = request.query_params.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise exceptions.ValidationError({"limit": [f"must be a whole number from 1 to {most}"]})
    return int(text)
