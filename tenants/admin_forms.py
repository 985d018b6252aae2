"""Forms of the admin: they carry the row they were opened on, say why, and are refused in words. Knows no table."""

from __future__ import annotations

import logging
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.db import IntegrityError, models
from django.http import HttpRequest, HttpResponse

from tenants.audit import LONGEST_REASON
from tenants.models.words import one_direction

OVERTAKEN = "Something else was saved at this moment, and nothing of this form. Look at what stands, and send it again."
_REFUSED = "_refused_while_saving"
log = logging.getLogger(__name__)


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

    reason = forms.CharField(
        max_length=LONGEST_REASON,
        help_text="required: stands in the policy's history and on the trail",
        validators=[one_direction],
    )


class OneAtATime:
    """Mixed into an admin: the row that a form is sent for is the sender's alone until it is checked and saved."""

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> models.Model | None:
        found: models.Model | None = super().get_object(request, object_id, from_field)  # type: ignore[misc]
        if found is not None and request.method == "POST":  # the admin has begun the form's transaction
            found.refresh_from_db(from_queryset=type(found)._default_manager.select_for_update())
        return found


class RefusedInWords:
    """Mixed into every admin (``admin_site``): what is refused while a form is saved, behind its own checks, stands on
    the form, and nothing of it is saved. Of several that are sent at once, the later ones read what is read later.
    """

    def changeform_view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        show: Any = super().changeform_view  # type: ignore[misc]
        try:
            answer: HttpResponse = show(request, *args, **kwargs)
        except (ValidationError, IntegrityError) as refusal:
            if request.method != "POST":
                raise
            log.warning("%s is refused while it is saved: %s", request.path, refusal)
            vars(request)[_REFUSED] = refusal.messages if isinstance(refusal, ValidationError) else [OVERTAKEN]
            answer = show(request, *args, **kwargs)
        return answer

    def get_form(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        form: Any = super().get_form(request, *args, **kwargs)  # type: ignore[misc]
        refused = vars(request).get(_REFUSED)
        return form if refused is None else _wrong(form, refused)


def _wrong(form: Any, words: list[str]) -> Any:
    """The form with these words on it, where its own checks find nothing wrong."""

    class Wrong(form):  # type: ignore[misc]
        def full_clean(self) -> None:
            super().full_clean()
            if self.is_bound and not self.errors:
                self.add_error(None, words)

    return Wrong
