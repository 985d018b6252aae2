"""What a gateway and a worker must agree on about token ids: bytes of each token, control tokens, stops, template.

Reads a GGUF file or a Hugging Face folder with a byte-level BPE tokenizer. Refuses to know weights or torch.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wire.gguf_header import GgufHeader, ModelFileError, read_header

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
ENDS_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "</s>")
DIGITS_ONE_BY_ONE = {"smollm": True, "gpt-2": False}  # tokenizer.ggml.pre


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """One model's tokens. Always: ``token_bytes[i]`` is what token ``i`` shows; a control token shows nothing."""

    name: str
    token_bytes: Sequence[bytes]
    control_tokens: Mapping[str, int]
    stop_token_ids: tuple[int, ...]
    bos_token_id: int | None  # set only where every prompt must begin with it
    chat_template: str | None
    context_length: int

    def decode(self, token_ids: Iterable[int]) -> bytes:
        """The bytes a reader sees; may end inside a UTF-8 character."""
        return b"".join(map(self.token_bytes.__getitem__, token_ids))


def load(path: str | Path) -> Vocabulary:
    """Of a ``.gguf`` file or a Hugging Face folder. Raises ModelFileError with a sentence that names the field."""
    path = Path(path)
    return _from_folder(path) if path.is_dir() else _from_gguf(read_header(path))


def build_tokenizer(path: str | Path) -> Tokenizer:
    """Text to token ids. A control token written in the text stays text: ``encode_segments`` makes control tokens.

    A byte the model has no token for (SmolLM2: eight rare ones) is left out, as the reference tokenizer does.
    """
    path = Path(path)
    if not path.is_dir():
        return _tokenizer_from_gguf(read_header(path))
    from tokenizers import Tokenizer

    _read_json(path / "tokenizer.json")  # a sentence about the file, before the library's own words
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def encode_segments(tokenizer: Tokenizer, vocabulary: Vocabulary, segments: Iterable[tuple[bool, str]]) -> list[int]:
    """Token ids of a rendered prompt given as (trusted, text) pieces in order.

    Control tokens are recognised in trusted pieces only. Text on both sides of a border between pieces is encoded
    together, so that a prompt gets the same ids as if it had been encoded whole.
    """
    names = sorted(vocabulary.control_tokens, key=len, reverse=True)
    splitter = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None
    pieces: list[tuple[bool, str]] = []
    for trusted, text in segments:
        parts = splitter.split(text) if trusted and splitter else [text]
        pieces += [(index % 2 == 1, part) for index, part in enumerate(parts) if part]
    token_ids: list[int] = [] if vocabulary.bos_token_id is None else [vocabulary.bos_token_id]
    for is_control, run in itertools.groupby(pieces, key=lambda piece: piece[0]):
        if is_control:
            token_ids += [vocabulary.control_tokens[name] for _, name in run]
        else:
            text = "".join(part for _, part in run)
            token_ids += tokenizer.encode(text, add_special_tokens=False).ids
    return token_ids


def byte_of_character() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, other bytes for characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _from_gguf(header: GgufHeader) -> Vocabulary:
    _check_model(header)
    tokens, types = header.texts("tokenizer.ggml.tokens"), _token_types(header)
    control = {token: index for index, token in enumerate(tokens) if types[index] in (CONTROL, UNKNOWN)}
    metadata = header.metadata
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    template = metadata.get("tokenizer.chat_template")
    starts_with_bos = metadata.get("tokenizer.ggml.add_bos_token") is True
    return Vocabulary(
        name=re.sub(r"[.-](I?Q\d\w*|B?F\d\d)$", "", header.path.stem),
        token_bytes=_token_bytes(enumerate(tokens), types, len(tokens)),
        control_tokens=control,
        stop_token_ids=_stops(control, (end for end in ends if isinstance(end, int))),
        bos_token_id=header.integer("tokenizer.ggml.bos_token_id") if starts_with_bos else None,
        chat_template=template if isinstance(template, str) else None,
        context_length=header.integer(f"{header.text('general.architecture')}.context_length"),
    )


