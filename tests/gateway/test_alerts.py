"""Alerts: which crossed lines are told, once a window each, to whom, and what the page says of them."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.conf import settings
from django.utils import timezone

from billing.alerts import Finding, record
from billing.models import Rollup, UsageRequest
from gateway.admission import new_response_id
from gateway.gate import Gate, Spent
from gateway.money_windows import window_id
from gateway.webhooks import alerts, tasks
from gateway.webhooks import services as webhooks
from gateway.webhooks.models import EVENTS, OPERATORS_EVENTS, Alert, Delivery, Threshold
from scheduler_engine.policy import gpu_classes
from tenants import selectors, services
from tenants.models import QuotaPolicy
from tenants.roles import Role
from tests.gateway.test_webhooks import URL, House, Receiver
from wire.redis_bus import connect
from wire.redis_keys import Keys

NOON = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)


class Till:
    """In the gate's place: what a test says was spent, whatever the window."""

    def __init__(self, settled_micros: int = 0, refused_ms: int | None = None) -> None:
        self.spent_now = Spent(settled_micros, 0, refused_ms)
        self.asked: list[tuple[str, str, str]] = []

    def spent(self, windows: Sequence[tuple[str, str, str]]) -> list[Spent]:
        self.asked += windows
        return [self.spent_now for _ in windows]


@pytest.fixture
def house(transactional_db: None) -> House:
    return House()


def quota(house: House) -> QuotaPolicy:
    return QuotaPolicy.objects.get(tenant=house.tenant, priority_class="default")


def budget(house: House, micros: int, window: Any = "month") -> None:
    policy = replace(selectors.tenant_class_policy(quota(house)), money_micros=micros, money_window=window)
    services.save_quota(actor="tests", policy=policy)


def draw(house: House, measure: str, amount: int) -> None:
    webhooks.draw(actor="tests", tenant=house.tenant, priority_class="default", measure=measure, amount=amount)


def told() -> list[tuple[str, str, dict[str, Any]]]:
    return [(one.event, one.subject, one.data) for one in Alert.objects.order_by("id")]


def test_a_line_across_a_budget_is_told_once_a_window(house: House) -> None:
    budget(house, 1_000)
    draw(house, "money", 80)
    draw(house, "money", 100)
    for settled in (799, 810, 950):
        alerts.find(NOON, Till(settled))
    (first,) = told()
    data = {"class": "default", "window": "2026-11", "measure": "money", "threshold_percent": 80, "used_percent": 81}
    assert first == ("quota.threshold", "default 2026-11 80 percent", data)
    alerts.find(NOON, Till(1_000))
    alerts.find(NOON + timedelta(days=1), Till(900))
    assert [subject for _, subject, _ in told()[1:]] == ["default 2026-11 100 percent", "default 2026-12 80 percent"]


def test_the_window_is_the_one_that_the_door_counts_in(house: House) -> None:
    budget(house, 1_000, window="day")
    till = Till()
    alerts.find(NOON, till)
    zone, now_ms = ZoneInfo(house.tenant.timezone), int(NOON.timestamp() * 1_000)
    expected = window_id(selectors.tenant_class_policy(quota(house)), zone, now_ms)
    assert till.asked == [(str(house.tenant.id), "default", expected)]


def test_a_first_refusal_for_money_is_an_exhausted_budget_once(house: House) -> None:
    budget(house, 1_000)
    at_ms = int(NOON.timestamp() * 1_000)
    for settled in (940, 960):
        alerts.find(NOON + timedelta(minutes=1), Till(settled, refused_ms=at_ms))
    data = {"class": "default", "window": "2026-11", "used_percent": 94}
    assert told() == [("budget.exhausted", "default 2026-11", data)]
    assert Alert.objects.get().happened_at == NOON


def test_tokens_of_the_window_are_counted_and_those_before_it_are_not(house: House) -> None:
    draw(house, "tokens", 1_000)
    sums = {"num_requests": 1, "cached_tokens": 0, "cost_micros": 0, "priority_class": "default", "model": "m"}
    day = datetime(2026, 11, 1, tzinfo=UTC)
    for hour, tokens in ((day - timedelta(hours=30), 5_000), (day + timedelta(days=2), 499)):
        Rollup.objects.create(tenant=house.tenant, hour=hour, prompt_tokens=tokens, output_tokens=tokens, **sums)
    alerts.find(NOON, Till())
    assert told() == []
    lost = {**sums, "prompt_tokens": 700, "output_tokens": 700, "is_charged": False}
    Rollup.objects.create(tenant=house.tenant, hour=NOON, **lost)  # a quota gives back what is not charged
    alerts.find(NOON, Till())
    assert told() == []
    Rollup.objects.create(tenant=house.tenant, hour=NOON, prompt_tokens=1, output_tokens=1, **sums)
    alerts.find(NOON, Till())
    ((event, subject, data),) = told()
    assert (event, subject) == ("quota.threshold", "default 2026-11 1000 tokens")
    assert (data["threshold_tokens"], data["used_tokens"]) == (1_000, 1_000)


