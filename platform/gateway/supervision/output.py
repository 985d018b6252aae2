"""Lines of many processes on one terminal, each behind its process's name."""

from __future__ import annotations

import os
from typing import TextIO

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)  # calm first, bright when there are more processes than colours
_LONGEST_LINE = 4_000


class Output:
    """Always: one write per line, so that lines never mix. Colour only on a terminal, and never under NO_COLOR."""

    def __init__(self, stream: TextIO, width: int = 8) -> None:
        self._stream = stream
        self._width = width
        self._colours: dict[str, int] = {}
        self._is_coloured = stream.isatty() and "NO_COLOR" not in os.environ

    def line(self, name: str, text: str) -> None:
        name_column = f"{name:<{self._width}} |"
        if self._is_coloured:
            colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
            name_column = f"\x1b[{colour}m{name_column}\x1b[0m"
        self._stream.write(f"{name_column} {text[:_LONGEST_LINE]}\n")
        self._stream.flush()


class LineBuffer:
    """Bytes of a pipe on their way to whole lines; keeps the last ones, for the sentence that explains a death."""

    def __init__(self, num_kept: int = 5) -> None:
        self._rest = b""
        self._num_kept = num_kept
        self.last_lines: list[str] = []

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes. Empty ``data`` is the end and completes what is left."""
        whole = self._rest + data if data else self._rest + b"\n"
        *complete, self._rest = whole.split(b"\n")
        lines = [line.decode("utf-8", "replace").rstrip() for line in complete]
        spoken = [line for line in lines if line]
        self.last_lines = (self.last_lines + spoken)[-self._num_kept :]
        return spoken
