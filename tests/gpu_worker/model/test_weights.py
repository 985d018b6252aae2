"""Weights from GGUF files with all their quantised types, and files that are not what they claim."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor

from gpu_worker.models.config import DividedRope
from gpu_worker.models.gguf_weights import INSIDE_LAYER, READABLE
from gpu_worker.models.llama import Llama
from gpu_worker.models.weights import WeightsError, open_weights
from wire.gguf_header import ModelFileError

Save = Callable[[Path, dict[str, Any], dict[str, Tensor]], Path]


def interleaved(rows: numpy.ndarray, num_heads: int) -> numpy.ndarray:
    """llama.cpp's ``permute`` (convert_hf_to_gguf.py), the other way round from ours."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path: Path, tensors: dict[str, Tensor], architecture: str = "llama", **metadata: Any) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(metadata.pop("rope_dimension_count", 16))
    for key, value in metadata.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_string
        add(key.replace("__", "."), value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {
        "token_embd.weight": tensors["model.embed_tokens.weight"],
        "output_norm.weight": tensors["model.norm.weight"],
    }
    for layer in range(2):
        for ours, theirs in INSIDE_LAYER.items():
            values = tensors.get(f"model.layers.{layer}.{ours}.weight")
            if values is None:
                continue
            if theirs in ("attn_q", "attn_k"):
                values = torch.from_numpy(interleaved(values.numpy(), 4 if theirs == "attn_q" else 2))
            renamed[f"blk.{layer}.{theirs}.weight"] = values
    return renamed


@pytest.fixture
def tiny_gguf(tmp_path: Path, tiny_tensors: dict[str, Tensor]) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", gguf_names(tiny_tensors))


def test_a_gguf_file_gives_the_tensors_of_the_folder_it_was_made_from(
    tiny_gguf: Path, tiny_folder: Path, tiny_tensors: dict[str, Tensor]
) -> None:
    weights = open_weights(tiny_gguf)
    assert weights.config.rms_norm_epsilon == pytest.approx(1e-5)  # a single-precision field in the file
    assert dataclasses.replace(weights.config, rms_norm_epsilon=1e-5) == open_weights(tiny_folder).config
    for name, expected in tiny_tensors.items():
        assert torch.equal(weights.tensor(name, *expected.shape), expected), name


def test_an_embedding_kept_as_stored_gives_the_rows_of_the_whole_table(
    tiny_gguf: Path, tiny_folder: Path, tiny_tensors: dict[str, Tensor]
) -> None:
    token_ids = torch.tensor([258, 0, 7, 7])
    for path in (tiny_gguf, tiny_folder):
        look_up = open_weights(path).embedding(259, 64)
        assert torch.equal(look_up(token_ids), tiny_tensors["model.embed_tokens.weight"][token_ids])


def blocks_of(kind: str, num_rows: int) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Random bytes of one 256-wide tensor with tame scales, and what the format's own definition makes of them."""
    random = numpy.random.default_rng(3)
    half = numpy.float16
    if kind == "Q4_K":
        raw = random.integers(0, 256, (num_rows, 144), numpy.uint8)
        raw[:, :4] = numpy.array([0.25, 0.5], half).view(numpy.uint8)
        scales, minima = numpy.empty((num_rows, 8)), numpy.empty((num_rows, 8))
        packed = raw[:, 4:16].astype(int)
        for j in range(4):
            scales[:, j], minima[:, j] = packed[:, j] & 63, packed[:, j + 4] & 63
            scales[:, j + 4] = (packed[:, j + 8] & 15) | (packed[:, j] >> 6) << 4
            minima[:, j + 4] = (packed[:, j + 8] >> 4) | (packed[:, j + 4] >> 6) << 4
        nibbles = raw[:, 16:].reshape(num_rows, 4, 32)
        quants = numpy.stack([nibbles & 15, nibbles >> 4], axis=2).reshape(num_rows, 8, 32).astype(float)
        return raw, (0.25 * scales[..., None] * quants - 0.5 * minima[..., None]).reshape(num_rows, 256)
    if kind == "Q6_K":
        raw = random.integers(0, 256, (num_rows, 210), numpy.uint8)
        raw[:, 208:] = numpy.array([0.125], half).view(numpy.uint8)
        low, high = raw[:, :128].astype(int), raw[:, 128:192].astype(int)
        scales = raw[:, 192:208].view(numpy.int8).astype(float)
        expected = numpy.empty((num_rows, 256))
        for position in range(256):
            side, quarter, column = position // 128, position % 128 // 32, position % 32
            nibble = low[:, side * 64 + quarter % 2 * 32 + column] >> (4 if quarter >= 2 else 0) & 15
            bits = high[:, side * 32 + column] >> (2 * quarter) & 3
            expected[:, position] = 0.125 * scales[:, position // 16] * ((nibble | bits << 4) - 32)
        return raw, expected
    wide = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}[kind]
    raw = random.integers(0, 256, (num_rows, 8, wide), numpy.uint8)
    raw[..., :2] = numpy.array([0.25], half).view(numpy.uint8)
    if kind == "Q8_0":
        return raw.reshape(num_rows, -1), (0.25 * raw[..., 2:].view(numpy.int8)).reshape(num_rows, 256)
    if kind == "Q4_1":
        raw[..., 2:4] = numpy.array([1.5], half).view(numpy.uint8)
    nibbles = raw[..., wide - 16 :]
    quants = numpy.concatenate([nibbles & 15, nibbles >> 4], axis=-1).astype(float)
    expected = 0.25 * quants + 1.5 if kind == "Q4_1" else 0.25 * (quants - 8)
    return raw.reshape(num_rows, -1), expected.reshape(num_rows, 256)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"])
def test_quantised_blocks_are_read_by_their_formats_definition(
    tmp_path: Path, tiny_tensors: dict[str, Tensor], kind: str
) -> None:
    raw, expected = blocks_of(kind, 128)
    path = tmp_path / "quantised.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for add, value in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 64),
        (writer.add_embedding_length, 256),
        (writer.add_feed_forward_length, 128),
        (writer.add_head_count, 4),
        (writer.add_layer_norm_rms_eps, 1e-5),
    ):
        add(value)
    writer.add_tensor("token_embd.weight", numpy.zeros((259, 256), numpy.float16))
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = open_weights(path).tensor("model.layers.0.mlp.up_proj.weight", 128, 256)
    assert numpy.allclose(found.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_every_type_that_is_claimed_readable_has_a_test() -> None:
    assert {kind.name for kind in READABLE} == {"F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"}


def test_a_gguf_files_own_frequency_factors_are_used(tmp_path: Path, tiny_tensors: dict[str, Tensor]) -> None:
    tensors = gguf_names(tiny_tensors) | {"rope_freqs.weight": torch.arange(1.0, 9.0)}
    assert open_weights(write_gguf(tmp_path / "m.gguf", tensors)).config.rope == DividedRope(
        tuple(map(float, range(1, 9)))
    )


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"architecture": "mamba"}, "general.architecture"),
        ({"rope_dimension_count": 8}, "rope.dimension_count"),
        ({"llama__rope__scaling__type": "yarn"}, "rope.scaling.type"),
        ({"llama__expert_count": "many"}, "expert_count"),
    ],
)
def test_a_gguf_file_of_another_kind_is_refused_by_the_name_of_its_field(
    tmp_path: Path, tiny_tensors: dict[str, Tensor], change: dict[str, Any], field: str
) -> None:
    path = write_gguf(tmp_path / "other.gguf", gguf_names(tiny_tensors), **change)
    with pytest.raises(ModelFileError, match=field):
        open_weights(path)


