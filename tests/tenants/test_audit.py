"""The audit trail: written by the database for every change, whoever makes it and however."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, connection, transaction

from billing import services as billing_services
from billing.pricing import TokenPrices
from scheduler_engine.policy import PriorityClass as ClassName
from tenants import audit, members, selectors, services
from tenants.isolation import tenant
from tenants.models import ApiKey, AuditEvent, QuotaPolicy
from tenants.roles import Role


def events(object_type: str) -> list[AuditEvent]:
    return list(AuditEvent.objects.filter(object_type=object_type).order_by("id"))


def last(object_type: str) -> AuditEvent:
    return events(object_type)[-1]


def test_a_service_signs_what_it_changes(aurora: Any) -> None:
    (cell,) = QuotaPolicy.objects.filter(tenant=aurora.tenant, priority_class="default")
    cell.weight = 7
    with audit.request("req_1", reason="asked by mail"):
        services.save_quota(actor="ann", policy=selectors.tenant_class_policy(cell))
    event = last("quotapolicy")
    assert (event.actor, event.request_id, event.reason) == ("ann", "req_1", "asked by mail")
    assert (event.before, event.after) == ({"weight": 1}, {"weight": 7})
    assert event.tenant_id == aurora.tenant.id


def test_a_bulk_edit_leaves_one_event_a_row(aurora: Any) -> None:
    QuotaPolicy.objects.filter(tenant=aurora.tenant).update(weight=9)
    changed = [event for event in events("quotapolicy") if event.action == "update"]
    assert [event.after for event in changed] == [{"weight": 9}] * 3


def test_raw_sql_is_on_record_with_the_role_that_ran_it(aurora: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute("UPDATE tenants_priorityclass SET floor_percent = 1 WHERE label = 'batch'")
    event = last("priorityclass")
    assert (event.actor, event.object_id, event.after) == ("sql:app_ops", "batch", {"floor_percent": 1})


def test_an_update_that_changes_nothing_leaves_no_event(aurora: Any) -> None:
    before = AuditEvent.objects.count()
    QuotaPolicy.objects.update(weight=1)
    assert AuditEvent.objects.count() == before


def test_no_digest_of_a_secret_is_ever_on_record(aurora: Any) -> None:
    services.rotate_key(actor="ann", key_id=aurora.key.key.id, env="test", grace=timedelta(hours=1))
    members.invite(actor="ann", tenant=aurora.tenant, email="bob@aurora.example", role=Role.ADMIN)
    text = str(list(AuditEvent.objects.values("before", "after")))
    key = ApiKey.objects.get(id=aurora.key.key.id)
    assert not [secret for secret in (key.secret_sha256, key.previous_sha256, "token_sha256") if secret in text]
    assert "rotated_at" in last("apikey").after


def test_using_a_key_is_no_change(aurora: Any) -> None:
    before = AuditEvent.objects.count()
    ApiKey.objects.update(last_used_at="2026-11-29T12:00:00Z")
    assert AuditEvent.objects.count() == before


def test_prices_and_policy_versions_are_on_record(aurora: Any) -> None:
    prices = {("m", "default"): TokenPrices(prompt=1, cached=1, output=1)}
    version = billing_services.set_prices(actor="ann", prices=prices)
    assert (last("priceversion").object_id, last("priceversion").actor) == (str(version.version), "ann")
    assert len(events("price")) == 3
    assert last("policyversion").actor == "ann"


@pytest.mark.parametrize("attempt", ["UPDATE tenants_auditevent SET actor = 'x'", "DELETE FROM tenants_auditevent"])
def test_the_trail_itself_cannot_be_edited(aurora: Any, attempt: str) -> None:
    with pytest.raises(DatabaseError, match="permission denied"), transaction.atomic():
        connection.cursor().execute(attempt)


def test_nobody_changes_nothing() -> None:
    with pytest.raises(ValueError, match="has an actor"), audit.change_by(""):
        pass


def test_behind_the_wall_a_tenant_writes_and_reads_its_own_trail(transactional_db: None) -> None:
    made = {slug: services.create_tenant(actor="tests", slug=slug, name=slug) for slug in ("aurora", "stranger")}
    with tenant(made["aurora"].id):
        services.create_project(actor="ann", tenant=made["aurora"], name="web", default_class=ClassName.DEFAULT)
        assert last("project").actor == "ann"
    with tenant(made["stranger"].id):
        assert events("project") == []
        assert {event.tenant_id for event in AuditEvent.objects.all()} == {made["stranger"].id}


def test_a_signature_ends_with_its_change_even_inside_a_longer_transaction(aurora: Any) -> None:
    with audit.change_by("ann"):
        with audit.change_by("bob"):
            QuotaPolicy.objects.update(weight=2)
        assert last("quotapolicy").actor == "bob"
        QuotaPolicy.objects.update(weight=3)
    assert last("quotapolicy").actor == "ann"
