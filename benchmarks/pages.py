"""What every page for people costs with much behind it: ``python -m benchmarks.pages``.

Makes a PostgreSQL and a Valkey of its own, fills them with tenants, usage of 90 days, one tenant with a lot of
everything, and workers that say how many requests are live. Visits each page of the console, of the operator and of the
admin: server time, queries, and bytes with the files that a first visit loads. Takes minutes and some GB of disk. Next
to the time stands the CPU that this process took, which a busy machine changes less.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from pathlib import Path
from posixpath import dirname, normpath
from typing import Any

from benchmarks.books import database, fill
from benchmarks.figures import machine, quantiles_ms, report, say

LIMITS = {"p50": 200.0, "queries": 12, "kb": 150.0}  # what the pages are held to
ROWS_A_WORKER = 1_000  # of the live requests
_LINKED = re.compile(r'(?:src|href)="(/static/[^"]+)"')
_IMPORTED = re.compile(r'(?:from|import)\s*\(?"(\.[^"]+)"')

_USAGE = """
INSERT INTO billing_usagerequest (id, tenant_id, project_id, key_id, priority_class, model, source, window_id,
    policy_version, price_version, reserved_micros, reserved_tokens, reserved_at, state, attempt, reason, prompt_tokens,
    cached_tokens, output_tokens, cost_micros, queue_us, ttft_us, total_us, gpu_us, num_steps, num_preemptions,
    recomputed_tokens, swapped_bytes, ended_at)
SELECT operation_id, tenant_id, project_id, key_id, priority_class, model, 'rest', '2026-11', 1, 1, 200, 264,
    created_at, 'completed', 1, '', prompt_tokens, cached_tokens, output_tokens, amount_micros, 1000, 200000, 900000,
    5000, 64, 0, 0, 0, created_at
FROM billing_ledgerentry WHERE kind = 'settle'
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pages", description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="ended requests; half of them one tenant's")
    parser.add_argument("--tenants", type=int, default=1_000)
    parser.add_argument("--live", type=int, default=10_000, help="requests that are live just now")
    parser.add_argument("--things", type=int, default=200, help="keys, members, batches … of the one tenant")
    parser.add_argument("--visits", type=int, default=20, help="of each page")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    found = parser.parse_args(arguments)
    if min(found.rows, found.tenants, found.live, found.things, found.visits) < 1:
        parser.error("every number is at least 1")
    with tempfile.TemporaryDirectory(prefix="rubato-pages-") as name:
        folder = Path(name)
        with _valkey(folder / "valkey"), database(folder / "postgres"):
            person, tenant = _fill(found.rows, found.tenants, found.things)
            figures = asyncio.run(_visit_all(found, person, tenant))
    if not found.json:
        sys.stdout.write(table(figures["pages"]) + "\n")
    report({name: value for name, value in figures.items() if found.json or name != "pages"}, as_json=found.json)
    return 0


@contextmanager
def _valkey(folder: Path) -> Iterator[None]:
    from gateway.embedded import EmbeddedValkey, running

    folder.mkdir()
    server = EmbeddedValkey(folder)
    with running(server, folder / "log"):
        os.environ["REDIS_URL"] = server.url
        yield


def _fill(rows: int, tenants: int, things: int) -> tuple[Any, Any]:
    """Somebody who is an operator and a member, and the tenant that has half of the rows and many things."""
    from django.contrib.auth import get_user_model
    from django.db import connections

    from tenants import members, services
    from tenants.models import Tenant
    from tenants.roles import Role

    fill(rows, tenants)
    say("writing requests and things")
    with connections["default"].cursor() as cursor:
        cursor.execute(_USAGE)
    largest = Tenant.objects.order_by("id").first()
    assert largest is not None
    person = get_user_model().objects.create_superuser("bench", "bench@x.example", uuid.uuid4().hex)
    furnish(largest, person, things)
    # with it the policy's first version, and a choice of tenants
    newest = services.create_tenant(actor="bench", slug="newest", name="Newest")
    members.add_member(actor="bench", tenant=newest, user=person, email=person.email, role=Role.OWNER)
    with connections["owner"].cursor() as cursor:  # what autovacuum does by and by
        cursor.execute("ANALYZE")
    return person, largest


