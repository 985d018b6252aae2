"""The thread that writes the log, so that a slow disk never holds up a step; the folder it keeps within its bound.

Knows files and bytes; refuses to know engines. A disk that fails ends the recording, never the serving.
"""

from __future__ import annotations

import datetime
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

from gpu_worker.replay import record_log
from gpu_worker.replay.record_log import SUFFIX, Boot, Entry
from gpu_worker.serving.outage import say

MOST_BACKLOG = 256  # batches that wait for the disk; more, and the recording ends
JOIN_LIMIT_S = 5.0
_PRIVATE = 0o600  # who asked for how much is nobody else's business

Work = Boot | list[Entry]


class LogWriter:
    """Always: a file holds whole frames in order, except at the end of one whose process died; the folder's recorded
    logs take at most ``limit_bytes`` and one frame.

    A Boot begins a file; entries go into the file begun last.
    """

    def __init__(
        self, folder: Path, limit_bytes: int, unix_s: Callable[[], float] = time.time, *, may_wait: bool = False
    ) -> None:
        self.num_entry_bytes = 0  # in the file being written, without its head
        self.has_failed = False
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._unix_s = unix_s
        self._may_wait = may_wait
        self._work: queue.Queue[Work | None] = queue.Queue(MOST_BACKLOG)
        self._file: BinaryIO | None = None
        self._num_file_bytes = 0
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def put(self, work: Work) -> None:
        """Blocks only where it may; nothing more is taken once the disk has failed or is too far behind."""
        if self.has_failed:
            return
        try:
            self._work.put(work, block=self._may_wait)
        except queue.Full:
            self._fail("the disk is too slow")

    def catch_up(self) -> None:
        """Wait until all that was put is written."""
        self._work.join()

    def close(self) -> None:
        """Write what is left."""
        if not self.has_failed:
            self._work.put(None)
        self._thread.join(JOIN_LIMIT_S)

    def _fail(self, why: str) -> None:
        if not self.has_failed:
            self.has_failed = True
            say(f"recording to {self._folder} has ended: {why}")

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                self._write(work)
                self._work.task_done()
        except OSError as error:
            self._fail(error.strerror or str(error))
        finally:
            if self._file is not None:
                self._file.close()

    def _write(self, work: Work) -> None:
        if isinstance(work, Boot):
            self._begin(work)
            entries: Sequence[Entry] = [work]
        else:
            entries = work
        if self._file is None:
            return
        body = record_log.frame(entries)
        self._file.write(body)
        self._num_file_bytes += len(body)
        if work is entries:
            self.num_entry_bytes += len(body)
        self._keep_within(self._limit_bytes)

    def _begin(self, boot: Boot) -> None:
        if self._file is not None:
            self._file.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        moment = datetime.datetime.fromtimestamp(self._unix_s(), datetime.UTC)
        stem = f"{moment:%Y%m%dT%H%M%S}-{boot.worker_id}-{boot.epoch}-{boot.step:09}"
        self._path = self._folder / f"{stem}{SUFFIX}"
        number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE)
        self._file = os.fdopen(number, "wb", buffering=0)
        record_log.begin(self._file)
        self.num_entry_bytes = self._num_file_bytes = 0

    def _keep_within(self, limit_bytes: int) -> None:
        """Delete the oldest files, never the one being written. Names begin with the time: they sort by age."""
        others = sorted(path for path in self._folder.glob(f"*{SUFFIX}") if path != self._path)
        sizes = [path.stat().st_size for path in others]
        excess = self._num_file_bytes + sum(sizes) - limit_bytes
        for path, size in zip(others, sizes, strict=True):
            if excess <= 0:
                return
            path.unlink()
            excess -= size
