"""What services refuse for a reason that the API answers with a status of its own."""

from __future__ import annotations

from datetime import datetime

from django.core.exceptions import ValidationError


class StillGood(ValidationError):
    """A former secret was promised until a moment that has not come: what would end it before was not done."""

    def __init__(self, what: str, until: datetime, otherwise: str) -> None:
        super().__init__(f"Nothing was done: {what} is good until {until:%Y-%m-%d %H:%M:%S} UTC; {otherwise}.")
