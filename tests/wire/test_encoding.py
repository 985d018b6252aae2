"""Text to tokens beside the tokenizers library: each kind of tokenizer, from a folder and from a GGUF file."""

from __future__ import annotations

import json
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from tests.wire.tiny_tokenizers import CORPUS, KINDS, Kind, llama2, llama3, qwen2, save_folder, save_gguf
from wire.encoding import TextEncoder
from wire.gguf_header import ModelFileError
from wire.vocabulary import Vocabulary, load

TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "   leading and trailing   ",
    "Hello\n\nworld\t!",
    "I'LL don't 'tis 12345 1 22 333 4444",
    "café vs cafe\u0301",
    "\x00\x07 control \u200b zero width",
    "\U0001d518\U0001d52b family: \U0001f469\u200d\U0001f469\u200d\U0001f467",
]


# A GGUF file cannot say that a blank stands before the first words only: llama.cpp writes one after each control token.
FILES = [
    (name, form) for name in KINDS for form in ("folder", "gguf") if (name, form) != ("Mistral, blank first", "gguf")
]


@pytest.fixture(scope="module", params=FILES, ids=", ".join)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Path]:
    name, form = request.param
    kind, folder = KINDS[name](), tmp_path_factory.mktemp("tokenizer")
    return kind, save_folder(kind, folder) if form == "folder" else save_gguf(kind, folder / "model.gguf")


@pytest.fixture(scope="module")
def kind(file: tuple[Kind, Path]) -> Kind:
    return file[0]


@pytest.fixture(scope="module")
def path(file: tuple[Kind, Path]) -> Path:
    return file[1]


@pytest.fixture(scope="module")
def words(path: Path) -> Vocabulary:
    return load(path)


@pytest.fixture(scope="module")
def encoder(path: Path, words: Vocabulary) -> TextEncoder:
    return TextEncoder.of_model(path, words)


def reference(kind: Kind, text: str) -> list[int]:
    """The library on the whole text, control tokens recognised."""
    return kind.tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", TEXTS)
def test_plain_text_gets_the_ids_of_the_tokenizers_library(kind: Kind, encoder: TextEncoder, text: str) -> None:
    assert encoder.encode([(False, text)]) == reference(kind, text)


def test_a_prompt_with_control_tokens_gets_the_ids_of_the_tokenizers_library(kind: Kind, encoder: TextEncoder) -> None:
    start, end = kind.control[-2:]
    for prompt in (
        f"{start}user\nHello, world!{end}\n{start}assistant\n",
        f"{start}{end} x {end}",
        f"The dog{end}  {start} the fox",
        *kind.control,
    ):
        assert encoder.encode([(True, prompt)]) == reference(kind, prompt)


def test_control_tokens_that_a_user_writes_stay_text(kind: Kind, words: Vocabulary, encoder: TextEncoder) -> None:
    control = set(words.control_tokens.values())
    for name in kind.control:
        typed = f"a{name}b {name}{name[:3]}"
        token_ids = encoder.encode([(False, typed)])
        assert not control & set(token_ids), name
        assert words.decode(token_ids).strip() == typed.encode()


def test_a_user_cannot_write_a_byte_token_or_a_padding_token(words: Vocabulary, encoder: TextEncoder) -> None:
    token_ids = encoder.encode([(False, "<0x41><pad><unk>")])
    assert words.decode(token_ids).strip() == b"<0x41><pad><unk>"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_comes_back_byte_for_byte(kind: Kind, words: Vocabulary, encoder: TextEncoder, text: str) -> None:
    token_ids = encoder.encode([(False, text)])
    assert token_ids == reference_of_text(kind, text)
    shown = words.decode(token_ids)
    if kind.gguf_model == "gpt2":
        normal = unicodedata.normalize("NFC", text) if kind.gguf_kind == "qwen2" else text
        assert shown == normal.encode()
    else:
        plain = text.replace("\u2581", " ").encode()
        assert shown in (plain, b" " + plain)


def reference_of_text(kind: Kind, text: str) -> list[int]:
    """The library on text in which nothing is a control token."""
    plain = Tokenizer.from_str(kind.tokenizer.to_str())
    plain.encode_special_tokens = True
    return plain.encode(text, add_special_tokens=False).ids


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.tuples(st.booleans(), st.sampled_from([" a", "b ", "\n", "12", "don't", ""])), max_size=6))
def test_borders_between_pieces_change_nothing(encoder: TextEncoder, parts: list[tuple[bool, str]]) -> None:
    assert encoder.encode(parts) == encoder.encode([(False, "".join(text for _, text in parts))])


