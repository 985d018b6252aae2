"""Tokenizers of each kind, trained on a few lines, as Hugging Face folders and as GGUF files. No downloads."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog doesn't mind; it's asleep, and we'll see.",
    "In 2024 there were 1234567 reasons, 42 of them good:\n\n  def f(x):\n      return x + 1  # done\n",
    "Größe, naïve café, Ünïcödé, 日本語のテキスト, русский текст, emoji 🎉🎉 and <tags> | pipes [1].",
    "user assistant system: hello hello hello world world. Is the capital of France Paris? Yes, it is Paris!",
] * 3
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
BLANK = "\u2581"


@dataclass(frozen=True)
class Kind:
    """One kind of tokenizer: as transformers keeps it, and what llama.cpp calls it."""

    tokenizer: Tokenizer
    gguf_model: str
    gguf_kind: str
    control: Sequence[str]
    settings: dict[str, Any]


def llama3() -> Kind:
    control = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = _byte_level(LLAMA3_WORDS, ignore_merges=True)
    tokenizer.add_special_tokens(control)
    first = ("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{first[0]} $A", special_tokens=[first]),
        ]
    )
    settings = {"bos_token": control[0], "eos_token": control[4]}
    return Kind(tokenizer, "gpt2", "llama-bpe", control, settings)


def qwen2() -> Kind:
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = _byte_level(QWEN2_WORDS)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return Kind(tokenizer, "gpt2", "qwen2", control, {"eos_token": "<|im_end|>", "bos_token": None})


def llama2(scheme: str | None = None) -> Kind:
    """With ``scheme`` blanks are written by Metaspace (Mistral's newer files), else by normalizers (Llama 2's)."""
    control = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(replacement=BLANK)
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=420, show_progress=False))
    learned = json.loads(trained.to_str())["model"]
    pieces = [*control[:3], *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [token for token, _ in sorted(learned["vocab"].items(), key=lambda item: item[1]) if token not in pieces]
    ranks = [tuple(merge) for merge in learned["merges"]]
    pieces.sort(key=lambda token: len(token) == 1 and token not in control)  # SentencePiece keeps characters last
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(pieces)},
            merges=ranks,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if scheme is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(BLANK), normalizers.Replace(" ", BLANK)])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme=scheme, split=False)
    strip = decoders.Strip(content=" ", left=1, right=0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    names = {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>", "add_bos_token": True}
    return Kind(tokenizer, "llama", "default", control, names)


def _byte_level(words: str, **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer


KINDS = {
    "Llama 3": llama3,
    "Qwen 2": qwen2,
    "Llama 2": llama2,
    "Mistral, blank first": lambda: llama2("first"),
    "Mistral, no blank": lambda: llama2("never"),
}


def save_folder(kind: Kind, folder: Path, **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    kind.tokenizer.save(str(folder / "tokenizer.json"))
    config = {"max_position_embeddings": 512, "vocab_size": kind.tokenizer.get_vocab_size() + 7}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(kind.settings | settings))
    return folder


def save_gguf(kind: Kind, path: Path) -> Path:
    """As llama.cpp's converters write it."""
    content = json.loads(kind.tokenizer.to_str())
    added = {entry["id"]: entry["special"] for entry in content["added_tokens"]}
    tokens = [kind.tokenizer.id_to_token(index) for index in range(kind.tokenizer.get_vocab_size())]
    types = [int(_type_of(kind, index, token, added)) for index, token in enumerate(tokens)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_tokenizer_model(kind.gguf_model)
    writer.add_tokenizer_pre(kind.gguf_kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if kind.gguf_model == "gpt2":
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    else:
        ranks = {left + right: index for index, (left, right) in reversed([*enumerate(content["model"]["merges"])])}
        writer.add_token_scores([-float(ranks.get(token, 10_000 + index)) for index, token in enumerate(tokens)])
        scheme = (content["pre_tokenizer"] or {}).get("prepend_scheme", "always")
        writer.add_add_space_prefix(scheme != "never")
    for name, add in (("bos_token", writer.add_bos_token_id), ("eos_token", writer.add_eos_token_id)):
        token = kind.settings[name]
        content_of = token["content"] if isinstance(token, dict) else token
        if content_of:
            add(kind.tokenizer.token_to_id(content_of))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _type_of(kind: Kind, index: int, token: str, added: dict[int, bool]) -> gguf.TokenType:
    if token == "<unk>":
        return gguf.TokenType.UNKNOWN
    if index in added:
        return gguf.TokenType.CONTROL if added[index] else gguf.TokenType.USER_DEFINED
    is_byte = kind.gguf_model == "llama" and token.startswith("<0x") and len(token) == 6
    return gguf.TokenType.BYTE if is_byte else gguf.TokenType.NORMAL
