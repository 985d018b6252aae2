"""What a worker recorded, start by start, replayed: each start's engine is told from its own beginning.

Knows logs and what was seen of them; refuses to know runs that might have been.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any, NamedTuple

from gpu_worker.replay.checkpoint import fingerprint
from gpu_worker.replay.reality import Reality
from gpu_worker.replay.record_log import Boot, LogError, LogFile, Submitted
from gpu_worker.replay.rerun import NONSENSE, Diverged, check_next, entries_of, replay
from gpu_worker.replay.seen import Eye, Seen
from gpu_worker.replay.side_by_side import Show, beside
from scheduler_engine.cost import CostConstants
from scheduler_engine.request import RequestId


class Start(NamedTuple):
    """What a worker recorded from one start on, or of its later part; replayed."""

    files: Sequence[LogFile]
    boot: Boot
    reality: Reality


def looked_at(
    logs: Sequence[Sequence[LogFile]], processes: int, show: Show
) -> tuple[list[Start], list[dict[str, Any]]]:
    """All of them replayed, and those of earlier starts that cannot be: when their logs began, how many requests they
    hold, and why not. Raises LogError and Diverged.
    """
    starts: list[Start] = []
    left_out: list[dict[str, Any]] = []
    later: set[RequestId] = set()  # newest first, so that each start knows who came again after it
    for number, files in enumerate(reversed(logs)):
        boot = files[0].boot()
        try:
            reality = Reality(CostConstants(**boot.cost), int(boot.config["bytes_per_block"]), frozenset(later))
            _look_at(files, reality, processes, lambda done, number=number: show((number + done) / len(logs)))  # type: ignore[misc]
        except (LogError, Diverged, *NONSENSE) as error:
            is_ours = boot.engine == fingerprint()
            if not starts or (is_ours and not isinstance(error, LogError)):
                raise
            why = "its log is damaged" if is_ours else "another version of the engine decided then"
            began_us = boot.started_unix_us
            left_out.append({"began_unix_us": began_us, "requests": _num_requests(files), "why": why})
            continue
        reality.close()
        later |= reality.request_ids
        starts.append(Start(files, boot, reality))
    return starts[::-1], left_out[::-1]


def _num_requests(files: Sequence[LogFile]) -> int:
    """As far as they can be read."""
    found = 0
    with suppress(LogError):
        for entry in entries_of(files):
            found += isinstance(entry, Submitted)
    return found


def _look_at(files: Sequence[LogFile], reality: Reality, processes: int, show: Show) -> None:
    """Replay all of it. Where there may be two processes, and a file in the middle has the state that this engine can
    take up, the other one replays from there on.
    """
    first = _first_of_second_half(files) if processes > 1 else len(files)
    seen: list[Seen] = []
    with beside(functools.partial(_seen, files[first:])) if first < len(files) else nullcontext(lambda: seen) as rest:
        replayed = replay(files[:first], Eye(reality.see), lambda done, total: show(done / max(1, total)))
        if first < len(files):
            check_next(replayed, files[first].boot(), files[0])
        for each in rest():
            reality.see(each)


def _first_of_second_half(files: Sequence[LogFile]) -> int:
    """The file nearest to the middle from which a replay may begin; one past the last where there is none."""
    total, before, found = sum(file.num_bytes for file in files), 0, (1.0, len(files))
    for number, file in enumerate(files):
        boot = file.boot() if number else None
        if boot is not None and boot.checkpoint is not None and boot.engine == fingerprint():
            found = min(found, (abs(before / max(1, total) - 0.5), number))
        before += file.num_bytes
    return found[1]


def _seen(files: Sequence[LogFile]) -> list[Seen]:
    found: list[Seen] = []
    replay(files, Eye(found.append))
    return found
