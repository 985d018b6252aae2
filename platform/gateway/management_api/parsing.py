"""Bodies of the management API: JSON whose every text can be kept and told again. Refuses to know what fields mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import IO, Any

from rest_framework import exceptions
from rest_framework.parsers import JSONParser

MAX_DEPTH = 16  # no field of this API holds more than a list of texts


class PlainJSON(JSONParser):
    """Always: no text of a body, nor a field's name, holds half a surrogate pair, which no encoding knows; nothing is
    nested deeper than MAX_DEPTH.
    """

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Raises ParseError, and ValidationError by the field's name."""
        try:
            found: dict[str, Any] = super().parse(stream, media_type, parser_context)
        except RecursionError as error:
            raise _too_deep() from error
        for name, text in _texts(found):
            if any("\ud800" <= character <= "\udfff" for character in text):
                words = "It holds half a surrogate pair, which is no text."
                raise exceptions.ValidationError({_shown(name): [words]}) from None
        return found


def _texts(found: Any) -> Iterator[tuple[str, str]]:
    """Every text with the field that it stands in, names too. Raises ParseError for what is nested too deeply."""
    left = [("", found, 0)]
    while left:
        name, value, depth = left.pop()
        if depth > MAX_DEPTH:
            raise _too_deep()
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, list):
            left += [(name, one, depth + 1) for one in reversed(value)]
        elif isinstance(value, dict):
            for key, one in value.items():
                field = f"{name}.{key}" if name else key
                yield field, key
                left.append((field, one, depth + 1))


def _shown(name: str) -> str:
    """So that it can be told."""
    return name.encode("utf-8", "backslashreplace").decode()[:64]


def _too_deep() -> exceptions.ParseError:
    return exceptions.ParseError("The body is nested too deeply.")
