"""What the management API says of usage and money: usage, costs, exports, statements."""

from __future__ import annotations

import csv
import io
import json
from datetime import timedelta
from itertools import pairwise
from typing import Any

import pytest
from django.utils import timezone
from openai.types.admin.organization import UsageCompletionsResponse

from billing import services as billing_services
from billing.models import LedgerEntry, Statement
from billing.pricing import Terminal
from tests.gateway.management_world import House, as_owner, error, open_houses, whole


@pytest.fixture
def aurora(transactional_db: None, settings: Any) -> House:
    return open_houses(settings)["aurora"]


def test_a_list_of_statements_says_where_files_are_had(aurora: House) -> None:
    refused = error(as_owner(aurora, "GET", "statements?format=csv"))
    assert refused["code"] == "unknown_parameter"
    assert "/v1/organization/statements/{id}?format=csv" in refused["message"]


def test_usage_and_costs_say_what_the_ledger_says(aurora: House) -> None:
    start = int((timezone.now() - timedelta(hours=2)).timestamp())
    route = f"?start_time={start}&bucket_width=1h&group_by[]=project_id&group_by=service_tier"
    used = as_owner(aurora, "GET", f"usage/completions{route}").json()
    (result,) = [one for bucket in used["data"] for one in bucket["results"]]
    assert (result["input_tokens"], result["output_tokens"], result["num_model_requests"]) == (3, 2, 1)
    assert (result["project_id"], result["service_tier"], result["model"]) == (str(aurora.project.id), "default", None)
    paid = as_owner(aurora, "GET", f"costs{route}").json()
    (cost,) = [one for bucket in paid["data"] for one in bucket["results"]]
    assert (cost["cost_micros"], cost["amount"]["value"]) == (7, 0.000007)


def test_costs_hold_the_corrections_and_tell_them_apart_when_asked(aurora: House) -> None:
    (charged,) = LedgerEntry.objects.filter(tenant_id=aurora.tenant.id, kind="settle")
    billing_services.adjust(actor="tests", operation_id=charged.operation_id, amount_micros=-3, reason="too much")
    billing_services.credit(actor="tests", tenant_id=aurora.tenant.id, amount_micros=6, reason="late")
    start = int((timezone.now() - timedelta(days=1)).timestamp())

    def told(asked: str = "") -> list[dict[str, Any]]:
        page = as_owner(aurora, "GET", f"costs?start_time={start}{asked}").json()
        return [one for bucket in page["data"] for one in bucket["results"]]

    assert sum(one["cost_micros"] for one in told()) == 7 - 3 - 6
    by_item = {one["line_item"]: one["cost_micros"] for one in told("&group_by=line_item")}
    assert by_item == {"usage": 7, "adjustment": -3, "credit": -6}
    by_tier = {one["service_tier"]: one["amount"]["value"] for one in told("&group_by=service_tier")}
    assert by_tier == {"default": 0.000004, None: -0.000006}
    assert {one["line_item"] for one in told("&group_by=service_tier")} == {None}


def test_usage_tells_apart_what_was_charged_when_asked(aurora: House) -> None:
    start = int((timezone.now() - timedelta(days=1)).timestamp())

    def told(asked: str = "") -> list[tuple[Any, int]]:
        page = as_owner(aurora, "GET", f"usage/completions?start_time={start}{asked}").json()
        UsageCompletionsResponse.model_validate(page)  # what openai's client takes
        return [(one["charged"], one["input_tokens"]) for bucket in page["data"] for one in bucket["results"]]

    aurora.spend(Terminal.EXPIRED)
    assert told() == [(None, 6)]
    assert sorted(told("&group_by=charged")) == [(False, 3), (True, 3)]
    refused = error(as_owner(aurora, "GET", "costs?start_time=1&group_by=charged"))
    assert (refused["code"], refused["param"]) == ("invalid_request", "group_by")


def test_usage_has_no_line_items(aurora: House) -> None:
    refused = error(as_owner(aurora, "GET", "usage/completions?start_time=1&group_by=line_item"))
    assert (refused["code"], refused["param"]) == ("invalid_request", "group_by")


def test_a_long_span_comes_in_pages_that_meet(aurora: House) -> None:
    end = int(timezone.now().timestamp())
    route = f"usage/completions?start_time={end - 10 * 86_400}&end_time={end}&limit=4"
    edges: list[tuple[int, int]] = []
    found = as_owner(aurora, "GET", route).json()
    while True:
        edges += [(bucket["start_time"], bucket["end_time"]) for bucket in found["data"]]
        if not found["has_more"]:
            break
        found = as_owner(aurora, "GET", f"{route}&page={found['next_page']}").json()
    assert all(before[1] == after[0] for before, after in pairwise(edges))
    assert edges[0][0] <= end - 10 * 86_400 < end <= edges[-1][1]


def test_an_export_holds_every_operation_of_the_span(aurora: House) -> None:
    aurora.spend()
    answer = as_owner(aurora, "GET", "usage/export?format=csv")
    rows = list(csv.DictReader(io.StringIO(whole(answer).decode())))
    assert [int(row["cost_micros"]) for row in rows] == [7, 7]
    answer = as_owner(aurora, "GET", "usage/export?format=cloudevents")
    events = [json.loads(line) for line in whole(answer).splitlines()]
    assert {event["subject"] for event in events} == {str(aurora.tenant.id)}
    assert answer["Content-Disposition"] == 'attachment; filename="usage.ndjson"'


@pytest.mark.parametrize(("kind", "start"), [("csv", b"day,"), ("pdf", b"%PDF-"), ("json", b"{")])
def test_a_statement_comes_in_three_shapes(aurora: House, kind: str, start: bytes) -> None:
    answer = as_owner(aurora, "GET", f"statements/{aurora.statement.id}?format={kind}")
    assert answer.content.startswith(start)
    if kind != "json":
        assert answer["Content-Disposition"] == f'attachment; filename="statement-{aurora.statement.day}.{kind}"'
    assert Statement.objects.get(id=aurora.statement.id).total_micros == 7
