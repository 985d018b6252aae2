"""One decision of the engine in 96 bytes: about whom, what, why, and what the other ways would have cost.

Knows the layout and the ring that keeps the newest; refuses to know why a decision was taken.
"""

from __future__ import annotations

import enum
import struct
from typing import NamedTuple

from scheduler_engine.events import FinishReason, Lever, RejectReason, Resource

NOT_OPEN = 2**32 - 1  # a lever that was not open, or a cost beyond 71 minutes
MOST = 2**63 - 1


class Action(enum.IntEnum):
    """What was decided."""

    QUEUED = 1  # let in at the door
    REFUSED = 2  # not let in: the outcome says why
    ADMITTED = 3  # into a slot for the first time
    RESUMED = 4  # into a slot again
    PREEMPTED = 5  # out of its slot, by the lever, for the resource
    HELD = 6  # decodes of a class sit steps out (sequence 0, ``need_slots`` of them)
    BLOCKED = 7  # the head of its class stays where it is: the cause says why
    BYPASSED = 8  # a head that stays was passed by ``other``
    SHED = 9  # ended before it started: the outcome says why
    FINISHED = 10  # ended: the outcome says how
    SAVED = 11  # its copy out has completed


class Cause(enum.IntEnum):
    """What a request waits for, while it waits."""

    NONE = 0
    STEP_UNDER_WAY = 1  # it came in the middle of a step
    SLOTS = 2
    MEMORY = 3
    HEADROOM = 4  # memory is free, and those who run will need it
    STEP_BUDGET = 5  # no room in the step's tokens or time
    STEP_TIME = 6  # its class is held back for the promise of a class above
    EARMARK = 7  # what is free is set apart for another head
    COPY_FENCE = 8  # what was pushed out for it is still being copied
    COPY_TURN = 9  # no copy in beside a copy out
    SAVING = 10  # its own copy out is under way
    OWN_TENANT = 11  # an earlier promise of its own tenant comes first
    OTHER_TENANT = 12  # a tenant of its class that had less service comes first
    CONCURRENCY = 13  # its tenant runs as many as it may
    PATIENCE = 14  # others end soon: cheaper than to push somebody out
    POLICY_PAUSE = 15  # its class is paused: a class above is in overload
    PREFIX = 16  # the same prefix is being computed by somebody else
    SHARE = 17  # the last slots and blocks of its class are for tenants that have less
    RESTING = 18  # memory was just taken from its class: too soon to come back
    GOVERNOR = 19  # switching costs too much: its class runs fewer at once

    @property
    def label(self) -> str:
        return self.name.lower()


OUTCOMES: tuple[str, ...] = ("", *(reason.value for reason in (*RejectReason, *FinishReason)))
RESOURCES: tuple[str, ...] = ("", *(resource.value for resource in Resource))
LEVERS: tuple[str, ...] = ("", *(lever.value for lever in Lever))
_OUTCOME_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_RESOURCE_CODES = {resource: code for code, resource in enumerate(RESOURCES)}
_LEVER_CODES = {lever: code for code, lever in enumerate(LEVERS)}


class LeverCosts(NamedTuple):
    """Device time, microseconds, that each way to make room was predicted to cost; NOT_OPEN where it was none."""

    hold_us: int = NOT_OPEN
    swap_us: int = NOT_OPEN
    recompute_us: int = NOT_OPEN
    wait_us: int = NOT_OPEN


NO_COSTS = LeverCosts()


class DecisionRecord(NamedTuple):
    """Fields in the order of their bytes, little endian: five of 8, eight of 1, eight of 4, two of 8 = 96 bytes.

    ``sequence`` numbers requests in order of arrival, from 1; ``other`` is the preemptor's, or that of the request
    let by. ``previous`` is the number (from 1) of the record before it about the same request, 0 for none.
    ``holder`` is 1 + rank of the class that holds what is waited for, 0 for none.
    """

    step: int
    now_us: int
    sequence: int
    other: int
    previous: int
    action: int
    cause: int
    outcome: int
    resource: int
    lever: int
    rank: int
    holder: int
    reserved: int
    fit_version: int
    hold_us: int
    swap_us: int
    recompute_us: int
    wait_us: int
    need_slots: int
    need_blocks: int
    free_blocks: int
    slack_us: int
    service: int

    @property
    def outcome_label(self) -> str:
        return OUTCOMES[self.outcome]

    @property
    def lever_label(self) -> str:
        return LEVERS[self.lever]

    @property
    def resource_label(self) -> str:
        return RESOURCES[self.resource]

    def __str__(self) -> str:
        words = [Action(self.action).name.lower(), f"request {self.sequence}" if self.sequence else "whole class"]
        words += [Cause(self.cause).label] if self.cause else []
        words += [label for label in (self.outcome_label, self.lever_label, self.resource_label) if label]
        words += [f"other {self.other}"] if self.other else []
        return f"step {self.step} at {self.now_us} us: {', '.join(words)}; {self._asdict()}"


_LAYOUT = struct.Struct("<QqQQQ8B8Iqq")
RECORD_BYTES = _LAYOUT.size


def outcome_code(reason: RejectReason | FinishReason | None) -> int:
    return 0 if reason is None else _OUTCOME_CODES[reason]


def resource_code(resource: Resource | None) -> int:
    return 0 if resource is None else _RESOURCE_CODES[resource]


def lever_code(lever: Lever | None) -> int:
    return 0 if lever is None else _LEVER_CODES[lever]


pack = _LAYOUT.pack  # the fields of a DecisionRecord, in order, each within its bytes


def unpack(body: bytes) -> DecisionRecord:
    return DecisionRecord._make(_LAYOUT.unpack(body))


def unpack_all(body: bytes) -> list[DecisionRecord]:
    """The records of one step."""
    return [DecisionRecord._make(fields) for fields in _LAYOUT.iter_unpack(body)]


class RecordRing:
    """The newest ``size`` records, each under its number (from 1). Always: at most ``size`` are kept."""

    def __init__(self, size: int) -> None:
        self.num_written = 0
        self._size = size
        self._records: list[bytes] = []

    def append(self, body: bytes) -> int:
        """Its number."""
        if len(self._records) < self._size:
            self._records.append(body)
        else:
            self._records[self.num_written % self._size] = body
        self.num_written += 1
        return self.num_written

    def get(self, number: int) -> DecisionRecord | None:
        """None for one that has been overwritten, and for 0."""
        if not max(0, self.num_written - self._size) < number <= self.num_written:
            return None
        return unpack(self._records[(number - 1) % self._size])
