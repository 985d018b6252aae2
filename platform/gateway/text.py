"""Text to tokens and back: the chat template, encoding, and incremental decoding on token bytes.

Knows one model's vocabulary; refuses to know requests and sockets. What a user typed never becomes a control token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wire.vocabulary import Vocabulary, build_tokenizer, encode_segments, load

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MARK = re.compile("\ue000([0-9]+)\ue001")  # stands for a message's text while the template is rendered

Segments = Iterable[tuple[bool, str]]  # (written by the template, text)


class TextError(Exception):
    """The model's chat template cannot be used with these messages."""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


class Text:
    """One model's language. Always: control tokens in a prompt come from the template alone."""

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[Segments], Sequence[int]]) -> None:
        self.model = vocabulary.name
        self.context_length = vocabulary.context_length
        self.stop_token_ids = vocabulary.stop_token_ids
        self.vocabulary_size = len(vocabulary.token_bytes)
        self._encode = encode
        self._token_bytes = vocabulary.token_bytes
        self._longest_token = max(map(len, vocabulary.token_bytes))
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(vocabulary.chat_template or CHATML)

    @classmethod
    def of_model(cls, path: str | Path) -> Text:
        """Of a model file or folder. Raises wire.gguf_header.ModelFileError."""
        vocabulary = load(path)
        return cls(vocabulary, partial(encode_segments, build_tokenizer(path), vocabulary))

    def chat_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a chat, ready for the assistant's turn. Raises TextError when the template refuses it."""
        marked = [{"role": m.role, "content": f"\ue000{i}\ue001"} for i, m in enumerate(messages)]
        try:
            rendered = self._template.render(messages=marked, add_generation_prompt=True)
        except TemplateError as error:
            raise TextError(str(error)) from error
        return tuple(self._encode(_segments(rendered, messages)))

    def least_tokens(self, messages: Iterable[Message]) -> int:
        """A lower bound of the prompt's length that costs nothing: no token is longer than the longest."""
        return sum(len(message.content) for message in messages) // self._longest_token

    def shown_bytes(self, token_id: int) -> bytes:
        """The bytes a reader sees of a token; none for a control token and for an id outside the vocabulary."""
        return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""


def _segments(rendered: str, messages: Sequence[Message]) -> Iterator[tuple[bool, str]]:
    """The rendered template with each message's text put back, marked as not trusted."""
    at = 0
    for mark in _MARK.finditer(rendered):
        yield True, rendered[at : mark.start()]
        yield False, messages[int(mark[1])].content
        at = mark.end()
    yield True, rendered[at:]


class Detokenizer:
    """Turns token ids into text, one string per token, as they come.

    Always: the text depends on the token ids alone, not on how they were cut into batches; a character is shown when
    its last byte is there, so half a character at the very end is never shown.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._num_bytes = 0

    def feed(self, token_ids: Iterable[int], visible_bytes: int | None = None) -> list[str]:
        """Text of each token. ``visible_bytes`` cuts the whole text (not this batch) where a stop string began."""
        shown = []
        for token_id in token_ids:
            piece = self._text.shown_bytes(token_id)
            if visible_bytes is not None:
                piece = piece[: max(0, visible_bytes - self._num_bytes)]
            self._num_bytes += len(piece)
            shown.append(self._decode(piece))
        return shown


def byte_text(model: str = "simulated", context_length: int = 32_768) -> Text:
    """A vocabulary of the 256 bytes and ChatML's control tokens, for a worker that has no model."""
    control_tokens = {"<|im_start|>": 256, "<|im_end|>": 257, "<|endoftext|>": 258}
    vocabulary = Vocabulary(
        name=model,
        token_bytes=tuple(bytes([byte]) for byte in range(256)) + (b"",) * len(control_tokens),
        control_tokens=control_tokens,
        stop_token_ids=(257, 258),
        bos_token_id=None,
        chat_template=CHATML,
        context_length=context_length,
    )
    splitter = re.compile("(" + "|".join(map(re.escape, control_tokens)) + ")")

    def encode(segments: Segments) -> Sequence[int]:
        token_ids: list[int] = []
        for trusted, text in segments:
            for index, part in enumerate(splitter.split(text) if trusted else [text]):
                token_ids += [control_tokens[part]] if index % 2 else part.encode()
        return token_ids

    return Text(vocabulary, encode)


def _refuse(message: str) -> None:
    raise TemplateError(message)
