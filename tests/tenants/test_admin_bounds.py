"""Numbers the engine would refuse: each form says the range at the field, and nothing is saved."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from billing import services
from billing.models import Price
from billing.pricing import TokenPrices
from tenants import selectors
from tenants.models import QuotaPolicy

DAYS_7 = 7 * 24 * 3_600_000
MATRIX = admin.site._registry[QuotaPolicy].list_editable

BAD_CELLS = [
    ("weight", 2_000_000, "at least 1 and at most 1000000"),
    ("weight", 10**10, "at least 1 and at most 1000000"),
    ("requests_per_minute", 10**16, f"at least 0 and at most {10**15}, or empty"),
    ("tokens_per_minute", 2**63 - 1, f"at least 0 and at most {10**15}, or empty"),
    ("tokens_per_minute", 10**30, "less than or equal to"),  # no row could hold it, says the form before the engine
    ("concurrency", -1, f"at least 0 and at most {10**15}, or empty"),
    ("money_micros", 10**17, f"at least 0 and at most {10**15}, or empty"),
    ("hard_deadline_ms", 10**15, f"at least 1 and at most {DAYS_7}, or empty"),
    ("max_tokens_cap", 10**16, f"at least 0 and at most {10**15}, or empty"),
    ("max_tokens_cap", 100, "the default is 512"),
    ("value_micros", 10**18, f"at least 0 and at most {10**15}"),
    ("default_max_tokens", 10**16, f"at least 1 and at most {2**31 - 1}"),
]
BAD_CLASSES = [
    ("ttft_target_ms", 10**15, f"at least 1 and at most {DAYS_7}, or empty"),
    ("tbt_target_ms", 0, f"at least 1 and at most {DAYS_7}, or empty"),
    ("max_queue_wait_ms", 10**15, f"at least 0 and at most {DAYS_7}, or empty"),
    ("floor_percent", -1, "at least 0 and at most 100"),
    ("cap_slots_percent", 0, "at least 1 and at most 100"),
    ("cap_memory_percent", 0, "at least 1 and at most 100"),
    ("patience_steps", 10**9, "at least 0 and at most 1000000, or empty"),
    ("patience_ms", 10**12, f"at least 0 and at most {DAYS_7}, or empty"),
    ("fairness_gap_ms", 0, f"at least 1 and at most {DAYS_7}"),
    ("quantum_steps", 10**9, "and at most 1000000"),
    ("token_budget_max", 2 * 10**9, "at least 1 and at most 1000000"),
    ("bypass_limit", 10**9, "at least 0 and at most 1000000"),
    ("max_preemptions", 10**9, "at least 0 and at most 1000000"),
]


@pytest.fixture
def operator(db: None, published: Any) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("alice", password="x"))
    return client


def post_changed(operator: Client, url: str, name: str, value: int) -> Any:
    """The change page at ``url`` as a browser posts it, with one field changed."""
    form = operator.get(url).context_data["adminform"].form
    return operator.post(url, {key: old for key, old in form.initial.items() if old is not None} | {name: value})


@pytest.mark.parametrize(("name", "value", "words"), BAD_CELLS)
def test_a_cell_out_of_bounds_is_an_error_at_its_field(
    operator: Client, aurora: Any, name: str, value: int, words: str
) -> None:
    before = selectors.current_policy()
    cell = QuotaPolicy.objects.get(tenant=aurora.tenant, priority_class="default")
    page = post_changed(operator, reverse("admin:tenants_quotapolicy_change", args=[cell.pk]), name, value)
    assert page.status_code == 200
    errors = page.context_data["adminform"].form.errors
    assert list(errors) == [name]
    assert len(errors[name]) == 1
    assert words in errors[name][0]
    assert selectors.current_policy() == before
    assert getattr(QuotaPolicy.objects.get(pk=cell.pk), name) == getattr(cell, name)


@pytest.mark.parametrize(("name", "value", "words"), [bad for bad in BAD_CELLS if bad[0] in MATRIX])
def test_a_cell_out_of_bounds_in_the_matrix_is_an_error_in_its_row_and_no_row_is_saved(
    operator: Client, aurora: Any, name: str, value: int, words: str
) -> None:
    before = selectors.current_policy()
    rows = list(QuotaPolicy.objects.order_by("tenant__slug", "priority_class"))
    form: dict[str, Any] = {"form-TOTAL_FORMS": len(rows), "form-INITIAL_FORMS": len(rows), "_save": "Save"}
    for index, row in enumerate(rows):
        form[f"form-{index}-id"] = row.pk
        cells = {key: getattr(row, key) for key in MATRIX} | {"allowed": True}  # another row's good change
        form |= {f"form-{index}-{key}": "on" if old is True else old for key, old in cells.items() if old is not None}
    form[f"form-1-{name}"] = value
    page = operator.post(reverse("admin:tenants_quotapolicy_changelist"), form)
    assert page.status_code == 200
    errors = page.context_data["cl"].formset.errors
    assert [list(row) for row in errors] == [[], [name], []]
    assert words in errors[1][name][0]
    assert selectors.current_policy() == before
    assert list(QuotaPolicy.objects.order_by("priority_class").values_list("allowed", flat=True)) == [
        row.allowed for row in rows
    ]


@pytest.mark.parametrize(("name", "value", "words"), BAD_CLASSES)
def test_a_class_parameter_out_of_bounds_is_an_error_at_its_field(
    operator: Client, aurora: Any, name: str, value: int, words: str
) -> None:
    before = selectors.current_policy()
    page = post_changed(operator, reverse("admin:tenants_priorityclass_change", args=["default"]), name, value)
    assert page.status_code == 200
    errors = page.context_data["adminform"].form.errors
    assert words in errors[name][0]
    assert selectors.current_policy() == before


def test_the_widest_allowed_cell_is_saved(operator: Client, aurora: Any) -> None:
    cell = QuotaPolicy.objects.get(tenant=aurora.tenant, priority_class="default")
    url = reverse("admin:tenants_quotapolicy_change", args=[cell.pk])
    assert post_changed(operator, url, "weight", 1_000_000).status_code == 302
    assert QuotaPolicy.objects.get(pk=cell.pk).weight == 1_000_000


@pytest.mark.parametrize(
    ("price", "words"),
    [(10**12 + 1, "a price is at most 1,000,000,000,000"), (2**63, "less than or equal to"), (-1, "cannot be below 0")],
)
def test_a_price_out_of_bounds_is_told_at_its_form(operator: Client, price: int, words: str) -> None:
    services.set_prices(actor="tests", prices={("m", "batch"): TokenPrices(prompt=1, cached=2, output=3)})
    row = Price.objects.get(token_kind="output")
    page = operator.post(reverse("admin:billing_price_change", args=[row.pk]), {"micros_per_million": price})
    assert page.status_code == 200
    assert words in page.content.decode()
    assert list(Price.objects.filter(token_kind="output")) == [row]