@pytest.mark.parametrize(
    "factors", [torch.ones(3), torch.ones(2, 4), torch.tensor([4.0]), torch.zeros(8), torch.full((8,), float("nan"))]
)
def test_frequency_factors_that_do_not_fit_a_head_are_refused(
    tmp_path: Path, tiny_tensors: dict[str, Tensor], factors: Tensor
) -> None:
    path = write_gguf(tmp_path / "m.gguf", gguf_names(tiny_tensors) | {"rope_freqs.weight": factors})
    with pytest.raises(WeightsError, match=r"rotary scaling|rope_freqs"):
        open_weights(path)


@pytest.mark.parametrize("kept", [0, 3, 40, 1_000, 60_000])
def test_a_truncated_gguf_file_is_refused(tiny_gguf: Path, kept: int) -> None:
    tiny_gguf.write_bytes(tiny_gguf.read_bytes()[:kept])
    with pytest.raises(ModelFileError, match=r"tiny\.gguf"):
        Llama(open_weights(tiny_gguf))


def test_a_missing_tensor_and_a_wrong_shape_are_refused_by_name(
    tmp_path: Path, tiny_tensors: dict[str, Tensor]
) -> None:
    tensors = gguf_names(tiny_tensors)
    del tensors["blk.1.ffn_down.weight"]
    weights = open_weights(write_gguf(tmp_path / "holes.gguf", tensors))
    with pytest.raises(WeightsError, match=r"blk\.1\.ffn_down\.weight is missing"):
        weights.tensor("model.layers.1.mlp.down_proj.weight", 64, 128)
    with pytest.raises(WeightsError, match=r"blk\.0\.ffn_down\.weight is \(64, 128\), expected \(64, 256\)"):
        weights.tensor("model.layers.0.mlp.down_proj.weight", 64, 256)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor"),
        ({"model_type": "qwen2", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type"),
        ({"num_key_value_heads": 3}, "num_heads 4 is no multiple"),
        ({"hidden_size": "wide"}, "field hidden_size must be a whole number, not 'wide'"),
        ({"hidden_size": 64.9}, "hidden_size"),
        ({"hidden_size": float("inf")}, "hidden_size"),
        ({"vocab_size": None}, "field vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_layers"),
        ({"num_hidden_layers": 10**9}, "num_layers must be from 1 to 4,096"),
        ({"max_position_embeddings": 10**18}, "context_length"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": 0.0}, "rms_norm_epsilon"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "rotary scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("nan")}}, "factor"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"layer_types": 5}, "layer_types must be a list"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false"),
    ],
)
def test_a_folder_of_another_kind_is_refused_by_the_name_of_its_field(
    tmp_path: Path, save_folder: Save, tiny_settings: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    folder = save_folder(tmp_path, tiny_settings | change, {"model.norm.weight": torch.ones(64)})
    with pytest.raises(WeightsError, match=field):
        open_weights(folder)


def test_a_folder_with_a_missing_field_a_missing_tensor_or_a_torn_file_is_refused(
    tmp_path: Path, save_folder: Save, tiny_settings: dict[str, Any]
) -> None:
    folder = save_folder(tmp_path, tiny_settings, {"model.norm.weight": torch.ones(64)})
    with pytest.raises(WeightsError, match=r"model\.embed_tokens\.weight is missing"):
        open_weights(folder).tensor("model.embed_tokens.weight", 259, 64)
    with pytest.raises(WeightsError, match=r"model\.norm\.weight is \(64,\), expected \(32,\)"):
        open_weights(folder).tensor("model.norm.weight", 32)
    del tiny_settings["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(tiny_settings))
    with pytest.raises(WeightsError, match="field rms_norm_eps is missing"):
        open_weights(folder)
    (folder / "model.safetensors").write_bytes(b"\x10\x00\x00")
    with pytest.raises(WeightsError, match="cannot be read"):
        open_weights(folder)


def shard(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_folder_whose_shards_are_not_what_its_index_says_is_refused_by_name(
    tmp_path: Path, save_folder: Save, tiny_settings: dict[str, Any]
) -> None:
    norm = "model.norm.weight"
    folder = save_folder(tmp_path, tiny_settings, {norm: torch.ones(64)})
    shard(folder, {norm: "model-00001-of-00002.safetensors"})
    with pytest.raises(WeightsError, match=r"weight_map names model-00001-of-00002\.safetensors, which is missing"):
        open_weights(folder)
    for outside in ("../model.safetensors", "/etc/passwd", "model.bin"):
        shard(folder, {norm: outside})
        with pytest.raises(WeightsError, match="no safetensors file beside it"):
            open_weights(folder)
    shard(folder, {norm: "model.safetensors", "lm_head.weight": "model.safetensors"})
    with pytest.raises(WeightsError, match=r"tensor lm_head\.weight cannot be read"):
        open_weights(folder).tensor("lm_head.weight", 259, 64)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-8])
    with pytest.raises(WeightsError, match=r"model\.norm\.weight cannot be read"):
        open_weights(folder).tensor(norm, 64)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="field weight_map is missing"):
        open_weights(folder)


