"""Where every connection goes: /v1 to the raw API, /metrics to its own app, sockets to Channels, the rest to Django.

The ASGI lifespan starts and stops this process's runtime.
"""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "gateway.settings")
os.environ.setdefault("DATABASE_SILENCE_S", "8")  # people wait here: longest before they are told that it is away

from channels.routing import ProtocolTypeRouter, URLRouter
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.urls import path, re_path

django_handler = get_asgi_application()  # before anything that imports models

from gateway import metrics, runtime, v1
from gateway.client_address import behind_proxies
from gateway.console.routing import websocket_urlpatterns
from gateway.errors import Reason, Refusal
from gateway.stop_signals import told_of_stop_signals
from gateway.tracing import tracing
from gateway.v1.http import SECURITY_HEADERS, Exchange, Receive, Scope, Send
from gateway.v1.responses_socket import ResponsesConsumer
from gateway.whole_bodies import MANAGED, WholeBodies
from wire.gguf_header import ModelFileError

if settings.SECURE_HSTS_SECONDS:
    SECURITY_HEADERS["strict-transport-security"] = f"max-age={settings.SECURE_HSTS_SECONDS}"

django_application = WholeBodies(django_handler)


async def http(scope: Scope, receive: Receive, send: Send) -> None:
    where: str = scope["path"]
    if where.startswith(MANAGED):  # managed, not served: Django REST framework
        await django_application(scope, receive, send)
    elif _is_api(where):
        current = runtime.current()
        if current is None:
            refusal = Refusal(reason=Reason.UNAVAILABLE, message="The gateway is starting.")
            await Exchange(scope, receive, send).refuse(refusal)
            return
        await v1.application(current, scope, receive, send)
    elif where == "/metrics":
        await metrics.application(dict(scope), receive, send)
    else:
        await django_application(scope, receive, send)


def _is_api(path: str) -> bool:
    """Also the paths that only look like the API's: they are answered in its error shape."""
    first, _, _ = path.lstrip("/").partition("/")
    return first.lower() == "v1"


async def no_such_socket(scope: Scope, receive: Receive, send: Send) -> None:
    """A handshake is refused like any request, where the server can say more than 403."""
    await receive()
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close"})
        return

    async def deny(message: Mapping[str, Any]) -> None:
        await send({**message, "type": f"websocket.{message['type']}"})

    message = f"There is no websocket at {scope['path'][: v1.MAX_PATH_SHOWN]}."
    exchange = Exchange({"method": "GET", **scope}, receive, deny)
    await exchange.refuse(Refusal(reason=Reason.ROUTE_NOT_FOUND, message=message))


sockets = URLRouter(
    [
        path("v1/responses", ResponsesConsumer.as_asgi()),
        *websocket_urlpatterns,
        re_path(r"", no_such_socket),  # type: ignore[arg-type]  # Channels routes ASGI apps
    ]
)
router = ProtocolTypeRouter({"http": http, "websocket": sockets})


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        await _lifespan(receive, send)
    else:
        await router(behind_proxies(scope, settings.RUBATO_TRUSTED_PROXIES), receive, send)


async def _lifespan(receive: Receive, send: Send) -> None:
    await receive()
    tracing.start_from_environment()
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # a connection is a file
    try:
        own = await runtime.Runtime.started()
    except (ModelFileError, OSError) as error:
        await send({"type": "lifespan.startup.failed", "message": f"The gateway cannot start: {error}"})
        return
    runtime.set_current(own)
    await send({"type": "lifespan.startup.complete"})
    with told_of_stop_signals(own.go_away):  # the server waits for open streams before it tells us
        await receive()
    runtime.set_current(None)
    await own.stop()
    await send({"type": "lifespan.shutdown.complete"})


# What is imported by now lives as long as the process: a look for dead cycles need not stop streams to go through it.
gc.collect()
gc.freeze()