def furnish(tenant: Any, owner: Any, size: int) -> None:
    """``size`` more of everything that a tenant's pages list; ``owner``, where somebody, becomes one of its owners."""
    from django.contrib.auth import get_user_model
    from django.utils import timezone

    from gateway.batches.models import Batch, StoredFile
    from gateway.webhooks.models import Delivery, Endpoint
    from tenants import audit
    from tenants.models import ApiKey, Invitation, Membership, Project

    users = get_user_model()
    now = timezone.now()

    def digest() -> str:
        return uuid.uuid4().hex * 2

    with audit.change_by("bench"):
        people = users.objects.bulk_create(
            [users(username=uuid.uuid4().hex, email=f"{n}@{tenant.slug}.example") for n in range(size)]
        )
        Membership.objects.bulk_create(
            [Membership(tenant=tenant, user=one, email=one.email, role="developer") for one in people]
            + [Membership(tenant=tenant, user=one, email=one.email, role="owner") for one in (owner,) if one]
        )
        Invitation.objects.bulk_create(
            Invitation(
                tenant=tenant,
                email=f"{uuid.uuid4().hex}@x.example",
                role="auditor",
                token_sha256=digest(),
                invited_by="x",
                expires_at=now,
            )
            for n in range(size)
        )
        projects = Project.objects.bulk_create(
            Project(tenant=tenant, name=f"project {uuid.uuid4()}") for n in range(size)
        )
        keys = ApiKey.objects.bulk_create(
            ApiKey(
                tenant=tenant,
                project=projects[n],
                name=f"key {n}",
                public_id=uuid.uuid4().hex[:12],
                secret_sha256=digest(),
                last4="abcd",
                created_by="x",
            )
            for n in range(size)
        )
        files = StoredFile.objects.bulk_create(
            StoredFile(
                tenant=tenant,
                project=projects[n],
                filename=f"{n}.jsonl",
                num_bytes=10,
                purpose="batch",
                storage_name=uuid.uuid4().hex,
                expires_at=now + timedelta(days=9),
            )
            for n in range(size)
        )
        Batch.objects.bulk_create(
            Batch(
                tenant=tenant,
                project=projects[n],
                key_id=keys[n].pk,
                key_public_id=keys[n].public_id,
                endpoint="/v1/chat/completions",
                input_file_id=files[n].id,
                output_lifetime_s=9,
                status="completed",
                completed_at=now,
                expires_at=now + timedelta(days=1),
            )
            for n in range(size)
        )
        endpoints = Endpoint.objects.bulk_create(
            Endpoint(tenant=tenant, url=f"https://x.example/{n}", events=["key.revoked"], created_by="x")
            for n in range(min(size, 20))
        )
        Delivery.objects.bulk_create(
            Delivery(
                tenant=tenant, endpoint=endpoints[n % len(endpoints)], event="key.revoked", subject=f"{n}", payload={}
            )
            for n in range(size)
        )


def console_pages(tenant: Any) -> dict[str, str]:
    """Every page of the console that is shown with a GET, by its name."""
    from gateway.batches.models import Batch
    from tenants.models import ApiKey

    own = f"/console/{tenant.slug}"
    key, batch = ApiKey.objects.filter(tenant=tenant).first(), Batch.objects.filter(tenant=tenant).first()
    names = ("", "playground", "live", "batches", "webhooks", "keys", "projects", "statements", "members", "trail")
    usage = {f"usage {span} by {by}": f"{own}/usage?span={span}&by={by}" for span, by in _VIEWS}
    return {
        "front": "/",
        "console": "/console/",
        **{f"console {name or 'start'}": f"{own}/{name}" for name in names},
        **usage,
        "console batch": f"{own}/batches/{batch.pk if batch else ''}",
        "console key, rotate": f"{own}/keys/{key.pk if key else ''}/rotate",
        "console key, revoke": f"{own}/keys/{key.pk if key else ''}/revoke",
    }


_VIEWS = (("day", "class"), ("week", "key"), ("quarter", "key"), ("quarter", "project"))


def operator_pages() -> dict[str, str]:
    """The board, the policy desk, and every list of the admin."""
    from django.contrib import admin
    from django.urls import reverse

    from tenants.models import PolicyVersion

    newest = PolicyVersion.objects.order_by("-version").first()
    lists = {
        f"admin {model._meta.model_name}": reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
        for model in admin.site._registry
    }
    desk = {"desk": reverse("desk"), "desk classes": reverse("desk-classes"), "desk history": reverse("desk-history")}
    if newest is not None:
        desk["desk version"] = reverse("desk-version", args=[newest.version])
    return {"board": reverse("live"), **desk, "admin": reverse("admin:index"), **lists}


