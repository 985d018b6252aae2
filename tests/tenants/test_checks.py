"""What only the database checks is refused in its own words, at the price of one query a row."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection
from django.test.utils import CaptureQueriesContext

from scheduler_engine.policy import PriorityClass, TenantClassPolicy, gpu_classes
from tenants import services
from tenants.checks import SENT_BEFORE, checked_by_the_database
from tenants.models import Project, QuotaPolicy, Tenant
from tenants.models.policy import NOT_LOWER

pytestmark = pytest.mark.django_db


@pytest.fixture
def tenant() -> Tenant:
    return services.create_tenant(actor="tests", slug="aurora", name="Aurora")


def cell(tenant: Tenant, **changes: Any) -> TenantClassPolicy:
    return TenantClassPolicy(tenant_id=str(tenant.id), priority_class=PriorityClass.DEFAULT, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overflow_to": PriorityClass.INTERACTIVE}, NOT_LOWER),
        ({"default_max_tokens": 9, "max_tokens_cap": 8}, "cap"),
    ],
)
def test_a_cell_whose_numbers_do_not_fit_together_is_refused_in_words(
    tenant: Tenant, changes: dict[str, Any], words: str
) -> None:
    before = QuotaPolicy.objects.filter(tenant=tenant).values()
    with pytest.raises(ValidationError, match=words):
        services.write_rows(cells=[cell(tenant, **changes)])
    assert list(QuotaPolicy.objects.filter(tenant=tenant).values()) == list(before)


def test_a_row_that_is_there_is_refused_as_the_model_s_own_check_would(tenant: Tenant) -> None:
    for column in ({"slug": "aurora"}, {"id": tenant.id, "slug": "other"}):
        with pytest.raises(ValidationError) as refusal, checked_by_the_database(Tenant, "default"):
            Tenant.objects.create(name="another", **column)
        words = "Tenant with this Slug already exists." if "id" not in column else SENT_BEFORE
        assert refusal.value.messages == [words]
    project = Project.objects.create(tenant=tenant, name="web", created_by="tests")
    with pytest.raises(ValidationError) as refusal, checked_by_the_database(Project, "default"):
        Project.objects.create(tenant=tenant, name=project.name, created_by="tests")
    assert refusal.value.messages == ["Project with this Tenant and Name already exists."]


def test_a_class_whose_numbers_do_not_fit_together_is_refused_in_words() -> None:
    (one, *_) = gpu_classes()
    with pytest.raises(ValidationError, match="chunk min"):
        services.write_rows(classes=[replace(one, chunk_min=one.chunk_max + 1)])


def test_a_refusal_that_is_no_check_of_the_row_stays_what_it_is(tenant: Tenant) -> None:
    with pytest.raises(IntegrityError), checked_by_the_database(QuotaPolicy, "default"):
        Tenant.objects.create(slug="aurora", name="another")


def test_a_row_of_the_matrix_costs_a_handful_of_queries(tenant: Tenant) -> None:
    with CaptureQueriesContext(connection) as captured:
        services.write_rows(cells=[cell(tenant, weight=2)])
    assert len(captured) <= 8