@pytest.mark.parametrize("kind", [torch.int8, torch.float8_e4m3fn])
def test_a_tensor_of_a_type_that_needs_scales_is_refused_by_name(
    tmp_path: Path, save_folder: Save, tiny_settings: dict[str, Any], kind: torch.dtype
) -> None:
    folder = save_folder(tmp_path, tiny_settings, {"model.norm.weight": torch.ones(64).to(kind)})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight holds torch\."):
        open_weights(folder).tensor("model.norm.weight", 64)


def test_a_folder_that_does_not_say_whether_its_embeddings_are_tied_is_read_by_its_tensors(
    tmp_path: Path, save_folder: Save, tiny_settings: dict[str, Any]
) -> None:
    del tiny_settings["tie_word_embeddings"]
    assert open_weights(
        save_folder(tmp_path / "tied", tiny_settings, {"model.norm.weight": torch.ones(64)})
    ).config.tied_embeddings
    untied = save_folder(tmp_path / "untied", tiny_settings, {"lm_head.weight": torch.ones(259, 64)})
    assert not open_weights(untied).config.tied_embeddings


def test_one_part_of_a_split_gguf_file_is_refused(tmp_path: Path, tiny_tensors: dict[str, Tensor]) -> None:
    path = write_gguf(tmp_path / "part.gguf", gguf_names(tiny_tensors), split__count=3)
    with pytest.raises(WeightsError, match=r"split\.count is 3"):
        open_weights(path)


