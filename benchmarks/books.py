"""What people's questions of the books cost, over millions of ledger rows: ``python -m benchmarks.books``.

Makes a PostgreSQL of its own, fills it by SQL with made-up operations of 90 days, and times what the console, the usage
API, statements and the settler's comparison ask. Takes a few minutes and some GB of disk, both given back.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figures import machine, report, say

KEYS_A_TENANT = 5
UNCHARGED_ONE_IN = 17  # used and not charged: about every sum of an hour has some beside it
DAYS = 90
TURNS = 7

_FILL = """
INSERT INTO billing_ledgerentry (operation_id, entry_key, kind, tenant_id, project_id, key_id, priority_class, model,
    amount_micros, price_version, attempt, prompt_tokens, cached_tokens, output_tokens, reason, actor, created_at)
SELECT ('00000000-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid, ended.kind, ended.kind, tenant.id, tenant.id,
    ('00000000-0000-4000-8000-' || lpad(to_hex((n / 7) % {keys}), 12, '0'))::uuid,
    (ARRAY['interactive', 'default', 'batch'])[1 + n % 3], 'model',
    CASE ended.kind WHEN 'settle' THEN 100 + n % 50 ELSE 0 END, 1, 1, 200, 0, 64, '', 'bench',
    now() - interval '{days} days' * (1 - n::float8 / {rows})
FROM generate_series({start}, {end}) AS n
CROSS JOIN LATERAL (SELECT CASE n % {uncharged} WHEN 0 THEN 'release' ELSE 'settle' END AS kind) AS ended
JOIN (SELECT id, row_number() OVER (ORDER BY id) - 1 AS place FROM tenants_tenant) AS tenant
    ON tenant.place = CASE WHEN n % 2 = 0 THEN 0 ELSE n % {tenants} END
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.books", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="ended operations; half of them one tenant's")
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    if found.rows < 1 or found.tenants < 1:
        parser.error("--rows and --tenants are at least 1")
    with tempfile.TemporaryDirectory(prefix="rubato-books-") as folder, database(Path(folder)):
        fill(found.rows, found.tenants)
        figures = _questions(found.rows, found.tenants)
    report(figures, as_json=found.json)
    return 0


@contextmanager
def database(folder: Path) -> Iterator[None]:
    """A PostgreSQL of our own for as long as the block lasts, and Django set up upon it."""
    from gateway.embedded import EmbeddedPostgres, running

    os.environ["DJANGO_SETTINGS_MODULE"] = "gateway.settings"
    folder.mkdir(exist_ok=True)
    server = EmbeddedPostgres(folder, durable=False)
    with running(server, folder / "postgres.log"):
        roles = {"DATABASE_URL": "app_ops", "DATABASE_TENANT_URL": "app_rw", "DATABASE_OWNER_URL": "app_owner"}
        os.environ.update({name: server.url(role) for name, role in roles.items()})
        os.environ.setdefault("REDIS_URL", "")
        os.environ["RUBATO_DATA"] = str(folder)
        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", database="owner", verbosity=0)
        yield


def fill(rows: int, tenants: int) -> None:
    """Tenants t1, t2, … and ended operations of the last 90 days; the one with the smallest id has half of them."""
    from django.db import connection, connections

    from billing import rollups

    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO tenants_tenant (id, slug, name, timezone, is_active, created_at)"
            " SELECT gen_random_uuid(), 't' || n, 'Tenant ' || n, 'UTC', true, now() FROM generate_series(1, %s) AS n",
            [tenants],
        )
        step = 250_000
        for start in range(0, rows, step):
            end = min(start + step, rows) - 1
            cursor.execute(
                _FILL.format(
                    keys=KEYS_A_TENANT,
                    days=DAYS,
                    uncharged=UNCHARGED_ONE_IN,
                    start=start,
                    end=end,
                    tenants=tenants,
                    rows=rows,
                )
            )
            say(f"{end + 1:,} of {rows:,} operations written")
        say("rolling up")
        rollups.rebuild()
    with connections["owner"].cursor() as cursor:  # what autovacuum does by and by
        cursor.execute("VACUUM (ANALYZE)")


def _questions(rows: int, tenants: int) -> dict[str, Any]:
    from datetime import timedelta

    from django.db import connections
    from django.test.utils import CaptureQueriesContext
    from django.utils import timezone

    from billing import rollups, statements
    from billing.models import Rollup
    from billing.usage import Group, Width, buckets
    from tenants.isolation import ALIAS, tenant
    from tenants.models import Tenant

    now = timezone.now()
    largest = Tenant.objects.order_by("id").first()
    assert largest is not None

    def walled(width: Width, days: int, groups: list[Group]) -> Callable[[], object]:
        def ask() -> object:
            with tenant(largest.id):
                starts_at = now - timedelta(days=days)
                return buckets(
                    tenant_id=largest.id, starts_at=starts_at, ends_at=now, width=width, groups=groups, using=ALIAS
                )

        return ask

    questions: dict[str, Callable[[], object]] = {
        "usage_90_days_by_class_ms": walled(Width.DAY, 90, [Group.CLASS, Group.CHARGED]),
        "usage_90_days_by_key_ms": walled(Width.DAY, 90, [Group.KEY, Group.CHARGED]),
        "usage_7_days_by_hour_ms": walled(Width.HOUR, 6, [Group.CLASS, Group.CHARGED]),
        "usage_1_hour_by_minute_ms": lambda: buckets(
            tenant_id=largest.id, starts_at=now - timedelta(hours=1), ends_at=now, width=Width.MINUTE
        ),
        "roll_ups_of_two_hours_compared_ms": lambda: rollups.num_wrong_rows(since=now - timedelta(hours=2)),
    }
    figures: dict[str, Any] = {"rows": rows, "tenants": tenants, "rollup_rows": Rollup.objects.count()}
    # what the 90 days read: bounded by hours, keys and classes, however many operations they sum up
    span = Rollup.objects.filter(tenant=largest, hour__gte=now - timedelta(days=90))
    figures["rollup_rows_of_90_days"] = span.count()
    for name, ask in questions.items():
        figures[name] = _median_ms(ask)
    with CaptureQueriesContext(connections[ALIAS]) as captured:
        questions["usage_90_days_by_class_ms"]()
    figures["queries_of_90_days"] = len([one for one in captured.captured_queries if "billing" in one["sql"]])
    began = time.perf_counter()
    figures["statements_closed"] = len(statements.close_due_days(now - timedelta(days=DAYS - 2)))
    figures["statements_closed_s"] = round(time.perf_counter() - began, 2)
    return {**figures, **machine()}


def _median_ms(ask: Callable[[], object]) -> float:
    taken = []
    for _ in range(TURNS):
        began = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - began)
    return round(1_000 * sorted(taken)[TURNS // 2], 1)


if __name__ == "__main__":
    sys.exit(main())
