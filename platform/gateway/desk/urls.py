"""Where the desk's pages are."""

from django.urls import path

from gateway.desk import edits, prices, views

urlpatterns = [
    path("", views.matrix, name="desk"),
    path("prices", prices.prices, name="desk-prices"),
    path("classes", views.classes, name="desk-classes"),
    path("edits/<uuid:proposal_id>", edits.proposal, name="desk-proposal"),
    path("edits/<uuid:proposal_id>/preview", edits.preview, name="desk-preview"),
    path("history", views.history, name="desk-history"),
    path("versions/<int:number>", views.version, name="desk-version"),
    path("told", views.told, name="desk-telling"),
    path("pause/<uuid:tenant_id>/<slug:label>", views.pause, name="desk-pause"),
]
