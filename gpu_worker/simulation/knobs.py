"""A policy with some fields of its classes changed, as ``CLASS.FIELD=VALUE`` on a command line says it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from scheduler_engine.errors import PolicyError
from scheduler_engine.policy import PolicySnapshot, snapshot_from_dict, snapshot_to_dict


def with_changes(policy: PolicySnapshot, changes: Sequence[str]) -> PolicySnapshot:
    """``all.FIELD=VALUE`` changes every class; ``null`` is no limit. Raises PolicyError naming the field."""
    document = snapshot_to_dict(policy)
    for change in changes:
        where, equals, text = change.partition("=")
        label, dot, field = where.partition(".")
        if not (equals and dot):
            raise PolicyError(f"--set {change}: must be CLASS.FIELD=VALUE, as in interactive.step_cap_percent=20")
        labels = list(document["classes"]) if label == "all" else [label]
        for each in labels:
            if each not in document["classes"]:
                raise PolicyError(f"--set {change}: the class must be interactive, default, batch or all")
            document["classes"][each][field] = _value(text)
    return replace(snapshot_from_dict(document), version=policy.version)


def _value(text: str) -> object:
    """A text that is no JSON stays a text, for the policy to refuse by name."""
    try:
        return json.loads(text)
    except ValueError:
        return text
