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
from django.db import DatabaseError
from django.utils import timezone
from redis.exceptions import RedisError

from gateway.batches.storage import Storage
from gateway.management.services import require_services
from gateway.run_batches import BatchOwner
from gateway.runtime import Runtime
from wire.bus import BusError
from wire.gguf_header import ModelFileError

log = logging.getLogger(__name__)


class Command(BaseCommand):
    help = "Drives the lines of batches through the same door as everybody, in the batch class. Runs until SIGTERM."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        require_services()
        try:
            uvloop.run(_run())
        except (BusError, RedisError, DatabaseError, ModelFileError) as error:
            raise CommandError(f"The owner of batches cannot start: {error}") from error


async def _run() -> None:
    """Raises what is missing at the start; later outages are waited out."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runtime = Runtime.from_settings()
    await runtime.start()
    try:
        log.info("the owner of batches is ready")
        await BatchOwner(runtime, Storage(Path(settings.RUBATO_FILES_DIR)), timezone.now).run(stop)
    finally:
        await runtime.stop()
