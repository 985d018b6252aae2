"""Numbers as people type them, and the ways they must not be read."""

from __future__ import annotations

import pytest
from django import forms
from django.apps import apps
from django.contrib import admin

import billing.admin
import gateway.console.pages.alerts
import gateway.console.pages.batches
import gateway.console.pages.keys
import gateway.console.pages.people
import gateway.console.pages.webhooks
from tenants.forms import WholeNumber, whole_number

MODULES = [
    billing.admin,
    gateway.console.pages.alerts,
    gateway.console.pages.batches,
    gateway.console.pages.keys,
    gateway.console.pages.people,
    gateway.console.pages.webhooks,
]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        *(("0", 0), ("-7", -7), ("007", 7), ("1200000", 1_200_000), (" 1,200,000 ", 1_200_000), ("-12,000", -12_000)),
        *(("1 000", 1_000), ("12 200 000", 12_200_000), ("1\u202f000\u202f000", 1_000_000), ("1\u00a0000", 1_000)),
    ],
)
def test_a_whole_number_is_read(text: str, number: int) -> None:
    assert whole_number(text) == number
    assert WholeNumber().clean(text) == number


@pytest.mark.parametrize(
    "text",
    [
        *("٣٤", "3٤", "১২", "--5", "-", "+5", "1.5", "1e3", "0x10", "NaN", "9" * 5_000, "-0", "-000", "-0,000"),
        *("1,5", "1,2,3", "1_000", "1\u00a02\u202f3", "1,20,000", "1,000 000", "1,000,", ",100", "1234,567", "1  000"),
    ],
)
def test_what_is_no_whole_number_in_ascii_or_not_grouped_by_thousands_is_refused(text: str) -> None:
    assert whole_number(text) is None
    with pytest.raises(forms.ValidationError, match="Enter a whole number"):
        WholeNumber().clean(text)


def test_every_number_field_of_a_form_for_people_reads_ascii_digits_alone() -> None:
    found = {
        f"{module.__name__}.{name}.{field_name}": field
        for module in MODULES
        for name, form in vars(module).items()
        if isinstance(form, type) and issubclass(form, forms.BaseForm)
        for field_name, field in getattr(form, "base_fields", {}).items()
        if isinstance(field, forms.IntegerField)
    }
    assert len(found) >= 3
    assert [name for name, field in found.items() if not isinstance(field, WholeNumber)] == []


def test_no_form_of_the_admin_edits_a_number_but_through_such_a_field(rf: object, admin_user: object) -> None:
    request = rf.get("/")  # type: ignore[attr-defined]
    request.user = admin_user
    own = {config.label for config in apps.get_app_configs()} & {"tenants", "billing", "gateway"}
    for model, page in admin.site._registry.items():
        if model._meta.app_label in own and (page.has_add_permission(request) or page.has_change_permission(request)):
            fields = page.get_form(request).base_fields.values()
            assert not [
                one for one in fields if isinstance(one, forms.IntegerField) and not isinstance(one, WholeNumber)
            ]
