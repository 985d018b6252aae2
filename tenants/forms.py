"""What forms for people share: whole numbers as they are written here, and forms that make a thing once."""

from __future__ import annotations

import re
import uuid
from typing import Any

from django import forms

from tenants.models.words import readable

_GROUPING = str.maketrans("", "", ", \u00a0\u202f")
_WHOLE = re.compile(r"-?(?:[0-9]+|[0-9]{1,3}([, \u00a0\u202f])[0-9]{3}(?:\1[0-9]{3})*)")


def whole_number(text: str) -> int | None:
    """ASCII digits behind a minus or not, plain or by thousands (``1,200,000``, ``1 200 000``); None for anything else.
    Digits of other scripts, other groups and a zero below zero are refused, not read: who mistypes a price or a limit
    must not set a number that nobody wrote.
    """
    written = text.strip()
    try:
        number = int(written.translate(_GROUPING)) if _WHOLE.fullmatch(written) else None
    except ValueError:  # more digits than Python turns into a number
        return None
    return None if number == 0 and written.startswith("-") else number


class WholeNumber(forms.IntegerField):
    """``whole_number`` as a field."""

    def to_python(self, value: Any) -> int | None:
        if value in self.empty_values:
            return None
        number = whole_number(str(value))
        if number is None:
            raise forms.ValidationError(self.error_messages["invalid"], code="invalid")
        return number


class Name(forms.CharField):
    """What people call a thing."""

    default_validators = [readable]


class Once(forms.Form):
    """Brings the id of what it will make. Always: sent twice, reloaded or gone back to, it makes that once; the second
    time the database refuses the id.
    """

    made_id = forms.UUIDField(required=False, widget=forms.HiddenInput, initial=uuid.uuid4)

    def clean(self) -> dict[str, Any]:
        found = super().clean() or {}
        if not found.get("made_id"):
            raise forms.ValidationError("This form came without its own number (made_id): open it anew.")
        return found
