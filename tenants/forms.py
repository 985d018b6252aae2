"""What forms for people share: whole numbers as they are written here, and forms that make a thing once."""

from __future__ import annotations

import re
import uuid
from typing import Any

from django import forms

_GROUPING = str.maketrans("", "", " \u00a0\u202f,_")
_WHOLE = re.compile(r"-?[0-9]+")


def whole_number(text: str) -> int | None:
    """ASCII digits, which may be grouped and stand behind a minus; None for anything else. Digits of other scripts are
    refused, not read: who mistypes a price or a limit must not set a number that nobody wrote.
    """
    digits = text.strip().translate(_GROUPING)
    try:
        return int(digits) if _WHOLE.fullmatch(digits) else None
    except ValueError:  # more digits than Python turns into a number
        return None


class WholeNumber(forms.IntegerField):
    """``whole_number`` as a field."""

    def to_python(self, value: Any) -> int | None:
        if value in self.empty_values:
            return None
        number = whole_number(str(value))
        if number is None:
            raise forms.ValidationError(self.error_messages["invalid"], code="invalid")
        return number


class Once(forms.Form):
    """Brings the id of what it will make. Always: sent twice, reloaded or gone back to, it makes that once; the second
    time the database refuses the id.
    """

    made_id = forms.UUIDField(required=False, widget=forms.HiddenInput, initial=uuid.uuid4)
