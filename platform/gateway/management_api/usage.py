"""Usage, costs, exports and statements of one tenant, in OpenAI's organization-usage shape where it has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from django.conf import settings
from django.http import HttpResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404
from django.utils import timezone
from drf_spectacular.utils import OpenApiParameter
from rest_framework import exceptions
from rest_framework.request import Request
from rest_framework.response import Response

from billing import documents
from billing.models import Statement, UsageRequest
from billing.usage import Bucket, Cost, Filter, Group, Part, Sums, Width, buckets, costs
from gateway.downloads import Pieces, spooled
from gateway.management_api.schema import PAGED, answers, answers_any, query
from gateway.management_api.shapes import (
    CostResult,
    StatementShape,
    UsageResult,
    WholeStatementShape,
    buckets_of,
    listing,
)
from gateway.management_api.views import View, limit_of, page
from tenants.isolation import ALIAS
from tenants.models import Tenant
from tenants.roles import Capability

WIDTHS = {"1m": Width.MINUTE, "1h": Width.HOUR, "1d": Width.DAY}
DEFAULT_BUCKETS = {"1m": 60, "1h": 24, "1d": 7}
GROUPS = {"project_id": Group.PROJECT, "api_key_id": Group.KEY, "model": Group.MODEL, "service_tier": Group.CLASS}
CHARGED = "charged"
USAGE_GROUPS = {**GROUPS, CHARGED: Group.CHARGED}
LINE_ITEM = "line_item"
COST_GROUPS = [*GROUPS, LINE_ITEM]
TIERS = {"interactive": "priority", "default": "default", "batch": "flex"}
_CLASSES = {tier: label for label, tier in TIERS.items()}
EXPORTS = ("csv", "ndjson", "cloudevents")
EXPORT_CHUNK = 1_000
_MOMENT = {"type": "integer", "minimum": 0, "maximum": 99_999_999_999}
SPAN = [query("start_time", _MOMENT, "Unix seconds"), query("end_time", _MOMENT, "Unix seconds, not within; now")]
_TEXTS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "string", "format": "uuid"}}
BUCKETED = [
    query("start_time", _MOMENT, "Unix seconds of the first bucket", required=True),
    query("end_time", _MOMENT, "Unix seconds, not within; now"),
    query("bucket_width", {"type": "string", "enum": list(WIDTHS), "default": "1d"}, "how long a bucket is"),
    query("limit", {"type": "integer", "minimum": 1}, "buckets a page: up to 1440, 168 or 31"),
    query("page", {"type": "string", "pattern": "^page_[0-9]{1,11}$"}, "the next_page of an answer before"),
    query("project_ids", _IDS, "of these alone"),
    query("api_key_ids", _IDS, "of these alone"),
    query("models", _TEXTS, "of these alone"),
    query("service_tiers", {"type": "array", "items": {"type": "string", "enum": list(_CLASSES)}}, "of these alone"),
]


def _group_by(names: Sequence[str]) -> OpenApiParameter:
    return query("group_by", {"type": "array", "items": {"type": "string", "enum": list(names)}}, "one result for each")


def _format_of(names: Sequence[str]) -> OpenApiParameter:
    return query("format", {"type": "string", "enum": list(names), "default": names[0]}, "the answer's form")


_FIRST, _LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


class CompletionsUsage(View):
    """``/v1/organization/usage/completions``: tokens and requests, all that were used. ``group_by=charged`` tells apart
    those that the price list was applied to.
    """

    needs = {"GET": Capability.SEE_USAGE}

    @answers(buckets_of(UsageResult), asks=[*BUCKETED, _group_by(list(USAGE_GROUPS))])
    def get(self, request: Request) -> Response:
        groups = _groups(request, list(USAGE_GROUPS))
        read = partial(buckets, tenant_id=self.principal.tenant_id, groups=groups)
        return Response(_answer(request, read, _usage_result))


class Costs(View):
    """``/v1/organization/costs``: what is owed, by day unless asked otherwise: what operations were charged, and the
    adjustments and credits that were written meanwhile. A statement's total is the sum of the costs of its span.
    ``group_by=line_item`` tells the three apart. An adjustment stands in the groups of its operation, a credit in none.
    """

    needs = {"GET": Capability.SEE_MONEY}

    @answers(buckets_of(CostResult), asks=[*BUCKETED, _group_by(COST_GROUPS)])
    def get(self, request: Request) -> Response:
        groups, by_line_item = _groups(request, COST_GROUPS), LINE_ITEM in _listed(request, "group_by")
        read = partial(costs, tenant_id=self.principal.tenant_id, groups=groups, by_line_item=by_line_item)
        return Response(_answer(request, read, _cost_result))


class Export(View):
    """``/v1/organization/usage/export``: every ended operation of a span, oldest first."""

    needs = {"GET": Capability.SEE_MONEY}

    @answers_any({(200, "text/csv"): str, (200, "application/x-ndjson"): str}, asks=[_format_of(EXPORTS), *SPAN])
    def get(self, request: Request) -> Any:
        shape = request.query_params.get("format", "csv")
        if shape not in EXPORTS:
            raise _wrong("format", f"must be one of {', '.join(EXPORTS)}")
        starts_at, ends_at = _span(request, timezone.now(), timedelta(days=1))
        lines = _lines(shape, self.principal.tenant_id, starts_at, ends_at)
        content_type = "text/csv; charset=utf-8" if shape == "csv" else "application/x-ndjson"
        ending = "csv" if shape == "csv" else "ndjson"
        return StreamingHttpResponse(
            Pieces(spooled(lines)), content_type=content_type, headers=_named(f"usage.{ending}")
        )


class Statements(View):
    """One for each day with usage, newest first. A day is stated ten minutes after its midnight in the tenant's zone: a
    new tenant's first comes when its first day is over.
    """

    needs = {"GET": Capability.SEE_MONEY}
    elsewhere = {"format": "Each statement is a file by itself: GET /v1/organization/statements/{id}?format=csv."}

    @answers(listing(StatementShape), asks=PAGED)
    def get(self, request: Request) -> Response:
        return page(request, Statement.objects.all(), StatementShape, moment="day")


class OneStatement(View):
    """As JSON; ``?format=csv`` and ``?format=pdf`` are files."""

    needs = {"GET": Capability.SEE_MONEY}

    @answers_any(
        {(200, "application/json"): WholeStatementShape, (200, "text/csv"): str, (200, "application/pdf"): bytes},
        asks=[_format_of(("json", "csv", "pdf"))],
    )
    def get(self, request: Request, statement_id: UUID) -> Any:
        found = get_object_or_404(Statement, id=statement_id)
        match request.query_params.get("format", "json"):
            case "json":
                return Response(WholeStatementShape(found).data)
            case "csv" | "pdf" as kind:
                name = Tenant.objects.get().name
                body, content_type, file_name = documents.statement_file(found, kind, tenant_name=name)
                return HttpResponse(body, content_type=content_type, headers=_named(file_name))
            case _:
                raise _wrong("format", "must be json, csv or pdf")

    def perform_content_negotiation(self, request: Request, force: bool = False) -> Any:
        return super().perform_content_negotiation(request, force=True)  # ``format`` is ours, not DRF's


def _answer(
    request: Request, read: Callable[..., list[Bucket[Part]]], result: Callable[[Part], dict[str, Any]]
) -> dict[str, Any]:
    asked = request.query_params
    name = asked.get("bucket_width", "1d")
    width = WIDTHS.get(name)
    if width is None:
        raise _wrong("bucket_width", f"must be one of {', '.join(WIDTHS)}")
    starts_at, ends_at = _span(request, timezone.now(), None)
    limit = limit_of(request, DEFAULT_BUCKETS[name], width.most)
    first = _page_start(asked.get("page"), width) or width.begin(starts_at)
    last = min(ends_at, first + limit * width.length)
    found = read(starts_at=first, ends_at=last, width=width, only=_filter(request), using=ALIAS)
    has_more = last < ends_at
    return {
        "object": "page",
        "data": [_bucket(one, result) for one in found],
        "has_more": has_more,
        "next_page": f"page_{int(last.timestamp())}" if has_more else None,
    }


def _bucket(bucket: Bucket[Part], result: Callable[[Part], dict[str, Any]]) -> dict[str, Any]:
    return {
        "object": "bucket",
        "start_time": int(bucket.starts_at.timestamp()),
        "end_time": int(bucket.ends_at.timestamp()),
        "results": [result(part) for part in bucket.parts],
    }


def _usage_result(sums: Sums) -> dict[str, Any]:
    return {
        "object": "organization.usage.completions.result",
        "input_tokens": sums.prompt_tokens,
        "output_tokens": sums.output_tokens,
        "input_cached_tokens": sums.cached_tokens,
        "input_audio_tokens": 0,
        "output_audio_tokens": 0,
        "num_model_requests": sums.num_requests,
        "num_downgraded_requests": sums.num_downgraded,
        "user_id": None,
        "batch": None,
        "charged": sums.group.get(Group.CHARGED.value),
        **_grouped(sums.group),
    }


def _cost_result(cost: Cost) -> dict[str, Any]:
    """``amount.value`` is a decimal number of whole units; ``cost_micros`` is what the ledger holds."""
    return {
        "object": "organization.costs.result",
        "amount": {"value": cost.amount_micros / 1_000_000, "currency": settings.RUBATO_CURRENCY},
        "cost_micros": cost.amount_micros,
        "line_item": cost.line_item,
        **_grouped(cost.group),
    }


def _grouped(group: Mapping[str, object]) -> dict[str, Any]:
    """Null where it was not asked for, and where there is none: a credit belongs to no project, key, model or tier."""
    values = {name: str(group.get(column.value) or "") or None for name, column in GROUPS.items()}
    label = values["service_tier"]
    return values | {"service_tier": None if label is None else TIERS[label]}


def _span(request: Request, now: datetime, default: timedelta | None) -> tuple[datetime, datetime]:
    """[start_time, end_time) in Unix seconds; ``start_time`` is needed where there is no default length."""
    ends_at = _moment(request, "end_time") or now
    starts_at = _moment(request, "start_time") or (ends_at - default if default else None)
    if starts_at is None:
        raise exceptions.ValidationError(
            {"start_time": ["Give the Unix seconds of the first bucket."]}, code="required"
        )
    if starts_at >= ends_at:
        raise _wrong("start_time", "must lie before end_time")
    return starts_at, ends_at


def _moment(request: Request, name: str) -> datetime | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 11):
        raise _wrong(name, "must be a moment in Unix seconds")
    return min(max(datetime.fromtimestamp(int(text), UTC), _FIRST), _LAST)


def _page_start(text: str | None, width: Width) -> datetime | None:
    if text is None:
        return None
    seconds = text.removeprefix("page_")
    if not (text.startswith("page_") and seconds.isascii() and seconds.isdigit() and len(seconds) <= 11):
        raise _wrong("page", "must be a next_page of an answer before")
    return width.begin(min(max(datetime.fromtimestamp(int(seconds), UTC), _FIRST), _LAST))


def _groups(request: Request, known: Sequence[str]) -> list[Group]:
    names = _listed(request, "group_by")
    if unknown := [name for name in names if name not in known]:
        raise _wrong("group_by", f"{unknown[0][:64]!r} is not known; known are {', '.join(known)}")
    return [group for name, group in USAGE_GROUPS.items() if name in names]


def _filter(request: Request) -> Filter:
    tiers = _listed(request, "service_tiers")
    if unknown := [tier for tier in tiers if tier not in _CLASSES]:
        raise _wrong("service_tiers", f"{unknown[0][:64]!r} is not known; known are {', '.join(_CLASSES)}")
    return Filter(
        project_ids=_ids(request, "project_ids"),
        key_ids=_ids(request, "api_key_ids"),
        models=_listed(request, "models"),
        classes=[_CLASSES[tier] for tier in tiers],
    )


def _ids(request: Request, name: str) -> list[UUID]:
    try:
        return [UUID(text) for text in _listed(request, name)]
    except ValueError as error:
        raise _wrong(name, "must be ids of ours") from error


def _listed(request: Request, name: str) -> list[str]:
    """``name=a&name=b`` and ``name[]=a``: clients write both."""
    return [*request.query_params.getlist(name), *request.query_params.getlist(f"{name}[]")]


def _lines(shape: str, tenant_id: UUID, starts_at: datetime, ends_at: datetime) -> Iterator[str]:
    ended = UsageRequest.objects.filter(tenant_id=tenant_id, ended_at__gte=starts_at, ended_at__lt=ends_at)
    rows = ended.order_by("ended_at", "id").iterator(chunk_size=EXPORT_CHUNK)
    if shape == "csv":
        return documents.usage_csv(rows)
    if shape == "ndjson":
        return documents.usage_ndjson(rows)
    return documents.usage_cloudevents(rows, source=settings.RUBATO_EVENT_SOURCE)


def _named(file_name: str) -> dict[str, str]:
    """So that a browser, or ``curl -OJ``, keeps it under this name."""
    return {"Content-Disposition": f'attachment; filename="{file_name}"'}


def _wrong(name: str, words: str) -> exceptions.ValidationError:
    return exceptions.ValidationError({name: [words]})