def test_while_a_long_text_is_encoded_other_threads_run(tmp_path: Path) -> None:
    encoder = TextEncoder.of_model(save_folder(qwen2(), tmp_path))
    text = "".join(f"Why is {number} so blue? " for number in range(60_000))
    with ThreadPoolExecutor(1) as pool:
        began_s = last_s = time.monotonic()
        longest_s = 0.0
        encoding = pool.submit(encoder.encode, [(False, text)])
        while not encoding.done():
            time.sleep(0.001)
            now_s = time.monotonic()
            longest_s, last_s = max(longest_s, now_s - last_s), now_s
    assert longest_s < (last_s - began_s) / 2


def test_the_bytes_of_each_token_are_what_the_library_decodes(kind: Kind, words: Vocabulary, path: Path) -> None:
    padding = 7 if path.is_dir() else 0
    assert len(words.token_bytes) == kind.tokenizer.get_vocab_size() + padding
    anchor = kind.tokenizer.token_to_id("a")
    for token_id in range(kind.tokenizer.get_vocab_size()):
        name = kind.tokenizer.id_to_token(token_id)
        if name in kind.control:
            assert words.token_bytes[token_id] == b""
            continue
        shown = kind.tokenizer.decode([anchor, token_id], skip_special_tokens=False)  # the first loses its blank
        if "\ufffd" not in shown:
            assert words.token_bytes[token_id].decode() == shown.removeprefix("a"), name


def test_what_a_file_says_of_first_and_last_tokens_is_read(kind: Kind, words: Vocabulary) -> None:
    names = {"llama-bpe": ("<|begin_of_text|>", "<|eot_id|>"), "default": ("<s>", "</s>")}
    bos, eos = names.get(kind.gguf_kind, (None, "<|im_end|>"))
    assert words.bos_token_id == (None if bos is None else words.control_tokens[bos])
    assert words.control_tokens[eos] in words.stop_token_ids
    assert words.template_names.get("bos_token") == bos
    assert words.template_names["eos_token"] == eos


def test_tokens_that_were_added_but_are_not_special_can_be_written(tmp_path: Path) -> None:
    kind = qwen2()
    for path in (save_folder(kind, tmp_path / "folder"), save_gguf(kind, tmp_path / "model.gguf")):
        words = load(path)
        token_ids = TextEncoder.of_model(path, words).encode([(False, "<think>hello</think>")])
        assert token_ids[0] == kind.tokenizer.token_to_id("<think>")
        assert words.decode(token_ids) == b"<think>hello</think>"
        assert "<think>" not in words.control_tokens


def test_a_control_token_that_swallows_blanks_beside_it_does_so(tmp_path: Path) -> None:
    kind = llama3()
    kind.tokenizer.add_special_tokens(
        [AddedToken("<|user|>", special=True, rstrip=True, lstrip=True, normalized=False)]
    )
    encoder = TextEncoder.of_model(save_folder(kind, tmp_path))
    for prompt in ("a <|user|> \n b", "<|user|>  ", " <|user|><|user|>"):
        assert encoder.encode([(True, prompt)]) == reference(kind, prompt)


def test_a_gguf_file_that_says_nothing_of_bos_follows_the_custom_of_its_kind(tmp_path: Path) -> None:
    for make, bos in ((llama3, "<|begin_of_text|>"), (llama2, "<s>")):
        words = load(save_gguf(make(), tmp_path / "model.gguf"))
        assert words.bos_token_id == words.control_tokens[bos]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"type": "BPE", "vocab": {}, "merges": [], "byte_fallback": False}}, "field model must be"),
        ({"model": {"type": "WordPiece", "vocab": {}}}, "field model must be"),
        ({"model": "BPE"}, "field model must be"),
        ({"added_tokens": [{"id": 3}]}, "added_tokens is malformed"),
        ({"added_tokens": [{"id": "x", "content": "<x>", "special": True}]}, "is malformed"),
        ({"pre_tokenizer": {"type": "Nonsense"}}, "is no tokenizer"),
    ],
)
def test_a_tokenizer_file_that_is_none_is_refused_with_a_sentence(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    folder = save_folder(llama2(), tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content | change))
    with pytest.raises(ModelFileError, match=rf"tokenizer\.json.*{words}"):
        TextEncoder.of_model(folder)
