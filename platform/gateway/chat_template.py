"""A model's chat template: Jinja in a sandbox, with the names and filters that templates know from transformers.

Knows how messages become one text, and which of its words a caller wrote; refuses to know tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wire.gguf_header import ModelFileError

# A template is the operator's, but it may stumble over what a caller sends.
STUMBLES = (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError)
_PRIVATE = range(0xE000, 0xF8FF)  # characters that mean nothing
_PROBE = chr(_PRIVATE.stop)


class TextError(Exception):
    """The model's chat template cannot be used with these messages."""


class ChatTemplate:
    """Always: what a caller wrote never completes a control token of the template, whatever the template does to it."""

    def __init__(
        self,
        source: str,
        control_tokens: Collection[str],
        names: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = lambda: datetime.now().astimezone(),
    ) -> None:
        """``names``: bos_token and its like. Raises ModelFileError when the source is no template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: now().strftime(form)}
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ModelFileError(f"field chat_template: {error.message} (line {error.lineno})") from error
        self._names = dict(names or {})
        self._guard = _Guard(control_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> list[tuple[bool, str]]:
        """(trusted, text) in order: control tokens are trusted, all other text is not. Raises TextError.

        ``more`` goes to the template as it is guarded too: tools, documents, switches of the model.
        """
        mark = _unused_character([messages, more])
        variables = self._guard.guarded([messages, more], mark)
        try:
            rendered = self._template.render(
                **{**self._names, "add_generation_prompt": True, **variables[1]}, messages=variables[0]
            )
        except STUMBLES as error:
            raise TextError(str(error) or type(error).__name__) from error
        return self._guard.pieces(rendered, mark)

    def own_words(self) -> list[str]:
        """What it writes by itself between control tokens, whoever calls."""
        try:
            pieces = self.render([{"role": "user", "content": _PROBE}])
        except TextError:
            return []
        return [text for is_control, text in pieces if not is_control and _PROBE not in text]


class _Guard:
    """Tells a template's control tokens from the same words in what a caller wrote.

    A mark is put inside every control token that a caller's text holds, and where it could itself be a part of one; the
    template sees the rest as it is and may trim, split and compare it. Marks are taken out at the end. Roles are not a
    caller's words: the door knows them all, and templates make control tokens of them.
    """

    def __init__(self, control_tokens: Collection[str]) -> None:
        self._names = names = sorted(control_tokens, key=len, reverse=True)
        self._token = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._heads = tuple(dict.fromkeys(name[:length] for name in names for length in range(1, len(name))))
        self._tails = tuple(dict.fromkeys(name[length:] for name in names for length in range(1, len(name))))

    def guarded(self, value: Any, mark: str) -> Any:
        """The same lists, mappings and texts, with marks in the texts."""
        match value:
            case str():
                return self._marked(value, mark)
            case Mapping():
                return {
                    self.guarded(key, mark): item if key == "role" else self.guarded(item, mark)
                    for key, item in value.items()
                }
            case Sequence():
                return [self.guarded(item, mark) for item in value]
        return value

    def _marked(self, text: str, mark: str) -> str:
        core = text.strip()
        if not core:
            return text
        start = text.index(core)
        marked = self._token.sub(lambda found: found[0][0] + mark + found[0][1:], core)
        if marked.startswith(self._tails) or any(core in name for name in self._names):
            marked = mark + marked
        if marked.endswith(self._heads):
            marked += mark
        return text[:start] + marked + text[start + len(core) :]

    def pieces(self, rendered: str, mark: str) -> list[tuple[bool, str]]:
        pieces, end = [], 0
        for found in self._token.finditer(rendered):
            pieces += [(False, rendered[end : found.start()].replace(mark, "")), (True, found[0])]
            end = found.end()
        return [piece for piece in (*pieces, (False, rendered[end:].replace(mark, ""))) if piece[1]]


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _unused_character(value: Any) -> str:
    """One that no text of the value holds."""
    texts = list(_texts(value))
    return next(mark for mark in map(chr, _PRIVATE) if not any(mark in text for text in texts))


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            yield from (text for item in value.items() for text in _texts(item))
        case Sequence():
            yield from (text for item in value for text in _texts(item))


def _to_json(value: Any, indent: int | None = None, **more: Any) -> str:
    """Without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **more)


def _refuse(message: str) -> None:
    raise TemplateError(message)
