"""The database's own checks as the words of a form: tried by writing, where asking for each by itself is a query."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from django.core.exceptions import ValidationError
from django.db import IntegrityError, models, transaction

SENT_BEFORE = "This form was sent before: what it made is there, and nothing was made again."


@contextmanager
def checked_by_the_database(model: type[models.Model], using: str) -> Iterator[None]:
    """Rows of the model that the block writes. Raises ValidationError in the words of the constraint that one breaks;
    nothing of the block is written then.
    """
    try:
        with transaction.atomic(using=using):
            yield
    except IntegrityError as refusal:
        words = _words(model, _name_of(refusal))
        if words is None:
            raise
        raise ValidationError(words) from refusal


def _words(model: type[models.Model], broken: str | None) -> str | ValidationError | None:
    """Of a row that is there already, what the model's own check of it would say; None for no constraint of its."""
    table = model._meta.db_table
    if broken == f"{table}_pkey":
        return SENT_BEFORE
    for field in model._meta.concrete_fields:
        if field.unique and broken == f"{table}_{field.column}_key":
            return model().unique_error_message(model, [field.name])
    for constraint in model._meta.constraints:
        if constraint.name == broken and isinstance(constraint, models.UniqueConstraint):
            return model().unique_error_message(model, list(constraint.fields))
        if constraint.name == broken:
            return str(constraint.get_violation_error_message())
    return None


def _name_of(refusal: IntegrityError) -> str | None:
    cause = refusal.__cause__
    return cause.diag.constraint_name if isinstance(cause, psycopg.Error) else None
