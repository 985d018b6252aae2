"""Which handler answers which method and path of /v1. Knows patterns; refuses to know what handlers do.

In a pattern ``*`` stands for one part that is not empty, and a last ``**`` for all that is left, with its slashes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.admission import Denied
from gateway.asking import Ask
from gateway.auth import Caller
from gateway.door import Entered, Keep
from gateway.runtime import Runtime
from gateway.v1.http import Exchange
from gateway.v1.once import Once


class Enter(Protocol):
    """The door's way in, or the one of an Idempotency-Key."""

    async def __call__(
        self, caller: Caller, asks: Sequence[Ask], keep: Keep | None = None
    ) -> list[Entered] | Denied: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One authenticated request. ``arguments`` are what the pattern's stars stood for; ``once`` what an Idempotency-Key
    holds together.
    """

    exchange: Exchange
    runtime: Runtime
    caller: Caller
    arguments: tuple[str, ...]
    once: Once | None = None

    @property
    def enter(self) -> Enter:
        return self.runtime.door.enter if self.once is None else self.once.enter


Handler = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    pattern: str
    handler: Handler
    reads_query: bool = False  # else a query is refused

    def match(self, path: str) -> tuple[str, ...] | None:
        """What the stars stand for; None for another path."""
        parts, wanted = path.split("/"), self.pattern.split("/")
        if wanted[-1] == "**" and len(parts) >= len(wanted):
            parts = [*parts[: len(wanted) - 1], "/".join(parts[len(wanted) - 1 :])]
        if len(parts) != len(wanted):
            return None
        found = []
        for part, want in zip(parts, wanted, strict=True):
            if want in ("*", "**"):
                if not part:
                    return None
                found.append(part)
            elif part != want:
                return None
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Match:
    handler: Handler
    arguments: tuple[str, ...]
    reads_query: bool


def find(routes: Sequence[Route], method: str, path: str) -> Match | tuple[str, ...]:
    """The handler, or the methods that this path does have."""
    methods = []
    for route in routes:
        arguments = route.match(path)
        if arguments is None:
            continue
        if route.method == method:
            return Match(route.handler, arguments, route.reads_query)
        methods.append(route.method)
    return tuple(methods)
