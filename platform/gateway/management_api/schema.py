"""How the management API describes itself: names of operations, the key that opens it, and the shape of its refusals.

Refuses to know what single routes answer beyond their being JSON objects.
"""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.types import OpenApiTypes
from rest_framework import serializers

_VERBS = {"GET": "get", "POST": "post", "DELETE": "delete"}


class Error(serializers.Serializer[Any]):
    message = serializers.CharField()
    type = serializers.CharField()
    param = serializers.CharField(allow_null=True)
    code = serializers.CharField(allow_null=True)


class Refusal(serializers.Serializer[Any]):
    """The same as everywhere on ``/v1``."""

    error = Error()


class ManagementKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # it registers itself
    target_class = "gateway.management_api.authentication.ManagementKey"
    name = "managementKey"

    def get_security_definition(self, auto_schema: AutoSchema) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "A key with a role, made in the console."}


class ManagementSchema(AutoSchema):
    """Always: no two operations share a name; a body is described where the view says which it takes."""

    def get_operation_id(self) -> str:
        return f"{_VERBS[self.method]}_{type(self.view).__name__}"

    def get_request_serializer(self) -> Any:
        return None

    def get_response_serializers(self) -> Any:
        return {"2XX": OpenApiTypes.OBJECT, "4XX": Refusal}
