"""What a command needs from outside before it begins, said in one sentence where it is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from django.conf import settings
from django.core.management.base import CommandError

from gateway.postgresql import AWAY
from wire.bus import BusError

NO_SERVICES = 2  # exit status, apart from 1 = the command ran and found something wrong
_HELP = "start the platform with 'manage.py up', or set DATABASE_URL and REDIS_URL"


def require_services() -> None:
    """Raises CommandError where nobody has said where the database and Redis are."""
    if not settings.REDIS_URL or not settings.DATABASES["default"].get("NAME"):
        raise CommandError(f"No services are running here: {_HELP}.", returncode=NO_SERVICES)


@contextlib.contextmanager
def answering_services() -> Iterator[None]:
    """Services that are named and do not answer become a CommandError."""
    try:
        yield
    except BusError as error:
        raise CommandError(f"Redis does not answer ({_one_line(error)}): {_HELP}.", returncode=NO_SERVICES) from error
    except AWAY as error:
        message = f"The database does not answer ({_one_line(error)}): {_HELP}."
        raise CommandError(message, returncode=NO_SERVICES) from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
