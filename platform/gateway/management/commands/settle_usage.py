"""``manage.py settle_usage``: the process that keeps the books. One is enough; more of them do no harm."""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand
from django.utils import timezone

from gateway.books_watch import BooksWatch
from gateway.gate import Gate
from gateway.management.services import require_services
from gateway.orphans import OrphanSweep
from gateway.settler import Duty, Settler
from wire.redis_bus import RedisUsageReader
from wire.redis_keys import Keys

log = logging.getLogger(__name__)

WITNESS_EVERY_S = 5.0
COMPARE_EVERY_S = 60.0
SWEEP_EVERY_S = 15.0


class Command(BaseCommand):
    help = "Writes what workers counted into the ledger: exactly once, acknowledged after commit. Runs until SIGTERM."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        require_services()  # once there are any, their outages are waited out
        stop = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
        keys = Keys(settings.RUBATO_REDIS_PREFIX)
        reader = RedisUsageReader(settings.REDIS_URL, keys=keys)
        with Gate(settings.REDIS_URL, keys) as gate:
            watch = BooksWatch(gate, clock_s=time.monotonic, now=timezone.now, every_s=COMPARE_EVERY_S)
            sweep = OrphanSweep(gate, clock_s=time.monotonic, now=timezone.now)
            settler = Settler(
                reader,
                clock_s=time.monotonic,
                stopped_after=stop.wait,
                duties=[
                    Duty(WITNESS_EVERY_S, watch.run, under_load=True),
                    Duty(SWEEP_EVERY_S, lambda: _sweep(sweep)),
                ],
            )
            log.info("the settler is ready")
            settler.run()
        reader.close()
        log.info("the settler has stopped: %s", settler.applied)


def _sweep(sweep: OrphanSweep) -> None:
    released = sweep.run()
    if released:
        log.warning("%d operations had lost their owner and were released", released)
