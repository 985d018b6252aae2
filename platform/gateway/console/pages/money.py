"""What a tenant used and owes: by class, model, key, project and time; quotas beside it; statements and their files."""

from __future__ import annotations

import csv
import io
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from django.conf import settings
from django.db.models import Sum
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone

from billing import documents, statements
from billing.models import LedgerEntry, Statement
from billing.statements import Day
from billing.usage import Bucket, Group, Sums, Width, buckets, days
from gateway.console.pages.limits import limits_of
from gateway.console.pages.membership import Member, page
from gateway.console.pages.paging import shown
from tenants.isolation import ALIAS
from tenants.models import ApiKey, Project
from tenants.roles import Capability

GROUPS = {"class": Group.CLASS, "model": Group.MODEL, "project": Group.PROJECT, "key": Group.KEY}
SPANS = {"day": timedelta(days=1), "week": timedelta(days=7), "quarter": timedelta(days=90)}
_FIELDS = ("num_requests", "num_downgraded", "prompt_tokens", "cached_tokens", "output_tokens", "cost_micros")


@dataclass(frozen=True, slots=True)
class Row:
    """One group of one bucket, or of the whole span: what was charged of it, or what was used and not charged."""

    name: str
    is_charged: bool
    num_requests: int
    num_downgraded: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    cost_micros: int

    @property
    def cost(self) -> str:
        return documents.money(self.cost_micros)


@page(Capability.SEE_USAGE)
def usage(request: HttpRequest, me: Member) -> HttpResponse:
    """Bars over time, a table by group with what was not charged apart, the limits; ``?format=csv`` is the table bucket
    by bucket.
    """
    span = request.GET.get("span", "week")
    by = request.GET.get("by", "class")
    if span not in SPANS or by not in GROUPS or request.GET.get("format", "csv") != "csv":
        raise Http404("There is no such view of usage.")
    zone = ZoneInfo(me.tenant.timezone)
    found = _buckets(me, SPANS[span], GROUPS[by], zone)
    names, column = _names(by), GROUPS[by].value
    if request.GET.get("format") == "csv":
        rows = [
            (one.starts_at.astimezone(zone).isoformat(), _row(names, column, sums))
            for one in found
            for sums in one.parts
        ]
        return _csv(by, rows, me.may(Capability.SEE_MONEY))
    totals: dict[tuple[str, bool], list[int]] = {}
    wholes: dict[bool, list[int]] = {}
    for row in (_row(names, column, sums) for one in found for sums in one.parts):
        total = totals.setdefault((row.name, row.is_charged), [0] * len(_FIELDS))
        whole = wholes.setdefault(row.is_charged, [0] * len(_FIELDS))
        for index, field in enumerate(_FIELDS):
            total[index] += getattr(row, field)
            whole[index] += getattr(row, field)
    context = {
        "me": me,
        "span": span,
        "spans": list(SPANS),
        "by": by,
        "groups": list(GROUPS),
        "columns": [
            [int(one.starts_at.timestamp()) for one in found],
            [sum(sums.prompt_tokens + sums.output_tokens for sums in one.parts) for one in found],
        ],
        "rows": [Row(*place, *totals[place]) for place in sorted(totals, key=_charged_first)],
        "wholes": [Row("all", is_charged, *wholes[is_charged]) for is_charged in sorted(wholes, reverse=True)],
        **limits_of(me),
        "zone": zone,
        "cuts_hours": any(one.starts_at.minute for one in found),
    }
    return render(request, "console/usage.html", context)


def _buckets(me: Member, length: timedelta, group: Group, zone: ZoneInfo) -> list[Bucket[Sums]]:
    """Hours of UTC; of a quarter the days of the tenant's calendar, which are those of its statements."""
    now, groups = timezone.now(), [group, Group.CHARGED]
    if length == SPANS["quarter"]:
        today = now.astimezone(zone).date()
        first = today - length + timedelta(days=1)
        return days(tenant_id=me.tenant.id, first=first, last=today, zone=zone, groups=groups, using=ALIAS)
    starts_at = now - length + Width.HOUR.length
    return buckets(
        tenant_id=me.tenant.id, starts_at=starts_at, ends_at=now, width=Width.HOUR, groups=groups, using=ALIAS
    )


@page(Capability.SEE_MONEY)
def statement_list(request: HttpRequest, me: Member) -> HttpResponse:
    """Closed days, newest first."""
    some = shown(request, Statement.objects.defer("lines", "corrections").order_by("-day"))
    found = [(one, documents.money(one.total_micros)) for one in some.rows]
    context = {"me": me, "statements": found, "page": some} | _coming(statements.open_day(me.tenant))
    return render(request, "console/statements.html", context)


@page(Capability.SEE_MONEY)
def statement(request: HttpRequest, me: Member, statement_id: uuid.UUID) -> HttpResponse:
    """One closed day: its lines and corrections, and beside its total the sum of the ledger's entries themselves."""
    return _statement_page(request, me, get_object_or_404(Statement, id=statement_id))


