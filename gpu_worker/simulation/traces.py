"""Request traces as arrivals: gzipped or plain CSV with lengths, and where they have them times and tenants.

Knows columns and units; refuses to guess at a row that is wrong.
"""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from gpu_worker.simulated import DeviceProfile
from gpu_worker.simulation.stories import Story
from gpu_worker.simulation.traffic import SECOND_US, Arrival, submit_of
from scheduler_engine.policy import PriorityClass

_REQUIRED = ("input_tokens", "output_tokens")


class TraceError(Exception):
    """A trace that cannot be read; the sentence names the file, the line and what would be right."""


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file and the class its requests are of; None: batch where the file has no times, else interactive."""

    path: Path
    priority_class: PriorityClass | None = None

    @classmethod
    def parse(cls, text: str) -> TraceFile:
        """``FILE`` or ``CLASS=FILE``. Raises ValueError naming the classes."""
        label, equals, path = text.partition("=")
        return cls(Path(path), PriorityClass.from_label(label)) if equals else cls(Path(text))

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".gz").removesuffix(".csv")


@dataclass(frozen=True, slots=True)
class Trace:
    """``num_cut``: requests whose prompt was cut so that prompt and output fit into the device's context."""

    arrivals: list[Arrival]
    num_cut: int


def read_traces(
    files: Sequence[TraceFile], device: DeviceProfile, *, speed: float = 1.0, limit: int | None = None
) -> Trace:
    """All files together, in order of arrival; ``speed`` 2 halves all gaps, ``limit`` takes the first of each file.

    Requests without times all come at 0. One without a tenant column is one tenant of the file's name. A request that
    is refused comes back when it was told to, twice. Raises TraceError.
    """
    arrivals: list[Arrival] = []
    num_cut = 0
    for file in files:
        for row in _rows(file, limit):
            arrival, was_cut = _arrival(row, file, device, speed)
            arrivals.append(arrival)
            num_cut += was_cut
    if not arrivals:
        raise TraceError(f"{', '.join(file.name for file in files)}: no requests")
    return Trace(sorted(arrivals, key=lambda arrival: arrival.at_us), num_cut)


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    at_s: float | None
    tenant: str | None
    prompt_tokens: int
    output_tokens: int


def _rows(file: TraceFile, limit: int | None) -> Iterator[_Row]:
    try:
        with _open(file.path) as text:
            reader = csv.DictReader(text)
            missing = [name for name in _REQUIRED if name not in (reader.fieldnames or ())]
            if missing:
                raise TraceError(f"{file.path}: no column {missing[0]}; a request trace has {' and '.join(_REQUIRED)}")
            for number, fields in enumerate(reader):
                if number == limit:
                    return
                yield _row(file, reader.line_num, fields)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{file.path}: {getattr(error, 'strerror', None) or error}") from None


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt", encoding="utf-8", newline="") if path.suffix == ".gz" else path.open(newline="")


def _row(file: TraceFile, line: int, fields: dict[str, str]) -> _Row:
    at_s = fields.get("arrival_s")
    try:
        row = _Row(
            line=line,
            at_s=None if at_s is None else float(at_s),
            tenant=fields.get("tenant"),
            prompt_tokens=int(fields["input_tokens"]),
            output_tokens=int(fields["output_tokens"]),
        )
    except (TypeError, ValueError):
        raise TraceError(
            f"{file.path}, line {line}: lengths must be integers and arrival_s a number of seconds"
        ) from None
    if row.prompt_tokens < 0 or row.output_tokens < 0 or not 0 <= (row.at_s or 0) < 1e9:
        raise TraceError(f"{file.path}, line {line}: lengths and arrival_s must not be negative, and times finite")
    return row


def _arrival(row: _Row, file: TraceFile, device: DeviceProfile, speed: float) -> tuple[Arrival, bool]:
    priority_class = file.priority_class
    if priority_class is None:
        priority_class = PriorityClass.BATCH if row.at_s is None else PriorityClass.INTERACTIVE
    most = device.shape.max_model_len
    output = max(1, min(row.output_tokens, most - 1))
    prompt = max(1, min(row.prompt_tokens, most - output))
    submit = submit_of(
        f"{file.name}-{row.line}",
        row.tenant or file.name,
        priority_class,
        prompt_tokens=prompt,
        max_tokens=output,
    )
    at_us = round((row.at_s or 0.0) * SECOND_US / speed)
    return Arrival(at_us, submit, num_tries=3), prompt < row.prompt_tokens or output < row.output_tokens


def story_of(trace: Trace) -> Story:
    """The trace as a story: the same for every seed, and loud is the tenant that sends half of a class or more."""
    last_us = trace.arrivals[-1].at_us
    in_class = Counter(each.submit.priority_class for each in trace.arrivals)
    senders = Counter((each.submit.priority_class, each.submit.tenant_id) for each in trace.arrivals)
    ((rank, tenant_id), count) = senders.most_common(1)[0]
    has_others = any(each_rank is rank and each != tenant_id for each_rank, each in senders)
    loud = tenant_id if has_others and 2 * count >= in_class[rank] else None
    return Story(lambda seed, pace: trace.arrivals, (0, -(-last_us // SECOND_US)), loud_tenant=loud)
