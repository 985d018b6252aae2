"""Edit forms of the admin: they carry the row they were opened on, and say why. Knows no table."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.db import models
from django.http import HttpRequest

from tenants.audit import LONGEST_REASON


class Opened(forms.ModelForm):  # type: ignore[type-arg]
    """Always: saves the fields that were changed in it and no other; one that somebody else has changed since it was
    opened, to another value, is refused with both. Shown by an admin that is ``OneAtATime``.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept = [] if self.instance._state.adding else [name for name in self.fields if name in self.initial]
        for name in self._kept:
            self.fields[name].show_hidden_initial = True

    def clean(self) -> dict[str, Any]:
        cleaned = super().clean() or {}
        for name in self._kept:
            if name in cleaned:
                self._meet(name, cleaned)
        return cleaned

    def _meet(self, name: str, cleaned: dict[str, Any]) -> None:
        stands, wanted = self.initial[name], cleaned[name]
        if name not in self.changed_data:
            cleaned[name] = stands
        elif stands not in (self._opened_on(name), wanted):
            words = f"Somebody has saved “{stands}” since you opened this form; “{wanted}” is not saved."
            self.add_error(name, f"{words} Open the form again to change it.")

    def _opened_on(self, name: str) -> Any:
        """None where the form does not say it: a program's, for instance."""
        bound = self[name]
        text = bound.field.hidden_widget().value_from_datadict(self.data, self.files, bound.html_initial_name)
        try:
            return bound.field.to_python(text)
        except ValidationError:
            return None


class OpenedWithReason(Opened):
    """Its change is a version of the policy, which goes on record with why."""

    reason = forms.CharField(max_length=LONGEST_REASON, help_text="stands in the policy's history and on the trail")


class OneAtATime:
    """Mixed into an admin: the row that a form is sent for is the sender's alone until it is checked and saved."""

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> models.Model | None:
        found: models.Model | None = super().get_object(request, object_id, from_field)  # type: ignore[misc]
        if found is not None and request.method == "POST":  # the admin has begun the form's transaction
            found.refresh_from_db(from_queryset=type(found)._default_manager.select_for_update())
        return found
