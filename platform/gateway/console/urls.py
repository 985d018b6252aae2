"""Where the pages for people are."""

from django.templatetags.static import static
from django.urls import path
from django.views.generic import RedirectView

from gateway.console import views

urlpatterns = [
    path("", views.front, name="front"),
    path("operator/live", views.live, name="live"),
    path("favicon.ico", RedirectView.as_view(url=static("console/mark.svg"))),  # browsers ask for it on admin pages
]
