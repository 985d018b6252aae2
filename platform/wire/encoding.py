"""Text to token ids, by the ``tokenizers`` library. Knows how each kind of tokenizer cuts text; refuses to know chats.

What is not trusted never becomes a control token: those are cut out of trusted text here, and the library sees plain
text only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wire.gguf_header import GgufHeader, ModelFileError, read_header
from wire.vocabulary import (
    SPACE,
    TokenType,
    Vocabulary,
    gguf_kind,
    gguf_token_types,
    load,
    read_json,
    sentence_piece,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Segments = Iterable[tuple[bool, str]]  # (trusted, text)

# How a text is cut into words before merging, by tokenizer.ggml.pre: the patterns of the models' own tokenizer.json.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = {
    "llama-bpe": _CONTRACTIONS + _WORDS % "{1,3}",
    "qwen2": _CONTRACTIONS + _WORDS % "",
    "smollm": None,  # GPT-2's own words, digits one by one
    "gpt-2": None,
}


class TextEncoder:
    """Always: control tokens come from trusted text alone; the same text gets the ids that its model was trained with.

    ``later`` cuts text that follows a control token, where a tokenizer tells the beginning of a text from its middle.
    """

    def __init__(self, vocabulary: Vocabulary, first: Tokenizer, later: Tokenizer) -> None:
        self.tokenizer = first
        self._later = later
        self._learnt: dict[str, tuple[int, ...]] = {}
        self._control = vocabulary.control_tokens
        strips = {token.content: token for token in first.get_added_tokens_decoder().values()}
        names = sorted(self._control, key=len, reverse=True)
        self._splitter = re.compile("|".join(_pattern(name, strips.get(name)) for name in names) or "(?!)")

    @classmethod
    def of_model(cls, path: str | Path, vocabulary: Vocabulary | None = None) -> TextEncoder:
        """Of a model file or folder. Raises ModelFileError."""
        path = Path(path)
        vocabulary = vocabulary or load(path)
        if path.is_dir():
            return cls(vocabulary, *_from_folder(path))
        tokenizer = _from_gguf(read_header(path))
        return cls(vocabulary, tokenizer, tokenizer)

    def learn(self, texts: Iterable[str]) -> None:
        """Texts that come again and again behind a control token, encoded once. Only what no caller wrote belongs here:
        how long an encoding takes tells whether the text was known.
        """
        for text in texts:
            self._learnt[text] = tuple(_ids(self._later, text))

    def encode(self, segments: Segments) -> list[int]:
        """Token ids of (trusted, text) pieces in order, without any token that no piece has written.

        Text on both sides of a border between pieces is encoded together, so that a prompt gets the same ids as if it
        had been encoded whole.
        """
        token_ids: list[int] = []
        run: list[str] = []  # what has been written since the last control token
        for trusted, text in segments:
            end = 0
            for match in self._splitter.finditer(text) if trusted else ():
                self._close(run, text[end : match.start()], token_ids)
                token_ids.append(self._control[match[0].strip()])
                end = match.end()
            run.append(text[end:])
        self._close(run, "", token_ids)
        return token_ids

    def _close(self, run: list[str], rest: str, token_ids: list[int]) -> None:
        text = "".join(run) + rest
        run.clear()
        if not text:
            return
        if not token_ids:
            token_ids += _ids(self.tokenizer, text)
        elif text in self._learnt:
            token_ids += self._learnt[text]
        else:
            token_ids += _ids(self._later, text)


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """As a batch of one: the library's ``encode`` holds the interpreter while it works, and no other thread runs."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _pattern(name: str, added: Any) -> str:
    """Some control tokens swallow the blanks beside them."""
    before = r"\s*" if added is not None and added.lstrip else ""
    after = r"\s*" if added is not None and added.rstrip else ""
    return before + re.escape(name) + after


def _from_folder(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    content = read_json(folder / "tokenizer.json")
    first = _parsed(content, folder)
    steps = content.get("pre_tokenizer") or {}
    for step in steps.get("pretokenizers", [steps]):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
            return first, _parsed(content, folder)
    return first, first


def _parsed(content: Mapping[str, Any], folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library knows no narrower class
        raise ModelFileError(f"{folder.name}/tokenizer.json: is no tokenizer ({error})") from error
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _from_gguf(header: GgufHeader) -> Tokenizer:
    from tokenizers import AddedToken

    tokens, types = header.texts("tokenizer.ggml.tokens"), gguf_token_types(header)
    # Control tokens are left out: no text, however it is cut, can then become one.
    usual = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.BYTE)
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] in usual}
    if gguf_kind(header) is sentence_piece:
        tokenizer = _sentence_piece(header, vocabulary, tokens, types)
    else:
        tokenizer = _byte_level(header, vocabulary)
    own = [AddedToken(token, normalized=False) for token, index in vocabulary.items() if types[index] == usual[1]]
    tokenizer.add_tokens(own)
    return tokenizer


def _byte_level(header: GgufHeader, vocabulary: dict[str, int]) -> Tokenizer:
    """A byte the model has no token for (SmolLM2: eight rare ones) is left out, as the reference tokenizer does."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind = header.text("tokenizer.ggml.pre")
    if kind not in WORDS:
        raise ModelFileError(f"{header.path.name}: field tokenizer.ggml.pre is {kind!r}; known are {', '.join(WORDS)}")
    merges = _merges(header, vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=kind == "llama-bpe"))
    words = WORDS[kind]
    steps: list[Any] = []
    if words is not None:
        steps.append(pre_tokenizers.Split(Regex(words), behavior="isolated"))
    elif kind == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
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


def _sentence_piece(
    header: GgufHeader, vocabulary: dict[str, int], tokens: Sequence[str], types: Sequence[TokenType]
) -> Tokenizer:
    """SentencePiece joins the neighbours that make the token with the best score: merges, ranked by that score."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelFileError(f"{header.path.name}: field tokenizer.ggml.scores must have one entry per token")
    normal = [index for index, token_type in enumerate(types) if token_type is TokenType.NORMAL]
    normal.sort(key=lambda index: (-scores[index], index))
    merges = [
        (token[:cut], token[cut:])
        for token in (tokens[index] for index in normal)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True))
    blanks: list[Any] = [normalizers.Replace(" ", SPACE)]
    if header.metadata.get("tokenizer.ggml.add_space_prefix", True):
        blanks.insert(0, normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence(blanks)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer
