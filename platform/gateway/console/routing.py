"""Where the console's sockets are. Each pattern brings what its consumer needs, so a plain URLRouter serves them."""

from channels.sessions import CookieMiddleware
from django.urls import path

from gateway.console.consumers import LiveConsumer

websocket_urlpatterns = [
    path("operator/live/stream", CookieMiddleware(LiveConsumer.as_asgi())),
]
