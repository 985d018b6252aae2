"""The operator's forms: what they show, what they refuse, and that every change is a policy version."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.contrib.messages import get_messages
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from billing import ledger, statements
from billing import services as billing_services
from billing.messages import Reservation, Settlement
from billing.models import LedgerEntry, Price
from billing.pricing import Terminal, TokenCounts, TokenPrices
from tenants import api_keys, selectors
from tenants.models import ApiKey, PolicyVersion, PriorityClass, QuotaPolicy, Tenant


@pytest.fixture
def operator(db: None, published: Any) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("alice", password="x"))
    return client


def matrix_form(**changes: Any) -> dict[str, Any]:
    """The changelist of the quota matrix as a browser posts it, with some cells changed ({row id: {field: value}})."""
    rows = list(QuotaPolicy.objects.order_by("tenant__slug", "priority_class"))
    form: dict[str, Any] = {"form-TOTAL_FORMS": len(rows), "form-INITIAL_FORMS": len(rows), "_save": "Save"}
    editable = admin.site._registry[QuotaPolicy].list_editable
    for index, row in enumerate(rows):
        form[f"form-{index}-id"] = row.pk
        for name in editable:
            value = changes.get(f"{row.tenant.slug}_{row.priority_class}_{name}", getattr(row, name))
            if value is not None and value is not False:
                form[f"form-{index}-{name}"] = "on" if value is True else value
    return form


def told(response: Any) -> str:
    return " / ".join(str(message) for message in get_messages(response.wsgi_request))


def test_the_matrix_is_edited_in_place_and_each_changed_cell_is_a_version(
    operator: Client, aurora: Any, stranger: Any
) -> None:
    before = selectors.current_policy().version
    url = reverse("admin:tenants_quotapolicy_changelist")
    response = operator.post(url, matrix_form(aurora_default_tokens_per_minute=6_000, aurora_batch_allowed=True))
    assert response.status_code == 302, response.context_data["cl"].formset.errors
    cells = QuotaPolicy.objects.filter(tenant=aurora.tenant)
    assert cells.get(priority_class="default").tokens_per_minute == 6_000
    assert cells.get(priority_class="batch").allowed
    assert selectors.current_policy().version == before + 2
    assert PolicyVersion.objects.latest("version").actor == "alice"


def test_a_cell_that_makes_no_sense_is_explained_and_nothing_is_saved(operator: Client, aurora: Any) -> None:
    before = selectors.current_policy()
    url = reverse("admin:tenants_quotapolicy_changelist")
    response = operator.post(url, matrix_form(aurora_default_weight=0, aurora_batch_allowed=True))
    assert response.status_code == 200
    assert "weight must be at least 1" in response.content.decode()
    assert selectors.current_policy() == before


def test_the_matrix_shows_units_and_can_be_narrowed_to_a_tenant(operator: Client, aurora: Any, stranger: Any) -> None:
    url = reverse("admin:tenants_quotapolicy_changelist")
    page = operator.get(url, {"tenant": aurora.tenant.slug}).content.decode()
    for header in ("Requests/min", "Tokens/min", "At once", "Money (micros/window)"):
        assert header.lower() in page.lower()
    assert page.count('name="form-') > 3
    assert page.count("/admin/tenants/quotapolicy/") >= 3
    assert "Stranger</a></th>" not in page


def test_class_parameters_are_edited_on_their_own_page(operator: Client, aurora: Any) -> None:
    url = reverse("admin:tenants_priorityclass_change", args=["interactive"])
    form = operator.get(url).context_data["adminform"].form
    values = {name: value for name, value in form.initial.items() if value is not None}
    response = operator.post(url, {**values, "ttft_target_ms": 250})
    assert response.status_code == 302, response.context_data["adminform"].form.errors
    assert PriorityClass.objects.get(label="interactive").ttft_target_ms == 250
    assert PolicyVersion.objects.latest("version").actor == "alice"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"floor_percent": 96}, "floors of all classes"),
        ({"chunk_min": 5_000}, "chunk min"),
        ({"ttft_target_ms": "x"}, "whole"),
    ],
)
def test_class_parameters_that_make_no_sense_are_explained(
    operator: Client, aurora: Any, change: dict[str, Any], words: str
) -> None:
    url = reverse("admin:tenants_priorityclass_change", args=["interactive"])
    form = operator.get(url).context_data["adminform"].form
    values = {name: value for name, value in form.initial.items() if value is not None}
    page = operator.post(url, {**values, **change})
    assert page.status_code == 200
    assert words in page.content.decode()
    assert PriorityClass.objects.get(label="interactive").ttft_target_ms == 300


def test_the_three_classes_can_be_neither_added_nor_deleted(operator: Client) -> None:
    assert operator.get(reverse("admin:tenants_priorityclass_add")).status_code == 403
    assert operator.get(reverse("admin:tenants_priorityclass_delete", args=["batch"])).status_code == 403


def test_a_new_tenant_from_the_form_has_its_row_of_the_matrix(operator: Client) -> None:
    url = reverse("admin:tenants_tenant_add")
    response = operator.post(url, {"slug": "bulk", "name": "Bulk", "timezone": "Europe/Vienna"})
    assert response.status_code == 302
    assert QuotaPolicy.objects.filter(tenant=Tenant.objects.get(slug="bulk")).count() == 3


def test_a_tenant_is_switched_off_and_its_keys_are_told(operator: Client, aurora: Any) -> None:
    url = reverse("admin:tenants_tenant_change", args=[aurora.tenant.id])
    operator.post(url, {"name": "Aurora", "timezone": "UTC"})
    aurora.tenant.refresh_from_db()
    assert not aurora.tenant.is_active


def test_a_new_key_is_shown_once_and_then_never_again(operator: Client, aurora: Any) -> None:
    url = reverse("admin:tenants_apikey_add")
    response = operator.post(url, {"project": str(aurora.project.id), "name": "second"})
    text = next(word for word in told(response).split() if word.startswith("sk_"))
    assert ApiKey.objects.get(public_id=api_keys.parse(text).public_id).created_by == "alice"
    page = operator.get(reverse("admin:tenants_apikey_changelist"))
    page = operator.get(reverse("admin:tenants_apikey_changelist"))
    assert text not in page.content.decode()
    assert api_keys.parse(text).secret not in page.content.decode()


def test_keys_are_revoked_from_the_list(operator: Client, aurora: Any) -> None:
    url = reverse("admin:tenants_apikey_changelist")
    operator.post(url, {"action": "revoke", "_selected_action": [str(aurora.key.key.id)]})
    assert ApiKey.objects.get().revoked_by == "alice"


@pytest.mark.parametrize("model", ["tenant", "project", "apikey", "quotapolicy", "policyversion"])
def test_nothing_of_the_accounts_can_be_deleted(operator: Client, aurora: Any, model: str) -> None:
    page = operator.get(reverse(f"admin:tenants_{model}_changelist"))
    assert page.status_code == 200
    assert "delete_selected" not in page.content.decode()


def test_a_price_edit_makes_the_next_version_and_leaves_the_old_row(operator: Client) -> None:
    prices = {("m", "batch"): TokenPrices(prompt=10, cached=20, output=30)}
    before = billing_services.set_prices(actor="tests", prices=prices)
    row = Price.objects.get(token_kind="output")
    response = operator.post(reverse("admin:billing_price_change", args=[row.pk]), {"micros_per_million": 33})
    assert response.status_code == 302
    amounts = Price.objects.order_by("price_version_id", "token_kind").values_list("micros_per_million", flat=True)
    assert list(amounts) == [20, 30, 10, 20, 33, 10]
    assert Price.objects.latest("price_version_id").price_version_id == before.version + 1


def test_the_books_are_read_and_not_edited_even_where_a_tenant_is_unknown(operator: Client, aurora: Any) -> None:
    same = {
        "tenant_id": aurora.project.id,  # no tenant of ours
        "project_id": aurora.project.id,
        "key_id": aurora.project.id,
        "priority_class": "batch",
        "model": "m",
        "policy_version": 0,
        "price_version": 0,
    }
    reserve = Reservation(
        operation_id=aurora.tenant.id, source="rest", money_micros=0, reserved_tokens=5, window_id="2026-11", **same
    )
    usage = Settlement(
        operation_id=aurora.tenant.id, attempt=1, counts=TokenCounts(2, 0, 3), terminal=Terminal.COMPLETED, **same
    )
    ledger.apply([reserve, usage])
    for model in ("usagerequest", "ledgerentry", "rollup", "ledgeralert", "enginecount"):
        page = operator.get(reverse(f"admin:billing_{model}_changelist"))
        assert page.status_code == 200
        may_add = model == "ledgerentry"  # corrections are entries of their own
        assert operator.get(reverse(f"admin:billing_{model}_add")).status_code == (200 if may_add else 403)
    entry = LedgerEntry.objects.first()
    assert operator.post(reverse("admin:billing_ledgerentry_change", args=[entry.pk]), {}).status_code == 403
    rows = operator.get(reverse("admin:billing_ledgerentry_changelist")).context_data["cl"].result_list
    assert len(rows) == LedgerEntry.objects.count() == 2


def test_a_credit_is_given_to_a_tenant_and_an_adjustment_to_an_operation(operator: Client, aurora: Any) -> None:
    add = reverse("admin:billing_ledgerentry_add")
    operator.post(add, {"tenant": aurora.tenant.pk, "amount_micros": 5, "reason": "goodwill"})
    credit = LedgerEntry.objects.get()
    assert (credit.kind, credit.tenant_id, credit.amount_micros, credit.actor) == (
        "credit",
        aurora.tenant.pk,
        5,
        "alice",
    )
    operator.post(add, {"operation_id": credit.operation_id, "amount_micros": 2, "reason": "repair"})
    adjustment = LedgerEntry.objects.get(kind="adjust")
    assert (adjustment.operation_id, adjustment.amount_micros, adjustment.reason) == (credit.operation_id, 2, "repair")


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"amount_micros": 5}, "Name an operation (to adjust its charge) or a tenant"),
        ({"operation_id": "00000000-0000-7000-8000-000000000001", "amount_micros": 5}, "knows no such operation"),
        ({"operation_id": "nonsense", "amount_micros": 5}, "Enter a valid UUID"),
        ({"tenant": True, "amount_micros": -5}, "A credit is above 0"),
        ({"tenant": True, "amount_micros": 0}, "A credit is above 0"),
        ({"tenant": True, "amount_micros": 10**22}, "at most 1,000,000,000,000,000 micro-units"),
        ({"tenant": True, "amount_micros": "9" * 5_000}, "Enter a whole number"),
    ],
)
def test_a_wrong_correction_is_refused_in_a_sentence(
    operator: Client, aurora: Any, form: dict[str, Any], sentence: str
) -> None:
    filled = {**form, "reason": "x", **({"tenant": aurora.tenant.pk} if "tenant" in form else {})}
    answer = operator.post(reverse("admin:billing_ledgerentry_add"), filled)
    assert sentence in answer.content.decode()
    assert not LedgerEntry.objects.exists()


@pytest.mark.parametrize(
    ("amount", "sentence"),
    [
        (0, "An adjustment is not 0"),
        (10**22, "it lies between -1,000,000,000,000,000 and 1,000,000,000,000,000 micro-units"),
        (-99_999_999_999, "The operation is charged 0 micro-units, adjustments included"),
    ],
)
def test_an_adjustment_that_cannot_be_is_refused_at_its_field(
    operator: Client, aurora: Any, amount: int, sentence: str
) -> None:
    given = billing_services.credit(actor="tests", tenant_id=aurora.tenant.pk, amount_micros=5, reason="goodwill")
    form = {"operation_id": given.operation_id, "amount_micros": amount, "reason": "x"}
    answer = operator.post(reverse("admin:billing_ledgerentry_add"), form)
    assert sentence in " ".join(answer.context_data["adminform"].form.errors["amount_micros"])
    assert LedgerEntry.objects.count() == 1


@pytest.mark.parametrize(
    ("kind", "content_type", "start"), [("csv", "text/csv", b"day,"), ("pdf", "application/pdf", b"%PDF-")]
)
def test_a_statement_is_downloaded_from_its_list(
    operator: Client, aurora: Any, kind: str, content_type: str, start: bytes
) -> None:
    billing_services.credit(actor="tests", tenant_id=aurora.tenant.pk, amount_micros=5, reason="goodwill")
    (statement,) = statements.close_due_days(timezone.now() + timedelta(days=2))
    assert (
        f"/{statement.pk}/statement.{kind}"
        in operator.get(reverse("admin:billing_statement_changelist")).content.decode()
    )
    answer = operator.get(reverse("admin:billing_statement_file", args=[statement.pk, kind]))
    assert answer["Content-Type"].startswith(content_type)
    assert answer.content.startswith(start)


def test_where_a_second_person_must_agree_the_admin_shows_the_policy_and_edits_nothing(
    operator: Client, aurora: Any, settings: Any
) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    before = PolicyVersion.objects.count()
    page = operator.get(reverse("admin:tenants_quotapolicy_changelist"))
    assert (page.status_code, b'name="form-0-weight"' in page.content) == (200, False)
    operator.post(reverse("admin:tenants_quotapolicy_changelist"), matrix_form(aurora_default_weight=7))
    row = reverse("admin:tenants_priorityclass_change", args=["batch"])
    assert operator.post(row, {"floor_percent": 7}).status_code == 403
    assert PolicyVersion.objects.count() == before
