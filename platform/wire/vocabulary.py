"""What a gateway and a worker must agree on about token ids: bytes of each token, control tokens, stops, template.

Reads a GGUF file or a Hugging Face folder, with a byte-level BPE or a SentencePiece-style tokenizer. Knows what tokens
mean; refuses to know how text becomes tokens (``wire.encoding``), weights and torch.
"""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wire.gguf_header import GgufHeader, ModelFileError, read_header

SPACE = "\u2581"  # SentencePiece writes it for a blank
NAMES_IN_TEMPLATES = ("bos_token", "eos_token", "unk_token", "pad_token")
ENDS_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "</s>")
STARTS_WITH_BOS = ("llama-bpe",)  # tokenizer.ggml.pre, where the file does not say it


class TokenType(enum.IntEnum):
    """tokenizer.ggml.token_type; for a folder made from what its tokenizer.json says."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


SHOWN_TO_NOBODY = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.UNUSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """One model's tokens. Always: ``token_bytes[i]`` is what token ``i`` shows; a control token shows nothing.

    ``token_bytes`` is as long as the model's output, which may be padded beyond the tokenizer's own tokens.
    """

    name: str
    token_bytes: Sequence[bytes]
    control_tokens: Mapping[str, int]
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None  # set only where plain text must begin with it; a chat template writes its own
    chat_template: str | None
    context_length: int
    template_names: Mapping[str, str] = field(default_factory=dict)  # of NAMES_IN_TEMPLATES, those that the model has

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """The bytes a reader sees; may end inside a UTF-8 character."""
        return b"".join(map(self.token_bytes.__getitem__, token_ids))


def load(path: str | Path) -> Vocabulary:
    """Of a ``.gguf`` file or a Hugging Face folder. Raises ModelFileError with a sentence that names the field."""
    path = Path(path)
    return _from_folder(path) if path.is_dir() else _from_gguf(read_header(path))


# tokens as bytes


@functools.cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, other bytes for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def byte_level(token: str, token_type: TokenType) -> bytes:
    """What a token of a byte-level BPE shows. A token that was added to it is written as it is."""
    byte_of = byte_of_character()
    if token_type is TokenType.USER_DEFINED or not all(character in byte_of for character in token):
        return token.encode()
    return bytes(map(byte_of.__getitem__, token))


def sentence_piece(token: str, token_type: TokenType) -> bytes:
    """What a token of a SentencePiece vocabulary shows: ``<0x0A>`` is a byte, U+2581 a blank."""
    if token_type is TokenType.BYTE:
        return bytes.fromhex(token[3:5])
    return token.replace(SPACE, " ").encode()


def is_byte_token(token: str) -> bool:
    return re.fullmatch("<0x[0-9A-F]{2}>", token) is not None


def _token_bytes(
    tokens: Iterable[tuple[int, str]],
    types: Sequence[TokenType],
    size: int,
    shown: Callable[[str, TokenType], bytes],
) -> tuple[bytes, ...]:
    table = [b""] * size
    for index, token in tokens:
        if types[index] not in SHOWN_TO_NOBODY:
            table[index] = shown(token, types[index])
    return tuple(table)


def _stops(control: Mapping[str, int], named: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({*named, *(control[name] for name in ENDS_OF_TURN if name in control)}))


# GGUF


def _from_gguf(header: GgufHeader) -> Vocabulary:
    shown = gguf_kind(header)
    tokens, types = header.texts("tokenizer.ggml.tokens"), gguf_token_types(header)
    control = {token: index for index, token in enumerate(tokens) if types[index] in SHOWN_TO_NOBODY[:2]}
    metadata = header.metadata

    def token_id(name: str) -> int | None:
        found = metadata.get(f"tokenizer.ggml.{name}_token_id")
        return found if isinstance(found, int) and 0 <= found < len(tokens) else None

    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named = {name: token_id(short) for name, short in ids.items()}
    ends = (token_id(name) for name in ("eos", "eot", "eom"))
    template = metadata.get("tokenizer.chat_template")
    kind = metadata.get("tokenizer.ggml.pre")
    usual = shown is sentence_piece or kind in STARTS_WITH_BOS
    starts_with_bos = metadata.get("tokenizer.ggml.add_bos_token", usual) is True
    return Vocabulary(
        name=re.sub(r"[.-](I?Q\d\w*|B?F\d\d)$", "", header.path.stem),
        token_bytes=_token_bytes(enumerate(tokens), types, len(tokens), shown),
        control_tokens=control,
        stop_token_ids=_stops(control, (end for end in ends if end is not None)),
        bos_token_id=header.integer("tokenizer.ggml.bos_token_id") if starts_with_bos else None,
        chat_template=template if isinstance(template, str) else None,
        context_length=header.integer(f"{header.text('general.architecture')}.context_length"),
        template_names={name: tokens[index] for name, index in named.items() if index is not None},
    )


def gguf_kind(header: GgufHeader) -> Callable[[str, TokenType], bytes]:
    """How the file's tokens are written. Raises ModelFileError for a kind that is neither of the two."""
    kinds = {"gpt2": byte_level, "llama": sentence_piece}
    model = header.text("tokenizer.ggml.model")
    if model not in kinds:
        known = "'gpt2' (byte-level BPE) and 'llama' (SentencePiece)"
        raise ModelFileError(f"{header.path.name}: field tokenizer.ggml.model is {model!r}; known are {known}")
    return kinds[model]


