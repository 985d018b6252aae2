"""The platform with much behind it: a thousand tenants with their quotas, millions of ended requests, one tenant that
has a lot of everything that pages list, and workers that say how many requests are live.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.books import fill
from benchmarks.figures import say
from scheduler_engine.policy import PriorityClass

ROWS_A_WORKER = 1_000  # of the live requests
PERSON = "bench"  # an operator, and an owner of the tenant with the many things

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


@contextmanager
def valkey(folder: Path) -> Iterator[None]:
    """One of our own for as long as the block lasts, told to Django through REDIS_URL."""
    from gateway.embedded import EmbeddedValkey, running

    folder.mkdir(exist_ok=True)
    server = EmbeddedValkey(folder)
    with running(server, folder / "log"):
        os.environ["REDIS_URL"] = server.url
        yield


def largest() -> Any:
    """The tenant that ``fill`` gives half of the rows."""
    from tenants.models import Tenant

    return Tenant.objects.order_by("id").first()


def build(rows: int, tenants: int, things: int) -> None:
    from django.contrib.auth import get_user_model
    from django.db import connections

    from billing import services as billing_services
    from billing.pricing import TokenPrices
    from tenants import members, proposals, selectors, services
    from tenants.models import QuotaPolicy, Tenant
    from tenants.roles import Role

    fill(rows, tenants)
    say("writing requests and things")
    with connections["default"].cursor() as cursor:
        cursor.execute(_USAGE)
    person = get_user_model().objects.create_superuser(PERSON, "bench@x.example", uuid.uuid4().hex)
    furnish(largest(), person, things)
    newest = services.create_tenant(actor=PERSON, slug="newest", name="Newest")
    members.add_member(actor=PERSON, tenant=newest, user=person, email=person.email, role=Role.OWNER)
    cells = list(QuotaPolicy.objects.filter(tenant=newest))
    for tenant in Tenant.objects.exclude(id=newest.id):
        for cell in cells:
            cell.pk, cell.tenant = None, tenant
            cell._state.adding = True
        QuotaPolicy.objects.bulk_create(cells)
    prices = {("model", each.label): TokenPrices(prompt=150, cached=75, output=600) for each in PriorityClass}
    billing_services.set_prices(actor=PERSON, prices=prices)
    for weight in range(2, 2 + 5):
        policy = replace(selectors.tenant_class_policy(cells[0]), weight=weight)
        saved = services.save_quotas(actor=PERSON, policies=[policy], reason="they pay more")
    document: Any = selectors.live_policy(saved.version)
    document["tenants"][0]["weight"] += 1
    dearer = {place: replace(price, output=700) for place, price in prices.items()}
    changes = billing_services.price_changes(prices, dearer)
    proposals.draft(actor=PERSON, document=document, based_on=saved.version, prices=changes)
    with connections["owner"].cursor() as cursor:  # what autovacuum does by and by
        cursor.execute("VACUUM (ANALYZE)")


def furnish(tenant: Any, owner: Any, size: int) -> None:
    """``size`` more of everything that a tenant's pages list; ``owner``, where somebody, becomes one of its owners."""
    from django.contrib.auth import get_user_model
    from django.utils import timezone

    from billing.models import Statement
    from gateway.batches.models import Batch, StoredFile
    from gateway.webhooks.models import Alert, Delivery, Endpoint, Threshold
    from gateway.webhooks.services import MOST, MOST_THRESHOLDS
    from tenants import audit
    from tenants.models import ApiKey, Invitation, Membership, Project

    now = timezone.now()
    midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
    users = get_user_model()

    def more(model: Any, num: int, **columns: Any) -> list[Any]:
        """A column is a value, or a function of the row's number."""
        rows = [{name: one(n) if callable(one) else one for name, one in columns.items()} for n in range(num)]
        return list(model.objects.bulk_create(model(tenant=tenant, **row) for row in rows))

    def word(_: int) -> str:
        return uuid.uuid4().hex

    def digest(_: int) -> str:
        return word(0) + word(0)

    with audit.change_by(PERSON):
        people = users.objects.bulk_create(users(username=word(n), email=f"{word(n)}@x.example") for n in range(size))
        more(Membership, size, user=lambda n: people[n], email=lambda n: people[n].email, role="developer")
        if owner:
            more(Membership, 1, user=owner, email=owner.email, role="owner")
        invited = {"role": "auditor", "invited_by": "x", "expires_at": now}
        more(Invitation, size, email=lambda n: f"{word(n)}@x.example", token_sha256=digest, **invited)
        projects = more(Project, size, name=lambda _: f"project {uuid.uuid4()}")
        keys = more(
            ApiKey,
            size,
            project=lambda n: projects[n],
            name=lambda n: f"key {n}",
            public_id=lambda n: word(n)[:12],
            secret_sha256=digest,
            last4="abcd",
            created_by="x",
        )
        stored = {"num_bytes": 10, "purpose": "batch", "storage_name": word, "expires_at": now + timedelta(days=9)}
        files = more(StoredFile, size, project=lambda n: projects[n], filename=lambda n: f"{n}.jsonl", **stored)
        more(
            Batch,
            size,
            project=lambda n: projects[n],
            key_id=lambda n: keys[n].pk,
            key_public_id=lambda n: keys[n].public_id,
            endpoint="/v1/chat/completions",
            input_file_id=lambda n: files[n].id,
            output_lifetime_s=9,
            status="completed",
            completed_at=now,
            expires_at=now + timedelta(days=1),
        )
        room = MOST - Endpoint.objects.filter(tenant=tenant).count()
        asked = {"url": lambda n: f"https://x.example/{n}", "events": ["key.revoked"], "created_by": "x"}
        more(Endpoint, min(size, room), **asked)
        ends = list(Endpoint.objects.filter(tenant=tenant))
        told = {"event": "key.revoked", "subject": word, "payload": {}}
        more(Delivery, size, endpoint=lambda n: ends[n % len(ends)], **told)
        drawn = Threshold.objects.filter(tenant=tenant).count()
        line = {"priority_class": "batch", "measure": "tokens", "created_by": "x"}
        more(Threshold, min(size, MOST_THRESHOLDS - drawn), amount=lambda n: 1 + drawn + n, **line)
        crossed = {"class": "batch", "window": "2026-11", "used_percent": 97}
        more(Alert, size, event="budget.exhausted", subject=word, data=crossed, happened_at=now)
    known = Statement.objects.filter(tenant=tenant).count()
    more(
        Statement,
        size,
        day=lambda n: (midnight - timedelta(days=1 + known + n)).date(),
        zone="UTC",
        starts_at=lambda n: midnight - timedelta(days=1 + known + n),
        ends_at=lambda n: midnight - timedelta(days=known + n),
        lines=[],
        corrections=[],
        **dict.fromkeys(("charged_micros", "adjusted_micros", "credited_micros", "total_micros"), 0),
    )


