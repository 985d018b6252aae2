"""Token ids as gateway and worker share them: bytes of tokens, control tokens that no text can make, both files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gpu_worker.demo_model import DEFAULT_FOLDER, fetch
from wire import vocabulary
from wire.encoding import TextEncoder
from wire.gguf_header import ModelFileError
from wire.vocabulary import Vocabulary, byte_of_character, load

IM_START, IM_END = 1, 2


@pytest.fixture(scope="module")
def model_path() -> Path:
    return fetch(DEFAULT_FOLDER)


@pytest.fixture(scope="module")
def words(model_path: Path) -> Vocabulary:
    return load(model_path)


@pytest.fixture(scope="module")
def encoder(model_path: Path) -> TextEncoder:
    return TextEncoder.of_model(model_path)


@pytest.fixture(scope="module")
def tokenizer(encoder: TextEncoder) -> Tokenizer:
    return encoder.tokenizer


def test_the_demo_models_vocabulary_is_what_its_file_says(words: Vocabulary) -> None:
    assert (words.name, len(words.token_bytes), words.context_length) == ("SmolLM2-135M-Instruct", 49_152, 8_192)
    assert words.stop_token_ids == (0, IM_END)
    assert words.control_tokens["<|im_start|>"] == IM_START
    assert words.bos_token_id is None
    assert words.chat_template is not None
    assert "<|im_start|>assistant" in words.chat_template


def test_a_known_prompt_gets_the_ids_its_model_was_trained_with(words: Vocabulary, encoder: TextEncoder) -> None:
    text = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    expected = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407]
    assert encoder.encode([(True, text)]) == [*expected, 19712, 8182, 2, 198]


@settings(max_examples=200, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_byte_for_byte(words: Vocabulary, encoder: TextEncoder, text: str) -> None:
    known = {token for token in words.token_bytes if len(token) == 1}
    expected = b"".join(byte for byte in map(int.to_bytes, text.encode()) if byte in known)
    assert words.decode(encoder.encode([(False, text)])) == expected


def test_the_bytes_its_model_has_no_token_for_are_rare(words: Vocabulary) -> None:
    known = {token for token in words.token_bytes if len(token) == 1}
    missing = {byte for byte in range(256) if byte.to_bytes() not in known}
    never_in_utf8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
    assert missing - never_in_utf8 == {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}  # control codes, unused planes


def test_digits_stand_one_by_one(words: Vocabulary, encoder: TextEncoder) -> None:
    pieces = [words.token_bytes[token_id] for token_id in encoder.encode([(False, "in 2024")])]
    assert pieces == [b"in", b" ", b"2", b"0", b"2", b"4"]


@pytest.mark.parametrize("name", ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<repo_name>"])
def test_a_control_token_typed_by_a_user_stays_text(words: Vocabulary, encoder: TextEncoder, name: str) -> None:
    typed = f"before{name}after"
    for token_ids in (encoder.tokenizer.encode(typed).ids, encoder.encode([(False, typed)])):
        assert not set(token_ids) & set(words.control_tokens.values())
        assert words.decode(token_ids) == typed.encode()


def test_control_tokens_are_made_from_trusted_text_only_and_show_nothing(
    words: Vocabulary, encoder: TextEncoder
) -> None:
    segments = [(True, "<|im_start|>user\n"), (False, "<|im_end|>"), (True, "<|im_end|>\n")]
    token_ids = encoder.encode(segments)
    assert [token_id for token_id in token_ids if token_id in (IM_START, IM_END)] == [IM_START, IM_END]
    assert words.decode(token_ids) == b"user\n<|im_end|>\n"


def test_a_control_token_split_over_two_segments_stays_text(words: Vocabulary, encoder: TextEncoder) -> None:
    token_ids = encoder.encode([(True, "<|im_"), (False, "end|>")])
    assert IM_END not in token_ids


@pytest.mark.parametrize("content", ["\n\nhello", " hello", "lo 1", "'s"])
def test_text_across_a_border_is_encoded_as_one(words: Vocabulary, encoder: TextEncoder, content: str) -> None:
    apart = encoder.encode([(True, "<|im_start|>user\n"), (False, content)])
    assert apart == encoder.encode([(True, "<|im_start|>user\n" + content)])


def test_the_table_of_byte_characters_is_a_bijection() -> None:
    table = byte_of_character()
    assert sorted(table.values()) == list(range(256))
    assert (table["A"], table["Ġ"], table["Ċ"]) == (ord("A"), ord(" "), ord("\n"))


LIGHT = """
import sys
from wire.encoding import TextEncoder
TextEncoder.of_model(sys.argv[1])
print(*(name for name in ("torch", "numpy", "gguf", "transformers") if name in sys.modules))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def test_a_gateway_reads_it_without_heavy_packages_and_in_little_memory(model_path: Path) -> None:
    command = [sys.executable, "-c", LIGHT, str(model_path)]
    imported, most_kib = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert imported == ""
    assert int(most_kib) < 100 << 10


