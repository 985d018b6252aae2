"""Content on disk under opaque names: written as a draft, kept whole or not at all. Refuses to know whose it is."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Self
from uuid import uuid4

DRAFTS = "drafts"
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


class StorageFull(Exception):
    """The disk has no room for this content; nothing of it is left."""


class ContentLost(Exception):
    """A row names content that is not on the disk."""


class Draft:
    """Content on its way; on the disk from its first byte. Always: gone unless ``keep`` has returned."""

    def __init__(self, root: Path) -> None:
        self.name = uuid4().hex
        self._final = _place(root, self.name)
        self._path = root / DRAFTS / self.name
        self.num_bytes = 0
        self._file: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._file is not None:
            self._file.close()
        self._path.unlink(missing_ok=True)  # nothing after ``keep``, which has moved it

    def write(self, data: bytes) -> None:
        """Raises StorageFull."""
        with _room():
            self._opened().write(data)
        self.num_bytes += len(data)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
        return self._file

    def keep(self) -> str:
        """Under its final name, safe from a crash. Raises StorageFull."""
        with _room():
            with self._opened() as file:
                file.flush()
                os.fsync(file.fileno())
            self._final.parent.mkdir(parents=True, exist_ok=True)
            self._path.replace(self._final)
        return self.name


class Storage:
    """A folder of contents. Always: a name holds whole content or nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def draft(self) -> Draft:
        return Draft(self._root)

    def open(self, name: str) -> BinaryIO:
        """Raises ContentLost."""
        try:
            return _place(self._root, name).open("rb")
        except FileNotFoundError as error:
            raise ContentLost(f"content {name} is not on the disk") from error

    def remove(self, name: str) -> None:
        """Nothing where it is gone already."""
        _place(self._root, name).unlink(missing_ok=True)

    def names_older_than(self, age_s: float) -> Iterator[str]:
        """Contents last written so long ago."""
        before = time.time() - age_s
        for path in self._root.glob("??/*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    yield path.name

    def drop_drafts_older_than(self, age_s: float) -> None:
        """What a killed process has left."""
        before = time.time() - age_s
        for path in (self._root / DRAFTS).glob("*"):
            with suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    path.unlink()


def _place(root: Path, name: str) -> Path:
    return root / name[:2] / name


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise StorageFull("the disk is full") from error
        raise