def test_a_tensor_of_a_gguf_file_that_the_forward_would_not_use_is_refused_by_name(
    tmp_path: Path, tiny_tensors: dict[str, Tensor]
) -> None:
    tensors = gguf_names(tiny_tensors) | {"blk.0.attn_q.bias": torch.ones(64)}
    with pytest.raises(WeightsError, match=r"self_attn\.q_proj\.bias is not part"):
        open_weights(write_gguf(tmp_path / "biased.gguf", tensors))


def test_pickled_weights_are_never_read(tmp_path: Path, tiny_settings: dict[str, Any]) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, tuple[str]]:
            return (exec, ("raise SystemExit('unpickled')",))

    torch.save({"model.norm.weight": Bomb()}, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(tiny_settings))
    with pytest.raises(WeightsError, match="pickled weights are never read"):
        open_weights(tmp_path)
    with pytest.raises(WeightsError, match="pickled weights are never read"):
        open_weights(tmp_path / "pytorch_model.bin")


def test_something_that_is_no_model_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="neither a folder"):
        open_weights(tmp_path / "model.onnx")
    (tmp_path / "text.gguf").write_text("this is no model at all, though it is long enough")
    with pytest.raises(ModelFileError, match="does not start with GGUF"):
        open_weights(tmp_path / "text.gguf")
    with pytest.raises(ModelFileError, match="cannot be read"):
        open_weights(tmp_path / "absent.gguf")
