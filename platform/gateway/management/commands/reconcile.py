"""``manage.py reconcile``: engine, gate, ledger and roll-ups side by side. Exit status 1 when they differ after a
drain, 2 when a service is not there.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError

from gateway.gate import Gate
from gateway.management.services import answering_services, require_services
from gateway.reconciliation import Reconciliation, look
from wire.redis_keys import Keys

LOOK_AGAIN_S = 0.25


class Command(BaseCommand):
    help = "Shows what engines, Redis, the ledger and the roll-ups count; exits with 1 when they differ after a drain."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
        parser.add_argument("--drain-s", type=float, default=10.0, help="seconds to wait for the sides to agree")

    def handle(self, *args: Any, **options: Any) -> None:
        require_services()
        with answering_services(), Gate(settings.REDIS_URL, Keys(settings.RUBATO_REDIS_PREFIX)) as gate:
            found = _look_until_right(gate, time.monotonic() + options["drain_s"])
        self.stdout.write(json.dumps(found.as_json()) if options["json"] else _table(found))
        if not found.is_right:
            raise CommandError("the books differ" if found.is_drained else "the usage stream is not drained")


def _look_until_right(gate: Gate, until_s: float) -> Reconciliation:
    found = look(gate)
    while not found.is_right and time.monotonic() < until_s:
        time.sleep(LOOK_AGAIN_S)
        found = look(gate)
    return found


def _table(found: Reconciliation) -> str:
    rows: list[tuple[str, object, object, object, object]] = [
        ("", "prompt tokens", "output tokens", "settled micros", "open micros"),
        ("engine", found.engine.prompt_tokens, found.engine.output_tokens, "-", "-"),
        ("redis gate", "-", "-", found.gate.settled_micros, found.gate.open_micros),
        (
            "ledger",
            found.ledger.prompt_tokens,
            found.ledger.output_tokens,
            found.ledger_money.settled_micros,
            found.ledger_money.open_micros,
        ),
        ("rework", found.rework.prompt_tokens, found.rework.output_tokens, "-", "-"),
        ("roll-ups", found.rollup.prompt_tokens, found.rollup.output_tokens, found.rollup.cost_micros, "-"),
    ]
    lines = [f"{row[0]:<12}" + "".join(f"{cell!s:>18}" for cell in row[1:]) for row in rows]
    differences = {name: value for name, value in found.differences().items() if value}
    lines.append(f"waiting in the usage stream: {found.num_waiting_usages}; open alerts: {found.num_open_alerts}")
    lines.append("no differences" if not differences else f"differences: {differences}")
    return "\n".join(lines)
