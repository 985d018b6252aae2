"""Memory that is read from end to end in every step, in pages of 2 MB. Knows Linux; elsewhere it does nothing."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator
from pathlib import Path

LARGE = 2 << 20
COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1, which Python's mmap does not name


def collapse() -> None:
    """Move what the process has allocated so far into large pages, where the system gives any.

    A step reads all weights once, and a processor finds each page's address anew; in a virtual machine that is a walk
    through two tables. To be called once weights are there: it takes about as long as a copy. What is mapped and not
    yet written stays so.
    """
    with contextlib.suppress(OSError, AttributeError):  # another system or another C library
        madvise = ctypes.CDLL("libc.so.6").madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for first, last in _anonymous():
            madvise(first, last - first, mmap.MADV_HUGEPAGE)  # what is refused stays as it is
            madvise(first, last - first, COLLAPSE)


def _anonymous() -> Iterator[tuple[int, int]]:
    """Whole large pages of memory that belongs to no file, as addresses."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            first, last = (int(address, 16) for address in bounds.split("-"))
            first, last = -(-first // LARGE) * LARGE, last // LARGE * LARGE
            if first < last:
                yield first, last
