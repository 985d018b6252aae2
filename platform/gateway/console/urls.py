"""Where the pages for people are."""

from django.urls import path

from gateway.console import views

urlpatterns = [
    path("", views.front, name="front"),
    path("operator/live", views.live, name="live"),
]
