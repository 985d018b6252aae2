"""The socket behind the live page. Knows operators and frames; refuses to know what a frame says."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings

from gateway import runtime
from gateway.console.feed import LiveFeed
from gateway.console.sessions import user_of
from gateway.database_threads import asked
from gateway.loads import loads

NOT_SIGNED_IN, GOING_AWAY = 4401, 1012
RECHECK_PERIOD_S = 15


class LiveConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # channels brings no types
    """One operator who looks.

    Always: opened from a page of this origin by a signed-in staff user; asked again every RECHECK_PERIOD_S, so that a
    log-out or a lost role ends the picture too.
    """

    channel_layer_alias = "none"  # nothing is sent to a socket but by its own task
    feed = LiveFeed(loads)

    async def connect(self) -> None:
        self._sender: asyncio.Task[None] | None = None
        if not same_origin(dict(self.scope["headers"])):
            await self.close()  # before accept: the handshake itself is refused with 403
            return
        await self.accept()
        if not await self._is_operator():
            await self.close(NOT_SIGNED_IN)
            return
        self._sender = asyncio.create_task(self._send_frames())

    async def disconnect(self, code: int) -> None:
        if self._sender is not None:
            self._sender.cancel()
            with suppress(asyncio.CancelledError):
                await self._sender

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """The page sends a heartbeat now and then to keep proxies awake; it needs no answer."""

    async def _send_frames(self) -> None:
        event_loop = asyncio.get_running_loop()
        number, asked_at = 0, event_loop.time()
        while True:
            number, text = await self.feed.frame_after(number)
            if event_loop.time() - asked_at >= RECHECK_PERIOD_S:
                asked_at = event_loop.time()
                if not await self._is_operator():
                    await self.close(NOT_SIGNED_IN)
                    return
            await self.send(text_data=text)
            current = runtime.current()
            if current is not None and current.is_going.is_set():
                await self.close(GOING_AWAY)
                return

    async def _is_operator(self) -> bool:
        """Read the session and its user afresh: what the scope remembers may be out of date."""
        session_key = self.scope["cookies"].get(settings.SESSION_COOKIE_NAME)
        if not session_key:
            return False
        user = await asked(partial(user_of, session_key))
        return user.is_active and bool(getattr(user, "is_staff", False))


def same_origin(headers: dict[bytes, bytes]) -> bool:
    """A browser page of this very host, or of one in CSRF_TRUSTED_ORIGINS; a missing Origin is a stranger."""
    origin = headers.get(b"origin", b"").decode("latin-1")
    host = headers.get(b"host", b"").decode("latin-1")
    if not origin or not host:
        return False
    return urlsplit(origin).netloc.lower() == host.lower() or origin in settings.CSRF_TRUSTED_ORIGINS