class Queries:
    """Every query of every connection that is opened from now on, whichever thread opens it."""

    def __init__(self) -> None:
        from django.db.backends.signals import connection_created

        self.seen: list[str] = []
        connection_created.connect(self._equip, weak=False)

    def _equip(self, connection: Any, **_: Any) -> None:
        if self._note not in connection.execute_wrappers:
            connection.execute_wrappers.append(self._note)

    def _note(self, execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        self.seen.append(sql)
        return execute(sql, params, many, context)


async def _visit_all(asked: argparse.Namespace, person: Any, tenant: Any) -> dict[str, Any]:
    from asgiref.sync import sync_to_async
    from django.test import AsyncClient

    queries = Queries()  # before a thread opens its connection
    paths = await sync_to_async(lambda: {**console_pages(tenant), **operator_pages()})()
    client, pages, sizes = AsyncClient(), {}, {}
    await client.aforce_login(person)
    async with _live(asked.live, str(tenant.pk)):
        for name, path in paths.items():
            pages[name] = await _visit(client, path, asked.visits, sizes, queries)
            say(f"{name}: {pages[name]}")
    missed = [name for name, page in pages.items() if any(page[limit] > most for limit, most in LIMITS.items())]
    size = {"rows": asked.rows, "tenants": asked.tenants, "live": asked.live, "things": asked.things}
    return {"pages": pages, "missed": missed, "limits": LIMITS, **size, **machine()}


async def _visit(client: Any, path: str, visits: int, sizes: dict[str, int], queries: Queries) -> dict[str, Any]:
    """One page, several times; the first visit opens what is opened once."""
    from django.conf import settings

    settings.ALLOWED_HOSTS = ["*"]
    took: list[float] = []
    began_cpu_s = time.process_time()
    for _ in range(visits + 1):
        queries.seen.clear()
        began = time.perf_counter()
        answer = await client.get(path, headers={"accept-encoding": "gzip"})
        took.append(time.perf_counter() - began)
    cpu_ms = 1_000 * (time.process_time() - began_cpu_s) / (visits + 1)
    if answer.status_code != 200:
        raise RuntimeError(f"{path} was answered {answer.status_code}")
    found: dict[str, Any] = {**quantiles_ms(took[1:]), "cpu_ms": round(cpu_ms, 1)}
    page = len(answer.content)
    loaded = page + sum([await _size(client, link, sizes) for link in set(_LINKED.findall(_text(answer)))])
    return {**found, "queries": len(queries.seen), "page_kb": round(page / 1_000, 1), "kb": round(loaded / 1_000, 1)}


def _text(answer: Any) -> str:
    import gzip

    packed = answer.headers.get("Content-Encoding") == "gzip"
    return (gzip.decompress(answer.content) if packed else answer.content).decode()


async def _size(client: Any, path: str, sizes: dict[str, int]) -> int:
    """Bytes of a file of ours, with the modules that it imports."""
    if path in sizes:
        return sizes[path]
    sizes[path] = 0  # modules may import each other
    answer = await client.get(path, headers={"accept-encoding": "gzip"})
    total = len(answer.content)
    if path.endswith(".js"):
        for name in set(_IMPORTED.findall(_text(answer))):
            total += await _size(client, normpath(f"{dirname(path)}/{name}"), sizes)
    sizes[path] = total
    return total


@asynccontextmanager
async def _live(num: int, tenant_id: str) -> AsyncIterator[None]:
    """Workers that say they have so many requests, half of them this tenant's, over a real Bus."""
    import redis

    from gateway.loads import loads
    from wire.codec import encode_load
    from wire.redis_bus import RedisGatewayBus, RedisWorkerBus
    from wire.redis_keys import Keys

    url = os.environ["REDIS_URL"]
    workers = [RedisWorkerBus(url, f"worker-{n}") for n in range(-(-num // ROWS_A_WORKER))]
    for worker in workers:
        worker.open()
    bus = RedisGatewayBus(url, "bench")
    await bus.open()
    with redis.Redis.from_url(url) as client:
        for index, worker in enumerate(workers):
            rows = min(ROWS_A_WORKER, num - index * ROWS_A_WORKER)
            body = encode_load(_snapshot(worker.worker_id, worker.epoch, rows, tenant_id))
            client.set(Keys().load(worker.worker_id), body)  # for good: nobody says it again four times a second
    loads.read_from(bus.loads)
    said = sum(len(load.board) for load in await bus.loads())
    if said != num:
        raise RuntimeError(f"{said} live requests are said, not {num}")
    try:
        yield
    finally:
        loads.read_from(None)
        await bus.close()
        for worker in workers:
            worker.close()


def _snapshot(worker_id: str, epoch: int, num_rows: int, tenant_id: str) -> Any:
    from dataclasses import replace

    from benchmarks.board import snapshot
    from scheduler_engine.policy import PriorityClass
    from wire.snapshots import BoardRow

    board = tuple(
        BoardRow(
            response_id=str(uuid.UUID(int=(time.time_ns() // 1_000_000 << 80) | 7 << 76 | 2 << 62 | n)),
            tenant_id=tenant_id if n % 2 == 0 else f"{n:036}",
            priority_class=PriorityClass(n % 3),
            state="decode",
            num_blocks=20,
            num_computed_tokens=300,
            num_output_tokens=44,
        )
        for n in range(num_rows)
    )
    return replace(snapshot(1), worker_id=worker_id, epoch=epoch, board=board)


def table(pages: dict[str, dict[str, Any]]) -> str:
    """A line a page; a star behind what misses its limit."""
    lines = [f"{'page':<28}{'p50 ms':>10}{'p99 ms':>10}{'CPU ms':>9}{'queries':>9}{'page kB':>10}{'kB in all':>11}"]
    for name, page in pages.items():
        marks = {column: "*" if page[column] > LIMITS.get(column, float("inf")) else " " for column in page}
        cells = [f"{page[column]}{marks[column]}" for column in ("p50", "p99", "cpu_ms", "queries", "page_kb", "kb")]
        lines.append(f"{name:<28}{cells[0]:>10}{cells[1]:>10}{cells[2]:>9}{cells[3]:>9}{cells[4]:>10}{cells[5]:>11}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
