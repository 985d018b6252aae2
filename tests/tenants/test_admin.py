"""The operator's forms: what they show and what they refuse. The policy is read here, and edited at the desk."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.contrib.messages import get_messages
from django.core.exceptions import ValidationError
from django.db import IntegrityError, connection
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from billing import ledger, statements
from billing import services as billing_services
from billing.messages import Reservation, Settlement
from billing.models import LedgerEntry, Price
from billing.pricing import Terminal, TokenCounts, TokenPrices
from tenants import api_keys, services
from tenants.admin_forms import OVERTAKEN, OneAtATime, Opened, RefusedInWords
from tenants.models import ApiKey, AuditEvent, PolicyVersion, QuotaPolicy, Tenant


@pytest.fixture
def operator(db: None, published: Any) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("alice", password="x"))
    return client


def told(response: Any) -> str:
    return " / ".join(str(message) for message in get_messages(response.wsgi_request))


def opened(operator: Client, url: str) -> dict[str, Any]:
    """A change form as a browser would send it back: the fields, and what it was opened on."""
    form = operator.get(url).context_data["adminform"].form
    sent = {}
    for bound in form:
        value = "" if bound.value() is None else bound.value()
        sent |= {} if value is False else {bound.html_name: "on" if value is True else value}
        if bound.field.show_hidden_initial:
            sent[bound.html_initial_name] = value
    return sent | ({"reason": "they asked"} if "reason" in form.fields else {})


EDITS = [  # (form, one person's edit, another's of another field, another's of the same)
    ("tenant", {"name": "Borealis"}, {"timezone": "Europe/Vienna"}, {"name": "Australis"}),
    ("project", {"name": "night"}, {"default_class": "batch"}, {"name": "day"}),
]


def place_of(account: Any, model: str) -> tuple[str, Any]:
    row = {"tenant": account.tenant, "project": account.project}[model]
    return reverse(f"admin:tenants_{model}_change", args=[row.pk]), row


@pytest.mark.parametrize(("model", "first", "other", "same"), EDITS)
def test_a_form_that_was_opened_earlier_undoes_nobodys_edit(
    operator: Client, aurora: Any, model: str, first: dict[str, str], other: dict[str, str], same: dict[str, str]
) -> None:
    url, row = place_of(aurora, model)
    stale = opened(operator, url)
    assert operator.post(url, stale | first).status_code == 302
    assert operator.post(url, stale | other).status_code == 302
    page = operator.post(url, stale | same).content.decode()
    (stands,), (wanted,) = first.values(), same.values()
    assert f"Somebody has saved “{stands}” since you opened this form; “{wanted}” is not saved." in page
    row.refresh_from_db()
    assert {name: getattr(row, name) for name in first | other} == first | other


@pytest.mark.parametrize("model", ["tenant", "project"])
def test_a_row_is_locked_before_its_form_is_checked(operator: Client, aurora: Any, model: str) -> None:
    url, row = place_of(aurora, model)
    form = opened(operator, url) | {"name": "Borealis"}
    with CaptureQueriesContext(connection) as asked:
        operator.post(url, form)
    of_the_row = [one["sql"] for one in asked if f'FROM "{row._meta.db_table}"' in one["sql"]]
    assert "FOR UPDATE" in of_the_row[1]  # the first finds it; what is checked is read behind the lock


def test_a_form_that_does_not_say_what_it_was_opened_on_changes_nothing(operator: Client, aurora: Any) -> None:
    url, row = place_of(aurora, "tenant")
    form = {"name": "Borealis", "timezone": "UTC", "is_active": "on", "reason": "they asked"}
    assert operator.post(url, form).status_code == 200
    row.refresh_from_db()
    assert row.name == "Aurora"


def test_every_form_that_edits_rows_of_accounts_and_policy_knows_what_it_was_opened_on(operator: Client) -> None:
    request = RequestFactory().get("/")
    request.user = User.objects.get()
    editable = [
        one
        for model, one in admin.site._registry.items()
        if model._meta.app_label == "tenants" and one.has_change_permission(request, model())
    ]
    assert sorted(one.model.__name__ for one in editable) == ["Project", "Tenant"]
    for one in editable:
        assert isinstance(one, OneAtATime)
        assert issubclass(one.get_form(request, one.model(), change=True), Opened)
        assert not one.list_editable


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (ValidationError("not on a Sunday"), "not on a Sunday"),
        (ValidationError({"reason": "a field that the form lacks"}), "a field that the form lacks"),
        (IntegrityError("duplicate key"), OVERTAKEN),
    ],
    ids=["a sentence", "a field", "the database"],
)
def test_what_is_refused_while_a_form_is_saved_stands_on_the_form(
    operator: Client, monkeypatch: pytest.MonkeyPatch, refusal: Exception, words: str
) -> None:
    def refuse(**_: Any) -> None:
        raise refusal

    monkeypatch.setattr(services, "create_tenant", refuse)
    answer = operator.post(reverse("admin:tenants_tenant_add"), {"slug": "nova", "name": "Nova", "timezone": "UTC"})
    assert answer.status_code == 200
    assert answer.context_data["adminform"].form.non_field_errors() == [words]
    assert 'value="nova"' in answer.content.decode()


def test_every_form_of_the_admin_is_refused_in_words(operator: Client) -> None:
    assert len(admin.site._registry) > 10
    assert [one for one in admin.site._registry.values() if not isinstance(one, RefusedInWords)] == []


def test_a_form_that_asks_why_asks_for_it_before_it_is_sent(operator: Client, aurora: Any) -> None:
    url, _ = place_of(aurora, "tenant")
    page = operator.get(url).content.decode()
    assert '<label class="required" for="id_reason">' in page
    assert 'name="reason" maxlength="1000" required' in page
    assert "required: stands in the policy's history and on the trail" in page


def test_a_tenant_is_renamed_with_a_reason_and_on_record_with_it(operator: Client, aurora: Any) -> None:
    url, _ = place_of(aurora, "tenant")
    before = PolicyVersion.objects.count()
    page = operator.post(url, opened(operator, url) | {"name": "Borealis", "reason": " "}).content.decode()
    assert "This field is required" in page
    assert PolicyVersion.objects.count() == before
    operator.post(url, opened(operator, url) | {"name": "Borealis", "reason": "married"})
    assert PolicyVersion.objects.latest("version").reason == "Aurora: renamed to Borealis. married"
    event = AuditEvent.objects.filter(object_type="tenant", action="update").latest("id")
    assert (event.actor, event.reason, event.request_id[:4]) == ("alice", "married", "req_")


@pytest.mark.parametrize(
    ("typed", "done"),
    [
        ({"name": "Borealis"}, "renamed to Borealis"),
        ({"timezone": "Europe/Vienna"}, "moved to Europe/Vienna"),
        ({"is_active": ""}, "switched off"),
        ({"name": "Borealis", "is_active": ""}, "renamed to Borealis, switched off"),
        ({}, ""),
    ],
    ids=["name", "zone", "off", "two", "nothing"],
)
def test_what_is_done_to_a_tenant_itself_holds_at_once_under_approval_too_and_the_form_says_so(
    operator: Client, aurora: Any, settings: Any, typed: dict[str, str], done: str
) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = True
    url, row = place_of(aurora, "tenant")
    page = operator.get(url).content.decode()
    assert "What is saved here holds at once, and waits for no second person" in page
    operator.post(url, {name: value for name, value in (opened(operator, url) | typed).items() if value})
    row.refresh_from_db()
    found = {"name": row.name, "timezone": row.timezone, "is_active": "on" if row.is_active else ""}
    assert found == {"name": "Aurora", "timezone": "UTC", "is_active": "on"} | typed
    saved = PolicyVersion.objects.latest("version")
    assert (saved.actor, saved.reason) == ("alice", f"Aurora: {done}. they asked" if done else "they asked")


@pytest.mark.parametrize("needs_approval", [True, False])
def test_the_policy_is_read_here_and_edited_at_the_desk(
    operator: Client, aurora: Any, settings: Any, needs_approval: bool
) -> None:
    settings.RUBATO_POLICY_NEEDS_APPROVAL = needs_approval
    before = PolicyVersion.objects.count()
    cell = QuotaPolicy.objects.get(tenant=aurora.tenant, priority_class="batch")
    for model, key, link in (
        ("quotapolicy", cell.pk, 'href="/operator/policy/{}">Edit quotas</a>'),
        ("priorityclass", "batch", 'href="/operator/policy/classes">Edit classes</a>'),
    ):
        listed, row = reverse(f"admin:tenants_{model}_changelist"), reverse(f"admin:tenants_{model}_change", args=[key])
        for address, of_tenant in ((listed, ""), (row, f"?q={aurora.tenant.slug}")):
            page = operator.get(address).content.decode()
            assert link.format(of_tenant) in page
            assert 'name="weight"' not in page
            assert 'name="form-0-weight"' not in page
        assert operator.post(row, {"weight": 7, "floor_percent": 7}).status_code == 403
    assert PolicyVersion.objects.count() == before


def test_the_matrix_shows_units_and_can_be_narrowed_to_a_tenant(operator: Client, aurora: Any, stranger: Any) -> None:
    url = reverse("admin:tenants_quotapolicy_changelist")
    page = operator.get(url, {"tenant": aurora.tenant.slug}).content.decode()
    for header in ("Requests/min", "Tokens/min", "At once", "Money (micros/window)"):
        assert header.lower() in page.lower()
    assert page.count(">Aurora</a></th>") == 3


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
    operator.post(url, {name: value for name, value in opened(operator, url).items() if name != "is_active"})
    aurora.tenant.refresh_from_db()
    assert not aurora.tenant.is_active


def test_a_new_key_is_shown_once_and_then_never_again(operator: Client, aurora: Any) -> None:
    url = reverse("admin:tenants_apikey_add")
    response = operator.post(url, {"project": str(aurora.project.id), "name": "second", "made_id": uuid.uuid4()})
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


def test_prices_are_read_in_the_admin_and_a_price_of_before_keeps_its_page(operator: Client) -> None:
    prices = {("m", "batch"): TokenPrices(prompt=10, cached=20, output=30)}
    billing_services.set_prices(actor="tests", prices=prices)
    old = Price.objects.get(token_kind="output")
    billing_services.set_prices(actor="tests", prices={("m", "batch"): TokenPrices(prompt=10, cached=20, output=31)})
    listed = operator.get(reverse("admin:billing_price_changelist"))
    assert sorted(row.micros_per_million for row in listed.context_data["cl"].result_list) == [10, 20, 31]
    assert reverse("desk-prices") in listed.content.decode()
    page = operator.get(reverse("admin:billing_price_change", args=[old.pk]))
    assert page.status_code == 200
    assert reverse("desk-history") in page.content.decode()
    assert (
        operator.post(reverse("admin:billing_price_change", args=[old.pk]), {"micros_per_million": 1}).status_code
        == 403
    )


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
    given = {"tenant": aurora.tenant.pk, "amount_micros": 5, "reason": "goodwill", "made_id": uuid.uuid4()}
    operator.post(add, given)
    credit = LedgerEntry.objects.get()
    assert (credit.kind, credit.tenant_id, credit.amount_micros, credit.actor) == (
        "credit",
        aurora.tenant.pk,
        5,
        "alice",
    )
    repair = {"operation_id": credit.operation_id, "amount_micros": 2, "reason": "repair", "made_id": uuid.uuid4()}
    operator.post(add, repair)
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
    of_tenant = {"tenant": aurora.tenant.pk} if "tenant" in form else {}
    filled = {**form, "reason": "x", "made_id": uuid.uuid4(), **of_tenant}
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
    form = {"operation_id": given.operation_id, "amount_micros": amount, "reason": "x", "made_id": uuid.uuid4()}
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
