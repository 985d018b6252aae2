"""Is an input file one that can be run: every line read once, in constant memory, errors with their line numbers.

Knows the file's form and whose models they are; refuses to know rows and statuses.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from gateway.batches.endpoints import check, read_line
from gateway.errors import InvalidRequest, Reason, Refusal, invalid

MAX_LINES = 50_000
MOST_NUMBERS = 2 * MAX_LINES  # empty lines are skipped, and counted
MAX_ERRORS = 100  # told; the file is bad all the same
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # some editors put one at a file's head
LINE_BYTES = 65_536  # what a line may have besides its body


@dataclass(frozen=True, slots=True)
class GoodLine:
    """Where a line lies in the file: bytes ``[start, start + num_bytes)``."""

    number: int
    custom_id: str
    start: int
    num_bytes: int


class BadFile(Exception):
    """The file cannot be run; carries what to tell, in the API's shape."""

    def __init__(self, errors: list[dict[str, Any]]) -> None:
        super().__init__(f"{len(errors)} errors")
        self.errors = errors


@dataclass(slots=True, kw_only=True)
class Validator:
    """One pass over one file. Always: holds one line, a digest per line, and at most ``MAX_ERRORS`` errors."""

    endpoint: str
    models: Collection[str]
    body_limit_bytes: int
    errors: list[dict[str, Any]] = field(default_factory=list)
    models_seen: set[str] = field(default_factory=set)
    num_lines: int = 0
    _seen: dict[bytes, int] = field(default_factory=dict)

    def lines(self, content: BinaryIO) -> Iterator[GoodLine]:
        """Every good line before the first bad one, and at the end BadFile where there was a bad one."""
        number = start = 0
        longest = self.body_limit_bytes + LINE_BYTES
        while raw := content.readline(longest + 1):
            number += 1
            if len(raw) > longest:
                self._blame(number, Refusal(reason=Reason.BODY_TOO_LARGE, message=f"Longer than {longest} bytes."))
                break
            skipped = len(BYTE_ORDER_MARK) if number == 1 and raw.startswith(BYTE_ORDER_MARK) else 0
            if raw[skipped:].strip():
                good = self._look_at(raw[skipped:], number, start + skipped)
                if good is not None and not self.errors:
                    yield good
            if len(self.errors) >= MAX_ERRORS or self.num_lines > MAX_LINES or number > MOST_NUMBERS:
                break
            start += len(raw)
        if number > MOST_NUMBERS:
            self._blame(number, Refusal(reason=Reason.INVALID_VALUE, message="Too many lines, most of them empty."))
        if not (self.num_lines or self.errors):
            self._blame(None, Refusal(reason=Reason.INVALID_VALUE, message="The file has no requests."))
        if self.errors:
            raise BadFile(self.errors)

    def _look_at(self, raw: bytes, number: int, start: int) -> GoodLine | None:
        self.num_lines += 1
        try:
            return self._checked(raw, number, start)
        except InvalidRequest as error:
            self._blame(number, error.refusal)
            return None

    def _checked(self, raw: bytes, number: int, start: int) -> GoodLine:
        if self.num_lines > MAX_LINES:
            raise invalid(Reason.INVALID_VALUE, f"A batch has at most {MAX_LINES} requests.")
        line = read_line(raw)
        if "\0" in line.custom_id:
            raise invalid(Reason.INVALID_VALUE, "'custom_id' must not hold a NUL character.", "custom_id")
        if len(bytes(line.body)) > self.body_limit_bytes:
            raise invalid(Reason.BODY_TOO_LARGE, f"A body has at most {self.body_limit_bytes} bytes.", "body")
        digest = hashlib.blake2b(line.custom_id.encode(), digest_size=16).digest()
        first = self._seen.setdefault(digest, number)
        if first != number:
            message = f"'custom_id' {line.custom_id[:80]!r} is that of line {first} too."
            raise invalid(Reason.INVALID_VALUE, message, "custom_id")
        model = check(self.endpoint, line).model
        if model not in self.models:
            message = f"The model {model[:80]!r} does not exist or you do not have access to it."
            raise invalid(Reason.MODEL_NOT_FOUND, message, "model")
        self.models_seen.add(model)
        return GoodLine(number, line.custom_id, start, len(raw))

    def _blame(self, number: int | None, refusal: Refusal) -> None:
        found = {"code": refusal.row.code, "message": refusal.message, "param": refusal.param, "line": number}
        self.errors.append(found)
