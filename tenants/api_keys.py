"""API keys as text: making, parsing and digesting them. Knows no database and no request.

Format: ``sk_<env>_<12 base62 public id>_<43 base62 secret><6 base62 CRC32>``. The checksum covers everything before
it, so a
typo is refused without a look-up. Only the SHA-256 of the secret is ever stored: 256 random bits need no slow hash.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import re
import secrets
import string
import zlib
from dataclasses import dataclass

ALPHABET = string.digits + string.ascii_uppercase + string.ascii_lowercase
PUBLIC_ID_LENGTH = 12
SECRET_LENGTH = 43  # 62**43 > 2**256
CHECKSUM_LENGTH = 6  # 62**6 > 2**32

_SHAPE = re.compile(
    r"(?P<body>sk_(?P<env>[a-z]{1,16})_"
    rf"(?P<public_id>[0-9A-Za-z]{{{PUBLIC_ID_LENGTH}}})_"
    rf"(?P<secret>[0-9A-Za-z]{{{SECRET_LENGTH}}}))"
    rf"(?P<checksum>[0-9A-Za-z]{{{CHECKSUM_LENGTH}}})"
)
_NOBODY_SHA256 = "0" * 64
_ENVIRONMENT = re.compile(r"[a-z]{1,16}")


class MalformedKey(Exception):
    """The text is no key of ours: wrong shape or wrong checksum. Never carries the text."""


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A well-formed key; whether it opens anything is the database's knowledge."""

    env: str
    public_id: str
    secret: str


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key just made. Always: ``text`` is shown once and stored nowhere."""

    text: str
    public_id: str
    secret_sha256: str
    last4: str


def make(env: str, public_id: str = "") -> NewKey:
    """A fresh key for an environment word such as ``live`` or ``demo``, or a fresh secret for a public id that exists.

    Raises ValueError for another kind of word.
    """
    if not _ENVIRONMENT.fullmatch(env):
        raise ValueError(f"env must be 1 to 16 small letters, not {env!r}")
    public_id = public_id or _random_text(PUBLIC_ID_LENGTH)
    secret = _random_text(SECRET_LENGTH)
    body = f"sk_{env}_{public_id}_{secret}"
    text = body + _checksum(body)
    return NewKey(text=text, public_id=public_id, secret_sha256=digest(secret), last4=text[-4:])


def parse(text: str) -> ParsedKey:
    """Takes a key apart. Raises MalformedKey on a wrong shape or checksum."""
    match = _SHAPE.fullmatch(text)
    if match is None:
        raise MalformedKey("a key looks like sk_<env>_<public id>_<secret>")
    if _checksum(match["body"]) != match["checksum"]:
        raise MalformedKey("the checksum does not fit: the key was mistyped or cut")
    return ParsedKey(env=match["env"], public_id=match["public_id"], secret=match["secret"])


class Match(enum.Enum):
    """Which of a key's two secrets was sent."""

    NONE = "none"
    CURRENT = "current"
    PREVIOUS = "previous"


def match(secret: str, current_sha256: str, previous_sha256: str) -> Match:
    """In constant time, also for a key that does not exist: give "" for its digests. Whether the previous secret is
    still in its grace, and whether the key has ended, is the caller's to ask.
    """
    sent = digest(secret)
    is_current = hmac.compare_digest(sent, current_sha256 or _NOBODY_SHA256)
    is_previous = hmac.compare_digest(sent, previous_sha256 or _NOBODY_SHA256)
    return Match.CURRENT if is_current else Match.PREVIOUS if is_previous else Match.NONE


def digest(secret: str) -> str:
    """SHA-256 of the secret part, 64 hexadecimal digits; compare with ``hmac.compare_digest``."""
    return hashlib.sha256(secret.encode("ascii")).hexdigest()


def _random_text(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


def _checksum(body: str) -> str:
    value = zlib.crc32(body.encode("ascii"))
    digits = []
    for _ in range(CHECKSUM_LENGTH):
        value, digit = divmod(value, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(reversed(digits))
