"""The policy in force, as everybody finds it in Redis. Knows how it is kept; refuses to know how it is edited."""

from __future__ import annotations

import json
import time
from typing import cast

import redis

from scheduler_engine.errors import PolicyError
from scheduler_engine.policy import snapshot_from_dict
from wire.bus import BadEntry
from wire.messages import PolicyChanged
from wire.redis_bus.connection import bus_errors, script
from wire.redis_keys import POLICY_POLL_S, Keys


def write_policy(client: redis.Redis, keys: Keys, *, version: int, document: str) -> bool:
    """Put a policy in force for everybody; False, and nothing is changed, where a newer version is in force.

    ``document`` is the JSON text of ``policy:current``. Raises BusError.
    """
    with bus_errors():
        names = (keys.policy_current, keys.policy_version, keys.policy_changed)
        return bool(client.register_script(script("write_policy"))(keys=names, args=[version, document]))


class PolicyPoll:
    """Looks every 500 ms whether another version is in force. Always: each version is reported once."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._version: bytes | None = None
        self._due_s = 0.0

    @property
    def wait_s(self) -> float:
        """Until it is time to look again."""
        return max(0.0, self._due_s - time.monotonic())

    def catch_up(self, version: int) -> list[PolicyChanged | BadEntry]:
        """``look``, without waiting for its time where ``version`` is newer than what was found."""
        if version > int(self._version or 0):
            self._due_s = 0.0
        return self.look()

    def look(self) -> list[PolicyChanged | BadEntry]:
        """A policy that was not there the last time, or an entry that says why it cannot be one."""
        if self.wait_s:
            return []
        self._due_s = time.monotonic() + POLICY_POLL_S
        version = cast(bytes | None, self._client.get(self._keys.policy_version))
        if version is None or version == self._version:
            return []
        document = cast(bytes | None, self._client.get(self._keys.policy_current))
        self._version = version
        try:
            return [PolicyChanged(snapshot=snapshot_from_dict(json.loads(document or b"")["policy"]))]
        except (PolicyError, ValueError, KeyError, TypeError) as error:
            return [BadEntry("policy:current", f"policy {version.decode()}: {error}")]
