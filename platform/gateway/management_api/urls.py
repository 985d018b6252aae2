"""Routes under ``/v1/organization`` (asgi.py sends them to Django), and the schema they are described by."""

from django.urls import path, re_path
from drf_spectacular.views import SpectacularJSONAPIView

from gateway.management_api import accounts, errors, usage

urlpatterns = [
    path("projects", accounts.Projects.as_view()),
    path("projects/<uuid:project_id>", accounts.OneProject.as_view()),
    path("projects/<uuid:project_id>/api_keys", accounts.Keys.as_view()),
    path("api_keys/<uuid:key_id>", accounts.OneKey.as_view()),
    path("api_keys/<uuid:key_id>/rotate", accounts.RotateKey.as_view()),
    path("users", accounts.Members.as_view()),
    path("users/<uuid:member_id>", accounts.OneMember.as_view()),
    path("invites", accounts.Invitations.as_view()),
    path("invites/<uuid:invitation_id>", accounts.OneInvitation.as_view()),
    path("audit_logs", accounts.AuditLog.as_view()),
    path("usage/completions", usage.CompletionsUsage.as_view()),
    path("usage/export", usage.Export.as_view()),
    path("costs", usage.Costs.as_view()),
    path("statements", usage.Statements.as_view()),
    path("statements/<uuid:statement_id>", usage.OneStatement.as_view()),
    path("schema", SpectacularJSONAPIView.as_view(authentication_classes=[], permission_classes=[]), name="schema"),
    re_path(r"^(?P<path>(?s:.*))\Z", errors.not_found),  # line ends too
]