def examples(tenant: Any) -> dict[str, Any]:
    """For each parameter of an address something that this tenant has."""
    from django.contrib.auth import get_user_model
    from django.contrib.contenttypes.models import ContentType

    from billing.models import Statement
    from gateway.batches.models import Batch, StoredFile
    from gateway.webhooks.models import Delivery, Endpoint, Threshold
    from tenants import members
    from tenants.models import ApiKey, Invitation, Membership, PolicyProposal, PolicyVersion
    from tenants.roles import Role

    address = f"{uuid.uuid4()}@x.example"

    def first(model: Any) -> Any:
        return lambda: model.objects.filter(tenant=tenant).values_list("pk", flat=True).first()

    def newest(model: Any, column: str) -> Any:
        return lambda: model.objects.order_by(f"-{column}").values_list(column, flat=True).first()

    ours = {"batch": Batch, "file": StoredFile, "threshold": Threshold, "endpoint": Endpoint, "delivery": Delivery}
    more = {"key": ApiKey, "statement": Statement, "member": Membership, "invitation": Invitation}
    return {
        **{f"{name}_id": first(model) for name, model in {**ours, **more}.items()},
        "slug": lambda: tenant.slug,
        "tenant_id": lambda: tenant.id,
        "response_id": uuid.uuid4,
        "proposal_id": lambda: PolicyProposal.objects.values_list("pk", flat=True).first(),
        "number": newest(PolicyVersion, "version"),
        "label": lambda: "batch",
        "app_label": lambda: "tenants",
        "content_type_id": lambda: ContentType.objects.values_list("pk", flat=True).first(),
        "id": lambda: get_user_model().objects.values_list("pk", flat=True).first(),
        "token": lambda: members.invite(actor=PERSON, tenant=tenant, email=address, role=Role.AUDITOR).token,
        **dict.fromkeys(("uidb36", "key"), lambda: "nonsense"),
        "deed": lambda: "rotate",
        "kind": lambda: "csv",
    }


@asynccontextmanager
async def live(num: int, tenant_id: str) -> AsyncIterator[None]:
    """Workers that say they have so many requests, half of them this tenant's, over a real Bus."""
    import redis

    from gateway.loads import loads
    from wire.codec import encode_load
    from wire.redis_bus import RedisGatewayBus, RedisWorkerBus
    from wire.redis_keys import Keys

    url = os.environ["REDIS_URL"]
    workers = [RedisWorkerBus(url, f"worker-{n}") for n in range(-(-num // ROWS_A_WORKER))]
    epochs = [worker.open() for worker in workers]
    bus = RedisGatewayBus(url, "bench")
    await bus.open()
    with redis.Redis.from_url(url) as client:
        for index, (worker, epoch) in enumerate(zip(workers, epochs, strict=True)):
            rows = min(ROWS_A_WORKER, num - index * ROWS_A_WORKER)
            body = encode_load(_snapshot(worker.worker_id, epoch, rows, tenant_id))
            client.set(Keys().load(worker.worker_id), body)  # for good: nobody says it again some times a second
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
