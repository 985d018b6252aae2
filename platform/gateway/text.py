"""Text to tokens and back: the chat template, encoding, and incremental decoding on token bytes.

Knows one model's vocabulary; refuses to know requests and sockets. What a user typed never becomes a control token.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gateway.chat_template import ChatTemplate, TextError
from wire.encoding import Segments, TextEncoder
from wire.vocabulary import Vocabulary, load

__all__ = ["Detokenizer", "Message", "Text", "TextError", "byte_text"]

CHATML = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NO_TEMPLATE = "{{ raise_exception('this model has no chat template') }}"


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
        self._bos_token_id = vocabulary.bos_token_id
        self._encode = encode
        self._token_bytes = vocabulary.token_bytes
        self._control_names = {token_id: name.encode() for name, token_id in vocabulary.control_tokens.items()}
        self._longest_token = max(map(len, vocabulary.token_bytes))
        default = CHATML if "<|im_start|>" in vocabulary.control_tokens else NO_TEMPLATE
        template = vocabulary.chat_template or default
        self._template = ChatTemplate(template, vocabulary.control_tokens, vocabulary.template_names)

    @classmethod
    def of_model(cls, path: str | Path) -> Text:
        """Of a model file or folder. Raises wire.gguf_header.ModelFileError."""
        vocabulary = load(path)
        encoder = TextEncoder.of_model(path, vocabulary)
        text = cls(vocabulary, encoder.encode)
        encoder.learn(text._template.own_words())
        return text

    def chat_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a chat, ready for the assistant's turn. Raises TextError when the template refuses it."""
        return tuple(self._encode(self._template.render([{"role": m.role, "content": m.content} for m in messages])))

    def plain_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of a text without a template, behind the model's first token where it has one."""
        first = () if self._bos_token_id is None else (self._bos_token_id,)
        return (*first, *self._encode([(False, text)]))

    def least_tokens(self, num_characters: int) -> int:
        """A lower bound of a text's tokens that costs nothing: no token is longer than the longest."""
        return num_characters // self._longest_token

    def token_bytes(self, token_id: int) -> bytes:
        """What a token is called in a list of likely tokens: its bytes, or a control token's name."""
        return self.shown_bytes(token_id) or self._control_names.get(token_id, b"")

    def shown_bytes(self, token_id: int) -> bytes:
        """The bytes a reader sees of a token; none for a control token and for an id outside the vocabulary."""
        return self._token_bytes[token_id] if 0 <= token_id < len(self._token_bytes) else b""


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
