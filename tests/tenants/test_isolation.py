"""Stranger sees nothing of the others: row-level security, tried from the outside."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from django.apps import apps
from django.db import DatabaseError, connection, connections, transaction
from django.utils import timezone

from billing import ledger
from billing.messages import Settlement
from billing.models import LedgerEntry, Rollup, UsageRequest
from billing.pricing import Terminal, TokenCounts
from gateway.batches import services as batch_services
from gateway.batches.models import Batch, Line, StoredFile
from gateway.batches.services import NewFile, Owner
from gateway.webhooks import services as webhooks
from gateway.webhooks.models import Alert, Delivery, Endpoint, Threshold
from tenants import services
from tenants.isolation import IsolationError, tenant
from tenants.models import ApiKey, AuditEvent, Project, QuotaPolicy, Tenant

OF_TENANTS = [
    *(Tenant, Project, ApiKey, QuotaPolicy, AuditEvent, UsageRequest, LedgerEntry, Rollup),
    *(StoredFile, Batch, Line),
    *(Endpoint, Delivery, Threshold, Alert),
]
ROLES = {"default": "app_ops", "tenant": "app_rw", "owner": "app_owner"}


@pytest.fixture
def two_tenants(transactional_db: None) -> dict[str, uuid.UUID]:
    """Committed, so that the other role's connection can see them."""
    found = {}
    for slug in ("aurora", "stranger"):
        made = services.create_tenant(actor="tests", slug=slug, name=slug.title())
        project = services.create_project(actor="tests", tenant=made, name="main")
        services.issue_key(actor="tests", project=project, name="first", env="test")
        ledger.apply([_usage(made.id, project.id)])
        _make_batch(made.id, project.id)
        endpoint = webhooks.add(actor="tests", tenant=made, url="https://aurora.example/", events=["key.revoked"])
        Delivery.objects.create(tenant=made, endpoint=endpoint, event="key.revoked", subject="k", payload={})
        webhooks.draw(actor="tests", tenant=made, priority_class="batch", measure="tokens", amount=1)
        Alert.objects.create(tenant=made, event="quota.threshold", subject="s", data={}, happened_at=timezone.now())
        found[slug] = made.id
    return found


def _make_batch(tenant_id: uuid.UUID, project_id: uuid.UUID) -> None:
    content = NewFile(storage_name=uuid.uuid4().hex, filename="in", num_bytes=1, purpose="batch", lifetime_s=60)
    owner = Owner(tenant_id=tenant_id, project_id=project_id, key_id=uuid.uuid4(), key_public_id="x" * 12)
    file = batch_services.keep_file(owner=owner, file=content, limit_bytes=10_000)
    batch = batch_services.create_batch(
        owner=owner, endpoint="/v1/chat/completions", input_file_id=file.id, completion_window="24h"
    )
    Line.objects.create(tenant_id=tenant_id, batch=batch, number=1, custom_id="a", start=0, num_bytes=1)


def _usage(tenant_id: uuid.UUID, project_id: uuid.UUID) -> Settlement:
    return Settlement(
        operation_id=uuid.uuid4(),
        attempt=1,
        tenant_id=tenant_id,
        project_id=project_id,
        key_id=project_id,
        priority_class="default",
        model="m",
        counts=TokenCounts(prompt=1, output=1),
        terminal=Terminal.COMPLETED,
        policy_version=0,
        price_version=0,
    )


def owners(model: Any) -> set[uuid.UUID]:
    column = "id" if model is Tenant else "tenant_id"
    return set(model.objects.using("tenant").order_by().values_list(column, flat=True))


@pytest.mark.parametrize("model", OF_TENANTS)
def test_stranger_sees_its_own_rows_and_no_other(two_tenants: dict[str, uuid.UUID], model: Any) -> None:
    with tenant(two_tenants["stranger"]):
        assert owners(model) == {two_tenants["stranger"]}


@pytest.mark.parametrize("model", OF_TENANTS)
def test_outside_of_a_tenant_nothing_is_seen(two_tenants: dict[str, uuid.UUID], model: Any) -> None:
    assert owners(model) == set()


def test_a_forgotten_filter_on_a_foreign_id_finds_nothing(two_tenants: dict[str, uuid.UUID]) -> None:
    with tenant(two_tenants["stranger"]):
        assert not Project.objects.using("tenant").filter(tenant_id=two_tenants["aurora"]).exists()