def write_gguf(
    path: Path,
    model: str = "gpt2",
    kind: str = "gpt-2",
    types: Sequence[int] = (3, 1, 1, 4, 1),
    merges: Sequence[str] = ("Ġ a",),
) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(kind)
    writer.add_token_list(["<s>", "a", "Ġa", "<tool>", "Ġ"])
    writer.add_token_types(list(types))
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_plain_text_begins_with_bos_where_the_model_wants_it(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "Small-1B.Q4_K_M.gguf")
    words = load(path)
    assert (words.name, words.bos_token_id, words.stop_token_ids) == ("Small-1B", 0, (0,))
    assert words.token_bytes == (b"", b"a", b" a", b"<tool>", b" ")
    assert TextEncoder.of_model(path).encode([(False, "a a<tool>")]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda path: write_gguf(path, model="bert"), "tokenizer.ggml.model"),
        (lambda path: write_gguf(path, model="llama"), "tokenizer.ggml.scores"),
        (lambda path: write_gguf(path, types=(3, 1, 1, 4, 9)), "tokenizer.ggml.token_type"),
        (lambda path: write_gguf(path, kind="deepseek"), "tokenizer.ggml.pre"),
        (lambda path: write_gguf(path, types=(3, 1)), "tokenizer.ggml.token_type"),
        (lambda path: write_gguf(path, merges=["Ġ z"]), "tokenizer.ggml.merges"),
        (lambda path: write_gguf(path, merges=["Ġa"]), "tokenizer.ggml.merges"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_by_the_name_of_its_field(
    tmp_path: Path, make: Callable[[Path], Path], field: str
) -> None:
    path = make(tmp_path / "other.gguf")
    with pytest.raises(ModelFileError, match=field):
        TextEncoder.of_model(path)


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    """A Hugging Face folder with the demo's tokenizer, its control tokens declared as special."""
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    content["added_tokens"] = [
        dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
        | {"id": token_id, "content": name, "special": True}
        for token_id, name in enumerate(("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 2_048, "eos_token_id": 2}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>", "chat_template": "{{x}}"}))
    return tmp_path


def test_a_hugging_face_folder_gives_the_same_tokens_as_the_gguf_file(
    folder: Path, words: Vocabulary, encoder: TextEncoder
) -> None:
    found = load(folder)
    assert (found.name, found.context_length, found.chat_template) == (folder.name, 2_048, "{{x}}")
    assert found.stop_token_ids == (0, 2)
    assert found.token_bytes[:3] == (b"", b"", b"")
    assert found.token_bytes[17:] == words.token_bytes[17:]
    segments = [(True, "<|im_start|>user\n"), (False, "12 ünïcode <|im_end|>"), (True, "<|im_end|>")]
    assert TextEncoder.of_model(folder).encode(segments) == encoder.encode(segments)


def test_a_template_in_a_file_of_its_own_wins(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{own}}")
    assert load(folder).chat_template == "{{own}}"


def test_a_folder_without_a_tokenizer_or_with_another_kind_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "Unigram"}}))
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: field model must be byte-level BPE"):
        load(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match="is not JSON"):
        TextEncoder.of_model(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match="cannot be read"):
        vocabulary.load(folder)
