"""Rows whose numbers the engine bounds: a form says the range at the field. Refuses to know any bound itself."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

from django.core.exceptions import ValidationError
from django.db import connection, models


class BoundedRow(models.Model):
    """Always: a row that passed ``clean_fields`` holds only numbers that the engine takes, field by field.

    Only the fields that are being cleaned are judged: a form shows an error at a field of its own or not at all.
    """

    bounds: ClassVar[Mapping[str, tuple[int, int, bool]]]

    class Meta:
        abstract = True

    def clean_fields(self, exclude: Collection[str] | None = None) -> None:
        errors: dict[str, list[ValidationError]] = {}
        try:
            super().clean_fields(exclude=exclude)
        except ValidationError as refusal:
            errors = refusal.error_dict
        left_out = exclude or ()
        for name in self.bounds:
            if name not in left_out and (sentence := self._out_of_bounds(name)):
                errors[name] = [ValidationError(sentence)]  # instead of what only the column's width refuses
        if errors:
            raise ValidationError(errors)

    def _out_of_bounds(self, name: str) -> str | None:
        value = getattr(self, name)
        least, most, may_be_null = self.bounds[name]
        field = self._meta.get_field(name)
        assert isinstance(field, models.IntegerField)
        _, widest = connection.ops.integer_field_range(field.get_internal_type())
        most = min(most, widest)  # a column may hold less than the engine would take
        if not isinstance(value, int) or least <= value <= most:
            return None
        return f"{field.verbose_name} must be at least {least} and at most {most}{', or empty' if may_be_null else ''}"
