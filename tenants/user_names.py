"""What a person may be called. The trail knows people by their user names alone, so none may look like another's."""

from __future__ import annotations

from django.contrib.auth import get_user_model
from django.contrib.auth.validators import ASCIIUsernameValidator
from django.core.exceptions import ValidationError
from django.db import connection

# What the product signs with where no person does; keys, "sql:…" and "the platform" sign as nobody can be called.
OF_THE_PRODUCT = frozenset({"finalise_batch", "run_batches", "seed_demo", "settler"})
_LOCK = 7_270_004  # pg_advisory_xact_lock: one name, however it is written, is given by one after another
_is_plain = ASCIIUsernameValidator()


def free_name(name: str, *, taken: str, user_id: int = 0) -> None:
    """For a new name of this user, or of a new one; until the end of the transaction nobody else is given it. Raises
    ValidationError for what is no name, the product's own, and in the words of ``taken`` for another's, however it is
    written.
    """
    _is_plain(name)
    if name.lower() in OF_THE_PRODUCT:
        raise ValidationError("the platform itself signs with this name")
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", [_LOCK, name.lower()])
    if get_user_model().objects.filter(username__iexact=name).exclude(pk=user_id).exists():
        raise ValidationError(taken)
