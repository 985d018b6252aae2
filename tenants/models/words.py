"""Words that rows of accounts and of policy share."""

from __future__ import annotations

from django.core.exceptions import ValidationError
from django.db import models

from scheduler_engine.policy import PriorityClass as ClassName
from tenants.roles import Role

# Unicode's Bidi_Control: marks, embeddings, overrides and isolates.
_TURNS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

CLASS_CHOICES = [(name.label, name.label) for name in ClassName]
CLASS_LABELS = [name.label for name in ClassName]
ROLE_CHOICES = [(role.value, role.value) for role in Role]


def one_direction(name: str) -> None:
    """Raises ValidationError for characters that nobody sees and that turn round what is written beside the name."""
    if not _TURNS.isdisjoint(name):
        raise ValidationError("a name holds no invisible characters that change the direction of writing")


class Named(models.Model):
    """A row with a name that people read. Always: a name that is ``one_direction``."""

    name: models.CharField[str, str]

    class Meta:
        abstract = True

    def clean(self) -> None:
        super().clean()
        try:
            one_direction(self.name)
        except ValidationError as refusal:
            raise ValidationError({"name": refusal}) from refusal