@pytest.mark.parametrize(("num", "num_late", "is_told"), [(19, 19, False), (20, 1, False), (20, 2, True)])
def test_a_class_that_misses_its_target_is_told_when_p95_is_above_it(
    house: House, num: int, num_late: int, is_told: bool
) -> None:
    services.save_class(actor="tests", policy=gpu_classes()[0])
    target_ms = gpu_classes()[0].ttft_target_ms
    assert target_ms is not None
    began_ms = int(NOON.timestamp() * 1_000) - 60_000
    for index in range(num):
        UsageRequest.objects.create(
            id=uuid.UUID(new_response_id(began_ms, index.to_bytes(10, "big"))),
            tenant=house.tenant,
            priority_class="interactive",
            state="completed",
            ended_at=NOON,
            ttft_us=target_ms * 1_000 + (1 if index < num_late else 0),
        )
    for _ in range(2):
        alerts.find(NOON, Till())
    data = {"class": "interactive", "window": "2026-11-30T12:00Z", "ttft_target_ms": target_ms}
    expected = ("class.sla_breach", "interactive 2026-11-30T12:00Z", {**data, "calls": num, "late_calls": num_late})
    assert told() == ([expected] if is_told else [])


def test_an_alert_is_told_by_the_webhooks_until_it_is_heard(house: House) -> None:
    now = timezone.now()
    budget(house, 1_000)
    alerts.find(now, Till(1_000, refused_ms=int(now.timestamp() * 1_000) + 1))
    receiver = Receiver(500, 500)
    for _ in range(3):
        tasks.announce(now)
        tasks.deliver(now, receiver)
        now += timedelta(minutes=1)
    bodies = [json.loads(body) for _, body, _ in receiver.sent if b"budget.exhausted" in body]
    assert len(bodies) == 2
    assert (bodies[0]["type"], bodies[0]["data"]["class"]) == ("budget.exhausted", "default")


def test_an_edit_of_the_policy_is_told_to_the_tenants_it_is_about(house: House) -> None:
    nova = House("nova")
    budget(house, 5_000)
    tasks.announce(timezone.now())
    edits = Delivery.objects.filter(event="policy.changed")
    (one,) = edits.filter(payload__data__changes__0__field="money_micros")
    assert one.endpoint_id == house.endpoint.id
    assert one.payload["data"]["changes"] == [
        {"class": "default", "field": "money_micros", "before": None, "after": 5_000}
    ]
    services.save_class(actor="tests", policy=replace(gpu_classes()[2], floor_percent=7))
    tasks.announce(timezone.now())
    everybody = edits.filter(payload__data__changes__0__field="floor_percent")
    assert {each.endpoint_id for each in everybody} == {house.endpoint.id, nova.endpoint.id}


def test_a_finding_about_the_books_is_told_to_the_operators_alone(house: House, monkeypatch: Any) -> None:
    nova = House("nova")
    monkeypatch.setattr(settings, "RUBATO_OPERATOR_TENANT", "nova")
    assert webhooks.events_for(nova.tenant) == (*EVENTS, *OPERATORS_EVENTS)
    assert webhooks.events_for(house.tenant) == EVENTS
    theirs = webhooks.add(actor="tests", tenant=nova.tenant, url=URL, events=["reconcile.mismatch"])
    record([Finding("books", "books_differ", "engine - ledger: output 3")])
    tasks.announce(timezone.now())
    (one,) = Delivery.objects.filter(event="reconcile.mismatch")
    assert one.endpoint_id == theirs.id
    assert one.payload["data"]["reason"] == "books_differ"


def test_the_page_draws_a_line_and_shows_how_near_it_is(house: House, valkey_url: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(settings, "REDIS_URL", valkey_url)
    budget(house, 1_000)
    client = house.person(Role.DEVELOPER)
    form = {"priority_class": "default", "measure": "money", "amount": "50"}
    assert client.post(house.at("alerts"), form).status_code == 302
    refused = client.post(house.at("alerts"), {**form, "amount": "101"}).content.decode()
    assert "a percentage of the budget lies between 1 and 100" in refused
    assert "this one is there already" in client.post(house.at("alerts"), form).content.decode()
    now_ms = int(timezone.now().timestamp() * 1_000)
    window = window_id(selectors.tenant_class_policy(quota(house)), ZoneInfo(house.tenant.timezone), now_ms)
    name = Keys(settings.RUBATO_REDIS_PREFIX).money(str(house.tenant.id), "default", window)
    with connect(valkey_url) as redis:
        redis.hset(name, "settled", 250)
    assert "50 % of the way" in client.get(house.at("alerts")).content.decode()
    with connect(valkey_url) as redis:
        redis.hset(name, mapping={"settled": 950, "refused_ms": now_ms})
    early = client.get(house.at("alerts")).content.decode()
    assert "<b>crossed</b> <small>just now: it stands under" in early
    with Gate(valkey_url, Keys(settings.RUBATO_REDIS_PREFIX)) as gate:
        alerts.find(timezone.now(), gate)
    tasks.announce(timezone.now())
    shown = client.get(house.at("alerts")).content.decode()
    assert "<b>crossed</b>" in shown
    assert "just now" not in shown
    assert "a call was refused at 95 % settled" in shown
    assert "1 on its way" in shown
    line = Threshold.objects.get()
    House("stranger").person(Role.OWNER).post(f"/console/stranger/alerts/{line.id}/remove")
    assert Threshold.objects.exists()
    client.post(house.at(f"alerts/{line.id}/remove"))
    assert not Threshold.objects.exists()
