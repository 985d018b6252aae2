"""``manage.py run_batches``: the process that drives batches. One is enough; more of them share the batches."""

from __future__ import annotations

import asyncio
import logging
import signal
from pathlib import Path
from typing import Any

import uvloop
from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils import timezone

from gateway.batches.storage import Storage
from gateway.management.services import require_services
from gateway.run_batches import BatchOwner
from gateway.runtime import Runtime
from wire.gguf_header import ModelFileError

log = logging.getLogger(__name__)


class Command(BaseCommand):
    help = "Drives the lines of batches through the same door as everybody, in the batch class. Runs until SIGTERM."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        require_services()
        try:
            uvloop.run(_run())
        except ModelFileError as error:
            raise CommandError(f"The owner of batches cannot start: {error}") from error


async def _run() -> None:
    """Outages are waited out, at the start too. Raises ModelFileError."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    starting = asyncio.create_task(Runtime.started())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop, stop, starting)
    try:
        runtime = await starting
    except asyncio.CancelledError:
        return
    try:
        log.info("the owner of batches is ready")
        await BatchOwner(runtime, Storage(Path(settings.RUBATO_FILES_DIR)), timezone.now).run(stop)
    finally:
        await runtime.stop()


def _stop(stop: asyncio.Event, starting: asyncio.Task[Runtime]) -> None:
    stop.set()
    starting.cancel()  # nothing, where it has started