def gguf_token_types(header: GgufHeader) -> list[TokenType]:
    tokens = header.texts("tokenizer.ggml.tokens")
    types = header.metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelFileError(f"{header.path.name}: field tokenizer.ggml.token_type must have one entry per token")
    try:
        return [TokenType(number) for number in types]
    except ValueError as error:
        raise ModelFileError(f"{header.path.name}: field tokenizer.ggml.token_type: {error}") from error


# Hugging Face folders


def _from_folder(folder: Path) -> Vocabulary:
    config, tokenizer = read_json(folder / "config.json"), read_json(folder / "tokenizer.json")
    where = f"{folder.name}/tokenizer.json"
    shown = _folder_kind(tokenizer, where)
    try:
        added = {entry["content"]: entry for entry in tokenizer.get("added_tokens", [])}
        ids: dict[str, int] = tokenizer["model"]["vocab"] | {content: entry["id"] for content, entry in added.items()}
        control = {content: entry["id"] for content, entry in added.items() if entry["special"]}
        size = max(*ids.values(), int(config.get("vocab_size", 0)) - 1) + 1
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ModelFileError(f"{where}: field model.vocab or added_tokens is malformed ({error})") from error
    types = [TokenType.NORMAL] * size
    if shown is sentence_piece:
        for token, index in ids.items():
            types[index] = TokenType.BYTE if is_byte_token(token) else TokenType.NORMAL
    for entry in added.values():
        types[entry["id"]] = TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED
    settings = read_json(folder / "tokenizer_config.json", missing={})
    generation = read_json(folder / "generation_config.json", missing={})
    names = {name: text for name in NAMES_IN_TEMPLATES if (text := _content(settings.get(name)))}
    ends = [end for source in (config, generation) for end in _as_list(source.get("eos_token_id"))]
    ends += [control[names["eos_token"]]] if names.get("eos_token") in control else []
    return Vocabulary(
        name=folder.resolve().name,
        token_bytes=_token_bytes(((index, token) for token, index in ids.items()), types, size, shown),
        control_tokens=control,
        stop_token_ids=_stops(control, ends),
        bos_token_id=control.get(_first_of_plain_text(tokenizer, settings, names)),
        chat_template=_folder_template(folder, settings),
        context_length=_context_length(config, folder),
        template_names=names,
    )


def _folder_kind(tokenizer: Mapping[str, Any], where: str) -> Callable[[str, TokenType], bytes]:
    model = tokenizer.get("model")
    if isinstance(model, dict) and model.get("type") == "BPE" and isinstance(model.get("vocab"), dict):
        if "ByteLevel" in json.dumps(tokenizer.get("decoder")):
            return byte_level
        if model.get("byte_fallback"):
            return sentence_piece
    raise ModelFileError(f"{where}: field model must be byte-level BPE, or BPE with byte_fallback")


def _first_of_plain_text(tokenizer: Mapping[str, Any], settings: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """The name of the token that plain text begins with, or an empty string."""
    post = tokenizer.get("post_processor") or {}
    for step in post.get("processors", [post]):
        first = (step.get("single") or [{}])[0] if step.get("type") == "TemplateProcessing" else {}
        if "SpecialToken" in first:
            return str(first["SpecialToken"]["id"])
    return names.get("bos_token", "") if settings.get("add_bos_token") else ""


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _context_length(config: Mapping[str, Any], folder: Path) -> int:
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or length <= 0:
        raise ModelFileError(f"{folder.name}/config.json: field max_position_embeddings must be a whole number above 0")
    window = config.get("sliding_window") if config.get("model_type") == "mistral" else None
    return min(length, window) if isinstance(window, int) else length


def _content(token: Any) -> str | None:
    """Of a token that is written as a string or as an object."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """Raises ModelFileError unless it holds an object; ``missing`` stands for a file that is not there."""
    if missing is not None and not path.is_file():
        return missing
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{path.parent.name}/{path.name}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path.parent.name}/{path.name}: is not JSON") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path.parent.name}/{path.name}: is not a JSON object")
    return content
