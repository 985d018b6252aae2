"""The recorded log as a file: what an entry is, how entries become frames, and how much of a file can be trusted.

A file is a magic line, a format byte, then frames of (length, CRC-32, deflated msgpack array of entries). A frame that
was being written when the process died is recognised and left out. Knows bytes; refuses to know what entries mean.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gpu_worker.replay.prefix_names import Run

MAGIC = b"rubato recorded log\n"
FORMAT = 1
SUFFIX = ".rlog"
_FRAME = struct.Struct("<II")
_MOST_FRAME_BYTES = 1 << 30
_MINUTE_US = 60_000_000
LINK_BYTES = 4


class LogError(Exception):
    """A log that cannot be read; the sentence says which file, where and why."""


class Boot(msgspec.Struct, array_like=True, tag="boot", frozen=True):
    """First in each file: what the engine was made of, and, in a file that continues another, its state.

    ``engine`` is the fingerprint of the engine's source. ``digest`` is that of the step before the first one here.
    """

    started_unix_us: int
    worker_id: str
    epoch: int
    model: str
    engine: str
    config: dict[str, Any]
    cost: dict[str, Any]
    policy: dict[str, Any]
    now_us: int
    step: int
    digest: str
    checkpoint: bytes | None = None


class Submitted(msgspec.Struct, array_like=True, tag="submit", frozen=True):
    """``fields`` of the Request that differ from its defaults. No token ids; ``prefix_runs`` are its prefix keys."""

    at_us: int
    fields: dict[str, Any]
    num_prompt_tokens: int
    num_delivered_tokens: int = 0
    prefix_runs: tuple[Run, ...] = ()


class Cancelled(msgspec.Struct, array_like=True, tag="cancel", frozen=True):
    at_us: int
    request_id: str
    reason: str


class Named(msgspec.Struct, array_like=True, tag="name", frozen=True):
    """Blocks of output that others may find from now on."""

    request_id: str
    prefix_runs: tuple[Run, ...]


class Policy(msgspec.Struct, array_like=True, tag="policy", frozen=True):
    policy: dict[str, Any]


class ServedElsewhere(msgspec.Struct, array_like=True, tag="elsewhere", frozen=True):
    """What other workers had charged to a tenant."""

    priority_class: int
    tenant_id: str
    gpu_us: int


class Drained(msgspec.Struct, array_like=True, tag="drain", frozen=True):
    """From the next plan on nobody was let in."""


class Stepped(msgspec.Struct, array_like=True, tag="step", frozen=True):
    """One plan and its result. Rows are named by their index in the plan.

    ``link``: first LINK_BYTES of the digest after the step. ``records``: the step's decision records.
    """

    planned_us: int
    applied_us: int
    duration_us: int
    link: bytes
    records: bytes = b""
    stopped_rows: tuple[int, ...] = ()
    failed_rows: tuple[tuple[int, str, bool], ...] = ()
    completed_copies: tuple[str, ...] = ()


class Closed(msgspec.Struct, array_like=True, tag="closed", frozen=True):
    """Last in a file that was closed in order. ``is_end``: nothing follows in another one."""

    num_steps: int
    digest: str
    is_end: bool


Input = Submitted | Cancelled | Named | Policy | ServedElsewhere | Drained
Entry = Boot | Input | Stepped | Closed

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[Entry])


def frame(entries: Sequence[Entry]) -> bytes:
    body = zlib.compress(_encoder.encode(entries), 1)
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def begin(file: BinaryIO) -> None:
    file.write(MAGIC + bytes([FORMAT]))


class LogFile:
    """One file, read from its beginning. ``is_cut`` becomes True where the file ends in the middle of a frame;
    ``written_unix_us`` is when it was last written to.

    Raises LogError for a file that is none, is of a newer format, or is damaged before its end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_cut = False
        try:
            stat = path.stat()
            self.num_bytes, self.written_unix_us = stat.st_size, stat.st_mtime_ns // 1_000
            with path.open("rb") as file:
                self._check_head(file.read(len(MAGIC) + 1))
        except OSError as error:
            raise LogError(f"{path}: {error.strerror}") from error

    def _check_head(self, head: bytes) -> None:
        if not head.startswith(MAGIC) or len(head) == len(MAGIC):
            raise LogError(f"{self.path} is not a recorded log: it does not begin with {MAGIC.decode().strip()!r}")
        if head[-1] != FORMAT:
            raise LogError(f"{self.path} has format {head[-1]}, and this program reads format {FORMAT}")

    def boot(self) -> Boot:
        """Its first entry."""
        for _, entries in self.frames():
            if isinstance(entries[0], Boot):
                return entries[0]
            break
        raise LogError(f"{self.path} does not begin with what the engine was made of: its first frame is missing")

    def frames(self) -> Iterator[tuple[int, list[Entry]]]:
        """(offset of its end, entries) of each whole frame."""
        with self.path.open("rb") as file:
            offset = len(file.read(len(MAGIC) + 1))
            while head := file.read(_FRAME.size):
                body = b""
                if len(head) == _FRAME.size:
                    length, checksum = _FRAME.unpack(head)
                    body = file.read(min(length, _MOST_FRAME_BYTES))
                if len(head) < _FRAME.size or len(body) < length:
                    self.is_cut = True
                    return
                yield offset + len(head) + len(body), self._entries(body, checksum, offset)
                offset += len(head) + len(body)

    def _entries(self, body: bytes, checksum: int, offset: int) -> list[Entry]:
        if zlib.crc32(body) != checksum:
            raise LogError(f"{self.path} is damaged at byte {offset}: the checksum of a frame is wrong")
        try:
            return _decoder.decode(zlib.decompress(body))
        except (zlib.error, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise LogError(f"{self.path}: the frame at byte {offset} cannot be understood: {error}") from error


def log_files(path: Path, minutes: int | None = None) -> list[LogFile]:
    """The file, or a folder's newest files that continue one another, oldest first. With ``minutes`` only so many of
    the newest that the last one begins that long after the first. Raises LogError.
    """
    return log_starts(path, minutes)[-1]


def log_starts(path: Path, minutes: int | None = None) -> list[list[LogFile]]:
    """``log_files``; with ``minutes`` one such list for each start of the worker whose files were written within them,
    oldest first: of the worker that began the newest file. Raises LogError.
    """
    if not path.is_dir():
        return [[LogFile(path)]]
    found: list[list[LogFile]] = []  # newest first, files too
    newest: Boot | None = None
    origin: tuple[int, str] | None = None  # of the start whose files are being found; None once its first one is
    for file, boot in _newest_first(path):
        newest = newest or boot
        if boot.worker_id != newest.worker_id:
            continue
        age_us = newest.started_unix_us - boot.started_unix_us
        if origin != (boot.epoch, boot.model):
            is_old = minutes is None or newest.started_unix_us - file.written_unix_us > minutes * _MINUTE_US
            if found and is_old:
                break
            found.append([])
        found[-1].append(file)
        origin = None if boot.checkpoint is None else (boot.epoch, boot.model)
        if minutes is not None and age_us >= minutes * _MINUTE_US:
            break
    if not found:
        raise LogError(f"{path} holds no recorded log (*{SUFFIX})")
    return [files[::-1] for files in found[::-1]]


def _newest_first(path: Path) -> Iterator[tuple[LogFile, Boot]]:
    """A folder's files. Those whose process died before their first frame was whole hold nothing, and are left out, but
    for the newest: LogError.
    """
    is_newest = True
    for each in sorted(path.glob(f"*{SUFFIX}"), reverse=True):
        try:
            file = LogFile(each)
            yield file, file.boot()
        except LogError:
            if is_newest:
                raise
        is_newest = False
