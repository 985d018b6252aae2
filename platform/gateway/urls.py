"""Django's own pages and the management API. asgi.py routes the rest of ``/v1`` and ``/metrics`` past Django."""

from allauth.account import views as account
from django.contrib import admin
from django.urls import include, path

from gateway.console.accounts import by_mail
from gateway.console.pages.entrance import operators_door

admin.site.site_header = admin.site.site_title = "Rubato"
admin.site.index_title = "Tenants, policy and books"

BY_MAIL = {
    "password/reset": account.password_reset,
    "password/reset/done": account.password_reset_done,
    "email": account.email,
    "confirm-email": account.email_verification_sent,
}

urlpatterns = [
    path("admin/login/", operators_door),  # before the admin's own, which keeps the name that everything leads to
    path("admin/", admin.site.urls),
    path("v1/organization/", include("gateway.management_api.urls")),
    *(path(f"account/{place}/", by_mail(view)) for place, view in BY_MAIL.items()),  # named by those of the next line
    path("account/", include("allauth.urls")),
    path("operator/policy/", include("gateway.desk.urls")),
    path("", include("gateway.console.urls")),
]

handler400 = "gateway.management_api.errors.bad_request"
handler403 = "gateway.management_api.errors.forbidden"
handler404 = "gateway.management_api.errors.no_page"
handler500 = "gateway.management_api.errors.internal"
