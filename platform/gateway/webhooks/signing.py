"""Secrets and signatures of the Standard Webhooks specification (standardwebhooks.com), symmetric, version 1.

signature = "v1," + base64( HMAC-SHA256( secret, id + "." + timestamp + "." + body ) )

Written out here because the specification's own library brings six packages for these lines; a test holds its vector.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from uuid import UUID

from django.conf import settings

PREFIX = "whsec_"


def secret_of(endpoint_id: UUID, number: int) -> str:
    """Follows from the platform's own secret key: another SECRET_KEY makes other secrets."""
    told = f"webhook {endpoint_id} {number}".encode()
    return PREFIX + base64.b64encode(hmac.digest(settings.SECRET_KEY.encode(), told, hashlib.sha256)).decode()


def signature(secret: str, message_id: str, timestamp_s: int, body: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(PREFIX))
    signed = f"{message_id}.{timestamp_s}.".encode() + body
    return "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