def _check_model(header: GgufHeader) -> None:
    model = header.text("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelFileError(
            f"{header.path.name}: field tokenizer.ggml.model is {model!r}; only 'gpt2' (byte-level BPE)"
        )


def _token_types(header: GgufHeader) -> list[int]:
    tokens = header.texts("tokenizer.ggml.tokens")
    types = header.metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelFileError(f"{header.path.name}: field tokenizer.ggml.token_type must have one entry per token")
    return types


def _token_bytes(tokens: Iterable[tuple[int, str]], types: Sequence[int], size: int) -> tuple[bytes, ...]:
    byte_of = byte_of_character()
    table = [b""] * size
    for index, token in tokens:
        if types[index] in (UNKNOWN, CONTROL):
            continue  # shown to nobody
        if types[index] == USER_DEFINED or not all(character in byte_of for character in token):
            table[index] = token.encode()
        else:
            table[index] = bytes(map(byte_of.__getitem__, token))
    return tuple(table)


def _stops(control: Mapping[str, int], named: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({*named, *(control[name] for name in ENDS_OF_TURN if name in control)}))


def _tokenizer_from_gguf(header: GgufHeader) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    _check_model(header)
    kind = header.text("tokenizer.ggml.pre")
    if kind not in DIGITS_ONE_BY_ONE:
        known = ", ".join(DIGITS_ONE_BY_ONE)
        raise ModelFileError(f"{header.path.name}: field tokenizer.ggml.pre is {kind!r}; known are {known}")
    tokens, types = header.texts("tokenizer.ggml.tokens"), _token_types(header)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(header, vocabulary)))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if DIGITS_ONE_BY_ONE[kind] else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    own = [AddedToken(t, normalized=False) for t, kind_of in zip(tokens, types, strict=True) if kind_of == USER_DEFINED]
    tokenizer.add_tokens(own)
    return tokenizer


def _merges(header: GgufHeader, vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Pairs in order of rank. The library says only that some token is missing, as a bare Exception."""
    merges = []
    for merge in header.texts("tokenizer.ggml.merges"):
        left, _, right = merge.partition(" ")
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ModelFileError(f"{header.path.name}: field tokenizer.ggml.merges: {merge!r} joins unknown tokens")
        merges.append((left, right))
    return merges


def _from_folder(folder: Path) -> Vocabulary:
    config, tokenizer = _read_json(folder / "config.json"), _read_json(folder / "tokenizer.json")
    model = tokenizer.get("model", {})
    if model.get("type") != "BPE" or "ByteLevel" not in json.dumps(tokenizer.get("decoder")):
        raise ModelFileError(f"{folder.name}/tokenizer.json: field model must be byte-level BPE")
    added = {entry["content"]: entry for entry in tokenizer.get("added_tokens", [])}
    ids = model["vocab"] | {content: entry["id"] for content, entry in added.items()}
    size = max(ids.values()) + 1
    types = [NORMAL] * size
    for entry in added.values():
        types[entry["id"]] = CONTROL if entry["special"] else USER_DEFINED
    control = {content: entry["id"] for content, entry in added.items() if entry["special"]}
    settings = _read_json(folder / "tokenizer_config.json", missing={})
    generation = _read_json(folder / "generation_config.json", missing={})
    named = [end for source in (config, generation) for end in _as_list(source.get("eos_token_id"))]
    named += [control[end] for end in _as_list(settings.get("eos_token")) if end in control]
    return Vocabulary(
        name=folder.resolve().name,
        token_bytes=_token_bytes(((index, token) for token, index in ids.items()), types, size),
        control_tokens=control,
        stop_token_ids=_stops(control, named),
        bos_token_id=control.get(settings.get("bos_token")) if settings.get("add_bos_token") else None,
        chat_template=_folder_template(folder, settings),
        context_length=int(config["max_position_embeddings"]),
    )


def _folder_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text()
    template = settings.get("chat_template")
    if isinstance(template, list):  # named templates
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    if missing is not None and not path.is_file():
        return missing
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelFileError(f"{path.parent.name}/{path.name}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelFileError(f"{path.parent.name}/{path.name}: is not JSON") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"{path.parent.name}/{path.name}: is not a JSON object")
    return content