@page(Capability.SEE_MONEY)
def open_statement(request: HttpRequest, me: Member) -> HttpResponse:
    """The day that is not closed yet, as far as it has come."""
    day = statements.open_day(me.tenant)
    if day is None:
        return redirect("console-statements", slug=me.tenant.slug)
    return _statement_page(request, me, statements.so_far(me.tenant, day, timezone.now()), day)


def _statement_page(request: HttpRequest, me: Member, found: Statement, open_day: Day | None = None) -> HttpResponse:
    """What was drawn up just now, of an open day, is the ledger's word itself: nothing is compared."""
    in_ledger = found.total_micros if open_day else _ledger_total(found)
    context = _coming(open_day) | {
        "me": me,
        "statement": found,
        "begins_before": documents.begins_before_its_day(found),
        "lines": [
            (line, documents.key_of(line), documents.rounding(line), documents.cost(line)) for line in found.lines
        ],
        "prices": [
            (version, label, model, [documents.money(micros) for micros in kinds])
            for version, label, model, *kinds in documents.prices_of(found)
        ],
        "said_of_lines": documents.RECOMPUTED if documents.tells_apart(found) else documents.NOT_TOLD_APART,
        "corrections": [(one, documents.money(documents.owed_micros(one))) for one in found.corrections],
        "sums": [
            (name, documents.money(micros))
            for name, micros in (
                ("Charged", found.charged_micros),
                ("Adjusted", found.adjusted_micros),
                ("Credited", found.credited_micros),
                ("Total", found.total_micros),
            )
        ],
        "ledger": documents.money(in_ledger),
        "is_equal": in_ledger == found.total_micros,
    }
    return render(request, "console/statement.html", context)


def _coming(open_day: Day | None) -> dict[str, Any]:
    """What pages say of when its statement comes."""
    now = timezone.now()
    look = next_look(max(open_day.closes_at, now)) if open_day else None
    return {"open_day": open_day, "now": now, "next_look": look}


def next_look(after: datetime) -> datetime:
    """The first moment, not before ``after``, at which the clockwork looks for days to close."""
    minutes = settings.CELERY_BEAT_SCHEDULE["statements"]["schedule"].minute  # of an hour in UTC
    at = after.astimezone(UTC).replace(second=0, microsecond=0)
    at += timedelta(minutes=1) * (at < after)
    while at.minute not in minutes:
        at += timedelta(minutes=1)
    return at


def _ledger_total(found: Statement) -> int:
    """Charged + adjusted - credited, of the entries in its span."""
    entries = LedgerEntry.objects.filter(
        tenant_id=found.tenant_id, created_at__gte=found.starts_at, created_at__lt=found.ends_at
    )
    by_kind = dict(entries.order_by().values_list("kind").annotate(total=Sum("amount_micros")))
    return int(by_kind.get("settle", 0) + by_kind.get("adjust", 0) - by_kind.get("credit", 0))


@page(Capability.SEE_MONEY)
def statement_file(request: HttpRequest, me: Member, statement_id: uuid.UUID, kind: str) -> HttpResponse:
    """As ``csv`` or ``pdf``."""
    statement = get_object_or_404(Statement, id=statement_id)
    body, content_type, name = documents.statement_file(statement, kind, tenant_name=me.tenant.name)
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return HttpResponse(body, content_type=content_type, headers=headers)


def _names(by: str) -> dict[str, str]:
    """What ids are called."""
    if by == "project":
        return {str(key): name for key, name in Project.objects.values_list("id", "name")}
    if by == "key":
        return {str(row.id): f"{row.name} …{row.last4}" for row in ApiKey.objects.all()}
    return {}


def _row(names: dict[str, str], column: str, sums: Sums) -> Row:
    value = str(sums.group.get(column) or "")
    nameless = documents.CONSOLE if column == Group.KEY.value else "unknown"
    is_charged = bool(sums.group[Group.CHARGED.value])
    return Row(names.get(value, value) or nameless, is_charged, *(getattr(sums, field) for field in _FIELDS))


def _charged_first(place: tuple[str, bool]) -> tuple[str, bool]:
    name, is_charged = place
    return name, not is_charged


def _csv(by: str, rows: list[tuple[str, Row]], with_money: bool) -> HttpResponse:
    fields = _FIELDS if with_money else _FIELDS[:-1]
    out = io.StringIO()
    writer: Any = csv.writer(out)
    writer.writerow(["starts_at", by, "is_charged", *fields])
    for starts_at, row in rows:
        values = (getattr(row, field) for field in ("is_charged", *fields))
        writer.writerow([starts_at, documents.plain(row.name), *values])
    headers = {"Content-Disposition": f'attachment; filename="usage-by-{by}.csv"'}
    return HttpResponse(out.getvalue(), content_type="text/csv; charset=utf-8", headers=headers)
