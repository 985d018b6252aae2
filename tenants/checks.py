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
        broken = _name_of(refusal)
        if broken == f"{model._meta.db_table}_pkey":
            raise ValidationError(SENT_BEFORE) from refusal
        for constraint in model._meta.constraints:
            if constraint.name == broken:
                raise ValidationError(constraint.get_violation_error_message()) from refusal
        raise


def _name_of(refusal: IntegrityError) -> str | None:
    cause = refusal.__cause__
    return cause.diag.constraint_name if isinstance(cause, psycopg.Error) else None
