"""Small numbers in place of prefix keys: what a log can hold.

A prompt of 4,000 tokens has 250 keys of 16 bytes, and nobody else will ever have most of them. The engine only compares
keys; told other names for the same things, it decides the same. Knows keys and names; refuses to know blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Run = tuple[int, int]  # first number, how many

_NAME_BYTES = 6
_LEAST_TO_PRUNE = 1 << 16


class PrefixNames:
    """Always: a key that the engine may still meet keeps its name, and no name is given twice."""

    def __init__(self) -> None:
        self._names: dict[bytes, bytes] = {}
        self._num_given = 0
        self._prune_at = _LEAST_TO_PRUNE

    def of(self, keys: Sequence[bytes]) -> list[bytes]:
        """Names of keys, new ones for those that have none."""
        names, found = self._names, []
        for key in keys:
            name = names.get(key)
            if name is None:
                name = names[key] = self._num_given.to_bytes(_NAME_BYTES, "big")
                self._num_given += 1
            found.append(name)
        return found

    @property
    def is_full(self) -> bool:
        """True once it is worth asking the engine what it still knows."""
        return len(self._names) >= self._prune_at

    def prune(self, names_in_use: Iterable[bytes]) -> None:
        """Forget the keys whose names the engine no longer knows."""
        used = frozenset(names_in_use)
        self._names = {key: name for key, name in self._names.items() if name in used}
        self._prune_at = max(_LEAST_TO_PRUNE, 2 * len(self._names))


def runs_of(names: Iterable[bytes]) -> tuple[Run, ...]:
    """Names as stretches of successive numbers: a shared beginning, then what is new."""
    runs: list[list[int]] = []
    for number in (int.from_bytes(name, "big") for name in names):
        if runs and number == runs[-1][0] + runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return tuple((first, count) for first, count in runs)


def names_of(runs: Iterable[Run]) -> list[bytes]:
    """Inverse of ``runs_of``."""
    return [number.to_bytes(_NAME_BYTES, "big") for first, count in runs for number in range(first, first + count)]
