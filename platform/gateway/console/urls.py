"""Where the pages for people are."""

from django.templatetags.static import static
from django.urls import path, re_path
from django.views.generic import RedirectView

from gateway.console import live_views, views
from gateway.console.pages import (
    alerts,
    batches,
    entrance,
    keys,
    live,
    money,
    people,
    playground,
    start,
    trail,
    webhooks,
)

urlpatterns = [
    path("", views.front, name="front"),
    path("operator/live", live_views.live, name="live"),
    path("operator/live/<slug:table>.csv", live_views.as_csv, name="live-csv"),
    path("operator/live/explain", live_views.explain, name="live-explain"),
    path("operator/live/drain", live_views.drain, name="live-drain"),
    path("console/", entrance.home, name="console-home"),
    path("invitation/<str:token>", entrance.invitation, name="console-invitation"),
    path("console/<slug:slug>/", start.start, name="console"),
    path("console/<slug:slug>/playground", playground.playground, name="console-playground"),
    path("console/<slug:slug>/ticket", playground.ticket, name="console-ticket"),
    path("console/<slug:slug>/live", live.live, name="console-live"),
    path("console/<slug:slug>/live/<uuid:response_id>/cancel", live.cancel, name="console-live-cancel"),
    path("console/<slug:slug>/batches", batches.batches, name="console-batches"),
    path("console/<slug:slug>/batches/<uuid:batch_id>", batches.batch, name="console-batch"),
    path("console/<slug:slug>/batches/<uuid:batch_id>/cancel", batches.cancel, name="console-batch-cancel"),
    path("console/<slug:slug>/files/<uuid:file_id>", batches.file, name="console-file"),
    path("console/<slug:slug>/alerts", alerts.alerts, name="console-alerts"),
    path("console/<slug:slug>/alerts/<uuid:threshold_id>/remove", alerts.remove, name="console-alert-remove"),
    path("console/<slug:slug>/webhooks", webhooks.webhooks, name="console-webhooks"),
    re_path(
        r"^console/(?P<slug>[-a-z0-9]+)/webhooks/(?P<endpoint_id>[-0-9a-f]{36})/(?P<deed>rotate|off|on|remove)$",
        webhooks.change,
        name="console-webhook",
    ),
    path("console/<slug:slug>/deliveries/<uuid:delivery_id>/replay", webhooks.replay, name="console-replay"),
    path("console/<slug:slug>/keys", keys.keys, name="console-keys"),
    path("console/<slug:slug>/keys/<uuid:key_id>/rotate", keys.rotate, name="console-rotate"),
    path("console/<slug:slug>/keys/<uuid:key_id>/revoke", keys.revoke, name="console-revoke"),
    path("console/<slug:slug>/projects", keys.projects, name="console-projects"),
    path("console/<slug:slug>/usage", money.usage, name="console-usage"),
    path("console/<slug:slug>/statements", money.statement_list, name="console-statements"),
    path("console/<slug:slug>/statements/open", money.open_statement, name="console-statement-open"),
    path("console/<slug:slug>/statements/<uuid:statement_id>", money.statement, name="console-statement-page"),
    re_path(
        r"^console/(?P<slug>[-a-z0-9]+)/statements/(?P<statement_id>[-0-9a-f]{36})\.(?P<kind>csv|pdf)$",
        money.statement_file,
        name="console-statement",
    ),
    path("console/<slug:slug>/members", people.people, name="console-people"),
    path("console/<slug:slug>/members/<uuid:member_id>/role", people.change_role, name="console-role"),
    path("console/<slug:slug>/members/<uuid:member_id>/remove", people.remove, name="console-remove"),
    path("console/<slug:slug>/invitations/<uuid:invitation_id>", people.take_back, name="console-take-back"),
    path("console/<slug:slug>/trail", trail.trail, name="console-trail"),
    path("favicon.ico", RedirectView.as_view(url=static("console/mark.svg"))),  # browsers ask for it on admin pages
]
