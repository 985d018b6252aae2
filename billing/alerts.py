"""Findings that a person must look at, kept as rows. Knows no cure: the books are repaired by adjustment entries
only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from billing.messages import LedgerMessage
from billing.models import LedgerAlert


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that must not happen and did. ``reason`` is for machines, ``detail`` for people; ASCII only."""

    subject: str
    reason: str
    detail: str

    @property
    def fingerprint(self) -> str:
        """Equal for equal findings, so that a redelivery does not repeat the alert."""
        return hashlib.sha256("\n".join((self.subject, self.reason, self.detail)).encode()).hexdigest()


def record(findings: Iterable[Finding]) -> int:
    """Keeps each distinct finding once. Returns how many were handed in."""
    rows = [
        LedgerAlert(
            subject=finding.subject, reason=finding.reason, detail=finding.detail, fingerprint=finding.fingerprint
        )
        for finding in findings
    ]
    LedgerAlert.objects.bulk_create(rows, ignore_conflicts=True)
    return len(rows)


def differs(reason: str, message: LedgerMessage, standing: object) -> Finding:
    """A message that says other than what stands in the books."""
    return Finding(str(message.operation_id), reason, ascii(f"came: {message!r}; stands: {standing!r}"))


def unpriced(message: LedgerMessage) -> Finding:
    """Tokens of a model and class that have no price: charged nothing."""
    return Finding(str(message.operation_id), "price_unknown", ascii(message))


def unwritable(message: LedgerMessage, error: Exception) -> Finding:
    """A message that the database refuses to hold."""
    return Finding(str(message.operation_id), "unwritable", ascii(f"{type(error).__name__}: {error}; {message!r}"))


def unreadable(entry_id: str, reason: str) -> Finding:
    """An entry of the usage stream that is no message of ours."""
    return Finding(ascii(entry_id)[1:-1][:120], "unreadable", ascii(reason))
