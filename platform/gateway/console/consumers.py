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
from gateway.postgresql import AWAY

NOT_SIGNED_IN, GOING_AWAY, TRY_AGAIN = 4401, 1012, 1013
RECHECK_PERIOD_S = 15


class LiveConsumer(AsyncWebsocketConsumer):  # type: ignore[misc]  # channels brings no types
    """One operator who looks.

    Always: opened from a page of this origin by a signed-in staff user; asked again every RECHECK_PERIOD_S, so that a
    log-out or a lost role ends the picture too. While the database is away nobody can sign out: who looks goes on.
    """

    channel_layer_alias = "none"  # nothing is sent to a socket but by its own task
    feed = LiveFeed(loads)

    async def connect(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []
        if not same_origin(dict(self.scope["headers"])):
            await self.close()  # before accept: the handshake itself is refused with 403
            return
        await self.accept()
        try:
            is_operator = await self._is_operator()
        except AWAY:
            await self.close(TRY_AGAIN)
            return
        if not is_operator:
            await self.close(NOT_SIGNED_IN)
            return
        self._tasks = [asyncio.create_task(self._send_frames()), asyncio.create_task(self._ask_again())]

    async def disconnect(self, code: int) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        """The page sends a heartbeat now and then to keep proxies awake; it needs no answer."""

    async def _send_frames(self) -> None:
        number = 0
        while True:
            number, text = await self.feed.frame_after(number)
            await self.send(text_data=text)
            current = runtime.current()
            if current is not None and current.is_going.is_set():
                await self.close(GOING_AWAY)
                return

    async def _ask_again(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_PERIOD_S)
            with suppress(*AWAY):
                if not await self._is_operator():
                    self._tasks[0].cancel()
                    await self.close(NOT_SIGNED_IN)
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
