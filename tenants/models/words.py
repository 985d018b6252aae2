"""Words that rows of accounts and of policy share."""

from __future__ import annotations

import unicodedata

from django.core.exceptions import ValidationError
from django.db import models

from scheduler_engine.policy import PriorityClass as ClassName
from tenants.roles import Role

# Unicode's Bidi_Control: marks, embeddings, overrides and isolates.
_TURNS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"

# Letters and a symbol that are drawn as nothing: Hangul's fillers, and Braille without a dot.
_BLANKS = "\u115f\u1160\u3164\uffa0\u2800"

CLASS_CHOICES = [(name.label, name.label) for name in ClassName]
CLASS_LABELS = [name.label for name in ClassName]
ROLE_CHOICES = [(role.value, role.value) for role in Role]


def one_direction(text: str) -> None:
    """For all that one person writes and others read: names, reasons. Raises ValidationError for characters that nobody
    sees and that turn round what is written beside them.
    """
    if text != without_turns(text):
        raise ValidationError("invisible characters that change the direction of writing are not taken")


def without_turns(text: str) -> str:
    """The same for what comes without a form that could be refused."""
    return text.translate(dict.fromkeys(map(ord, _TURNS)))


def readable(name: str) -> None:
    """For what a thing is called. Raises ValidationError for more than one line, for nothing that can be seen, and as
    ``one_direction``.
    """
    one_direction(name)
    kinds = [unicodedata.category(character) for character in name if character not in _BLANKS]
    if not {"Cc", "Zl", "Zp"}.isdisjoint(kinds):
        raise ValidationError("a name is one line, without control characters")
    if not any(kind[0] in "LNPS" for kind in kinds):
        raise ValidationError("nothing of this name can be seen")


class Named(models.Model):
    """A row with a name that people read. Always: a name that is ``readable``."""

    name: models.CharField[str, str]

    class Meta:
        abstract = True

    def clean(self) -> None:
        super().clean()
        try:
            readable(self.name)
        except ValidationError as refusal:
            raise ValidationError({"name": refusal}) from refusal
