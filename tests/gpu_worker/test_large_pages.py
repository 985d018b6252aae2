"""Weights move into large pages, where the system has some, and stay what they were."""

from __future__ import annotations

import ctypes
import mmap
import sys
from pathlib import Path

import pytest

from gpu_worker.device import large_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages of 2 MB are asked for on Linux only")


def large_kib(first: int) -> int:
    """Of the mapping that holds an address."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        bounds, _, rest = line.partition(" ")
        if rest.startswith("rw-p"):
            start, _, end = bounds.partition("-")
            if int(start, 16) <= first < int(end, 16):
                return next(int(field.split()[1]) for field in lines if field.startswith("AnonHugePages:"))
    raise AssertionError("no such mapping")


def test_what_is_allocated_lies_in_large_pages_and_holds_the_same_bytes() -> None:
    memory = mmap.mmap(-1, 16 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = bytes(range(256)) * (1 << 16)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    before = large_kib(first)
    large_pages.collapse()
    if large_kib(first) == before == 0:
        pytest.skip("this system has no large pages, or no free ones")
    assert large_kib(first) >= 8 << 10
    assert memory[:] == bytes(range(256)) * (1 << 16)


def test_what_was_never_written_takes_no_memory() -> None:
    memory = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    large_pages.collapse()
    assert large_kib(first) < 16 << 10  # neighbours may share a mapping's first and last page


def test_where_nothing_is_known_of_memory_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(_: Path) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", absent)
    large_pages.collapse()
    with pytest.raises(FileNotFoundError):
        list(large_pages._anonymous())
