"""How the management API describes itself: names of operations, what each takes and answers, the key that opens it,
and the shape of its refusals. The shapes themselves are in shapes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers

from gateway.management_api.shapes import Shape

_VERBS = {"GET": "get", "POST": "post", "DELETE": "delete"}
_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class Error(Shape):
    message = serializers.CharField()
    type = serializers.CharField()
    param = serializers.CharField(allow_null=True)
    code = serializers.CharField(allow_null=True)


class Refusal(Shape):
    """The same as everywhere on ``/v1``."""

    error = Error()


def query(name: str, kind: Any, words: str, **given: Any) -> OpenApiParameter:
    return OpenApiParameter(name, kind, OpenApiParameter.QUERY, description=words, **given)


LIMIT = query("limit", {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}, "how many at most")
PAGED = [LIMIT, query("after", {"type": "string", "format": "uuid"}, "the last id seen")]


def answers(
    shape: Any, *, status: int = 200, body: Any = None, asks: Sequence[OpenApiParameter] = ()
) -> Callable[[_Handler], _Handler]:
    """Describes a handler: the shape of its answer, of its body, and its query parameters."""
    return answers_any({status: shape}, body=body, asks=asks)


def answers_any(
    responses: Mapping[Any, Any], *, body: Any = None, asks: Sequence[OpenApiParameter] = ()
) -> Callable[[_Handler], _Handler]:
    """The same for one with several answers, by status or by status and media type."""

    def described(handler: _Handler) -> _Handler:
        vars(handler)["asks"] = tuple(one.name for one in asks)
        return extend_schema(request=body, responses={**responses, "4XX": Refusal}, parameters=list(asks))(handler)

    return described


def asks_of(handler: Callable[..., Any]) -> tuple[str, ...]:
    """Names of the query parameters that a handler was described with."""
    return getattr(handler, "asks", ())


class ManagementKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # it registers itself
    target_class = "gateway.management_api.authentication.ManagementKey"
    name = "managementKey"

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "A key with a role, made in the console."}


class ManagementSchema(AutoSchema):
    """Always: no two operations share a name, and each says in a view's own words what it is for."""

    def get_operation_id(self) -> str:
        return f"{_VERBS[self.method]}_{type(self.view).__name__}"

    def get_description(self) -> str:  # type: ignore[override]  # as the library's own AutoSchema has it
        handler = getattr(self.view, self.method.lower(), None)
        return (getattr(handler, "__doc__", None) or vars(type(self.view)).get("__doc__") or "").strip()
