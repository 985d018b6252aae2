"""Django's own pages. ``/v1`` and ``/metrics`` never come here: asgi.py routes them before Django."""

from django.contrib import admin
from django.urls import include, path

admin.site.site_header = admin.site.site_title = "Rubato"
admin.site.index_title = "Tenants, policy and books"

urlpatterns = [
    path("admin/", admin.site.urls),
    path("", include("gateway.console.urls")),
]