def test_the_tenant_is_left_with_the_block_even_inside_a_longer_transaction(two_tenants: dict[str, uuid.UUID]) -> None:
    with transaction.atomic("tenant"):
        with tenant(two_tenants["aurora"]):
            assert owners(Project) == {two_tenants["aurora"]}
        assert owners(Project) == set()
        with tenant(two_tenants["stranger"]):
            assert owners(Project) == {two_tenants["stranger"]}


def test_the_tenant_is_left_after_an_error_too(two_tenants: dict[str, uuid.UUID]) -> None:
    with transaction.atomic("tenant"):
        with pytest.raises(ZeroDivisionError), tenant(two_tenants["aurora"]):
            raise ZeroDivisionError
        assert owners(Project) == set()


def test_nobody_stands_in_two_tenants_at_once(two_tenants: dict[str, uuid.UUID]) -> None:
    with pytest.raises(IsolationError), tenant(two_tenants["aurora"]), tenant(two_tenants["stranger"]):
        pass


@pytest.mark.parametrize("table", ["tenants_policyversion", "billing_ledgeralert", "auth_user", "django_session"])
def test_tables_of_the_house_are_closed_to_the_tenants_role(two_tenants: dict[str, uuid.UUID], table: str) -> None:
    with pytest.raises(DatabaseError, match="permission denied"), tenant(two_tenants["stranger"]):
        connections["tenant"].cursor().execute(f"SELECT * FROM {table}")


def test_the_tenants_role_writes_nothing_of_the_operators(two_tenants: dict[str, uuid.UUID]) -> None:
    with pytest.raises(DatabaseError, match="permission denied"), tenant(two_tenants["stranger"]):
        Tenant.objects.using("tenant").update(name="mine")


def test_the_tenants_role_writes_no_line_and_no_answer(two_tenants: dict[str, uuid.UUID]) -> None:
    with pytest.raises(DatabaseError, match="permission denied"), tenant(two_tenants["stranger"]):
        Line.objects.using("tenant").update(custom_id="mine")
    with pytest.raises(DatabaseError, match="permission denied"), tenant(two_tenants["stranger"]):
        Batch.objects.using("tenant").update(num_completed=1)


def test_a_batch_in_another_tenants_name_is_refused_by_the_database(two_tenants: dict[str, uuid.UUID]) -> None:
    project_id = Project.objects.get(tenant_id=two_tenants["aurora"]).id
    with pytest.raises(DatabaseError, match="row-level security"), tenant(two_tenants["stranger"]):
        StoredFile.objects.using("tenant").create(
            tenant_id=two_tenants["aurora"],
            project_id=project_id,
            purpose="batch",
            filename="x",
            num_bytes=1,
            storage_name=uuid.uuid4().hex,
        )


def test_every_table_with_a_tenant_stands_behind_a_forced_policy(db: None) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname, relrowsecurity AND relforcerowsecurity,"
            "       (SELECT array_agg(polname::text ORDER BY polname) FROM pg_policy WHERE polrelid = pg_class.oid"
            "         AND NOT (polcmd = 'a' AND polroles = ARRAY['app_owner'::regrole::oid]))"  # by a trigger's hand
            " FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attname = 'tenant_id' AND NOT attisdropped"
            " WHERE relkind IN ('r', 'p') AND relnamespace = 'public'::regnamespace"
        )
        found = {name: (forced, policies) for name, forced, policies in cursor.fetchall()}
    with_tenant = {
        model._meta.db_table
        for model in apps.get_models()
        if any(field.column == "tenant_id" for field in model._meta.concrete_fields)
    }
    assert set(found) == with_tenant
    assert {name for name, walls in found.items() if walls != (True, ["all_rows", "own_rows"])} == set()


def test_the_tenants_role_reads_only_walled_tables_and_prices(db: None) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relname FROM pg_class WHERE relkind IN ('r', 'p', 'v', 'm') AND NOT relrowsecurity"
            " AND relnamespace = 'public'::regnamespace AND has_table_privilege('app_rw', oid, 'SELECT')"
        )
        assert {name for (name,) in cursor.fetchall()} == {"billing_price", "billing_priceversion"}


def test_none_of_the_three_roles_is_above_the_walls(db: None) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT rolname, rolsuper, rolbypassrls FROM pg_roles WHERE rolname LIKE 'app\\_%%'", [])
        assert sorted(cursor.fetchall()) == [(role, False, False) for role in sorted(ROLES.values())]


@pytest.mark.parametrize(("alias", "role"), ROLES.items())
def test_each_alias_is_its_own_role(db: None, alias: str, role: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT current_user, session_user")
        assert cursor.fetchone() == (role, role)
