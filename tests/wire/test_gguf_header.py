"""Reading a GGUF header: every value type, and every way a file can lie about itself."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from wire.gguf_header import ModelFileError, read_header


def write(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("a.uint8", 200)
    writer.add_int8("a.int8", -3)
    writer.add_uint16("a.uint16", 60_000)
    writer.add_int32("a.int32", -70_000)
    writer.add_uint64("a.uint64", 1 << 40)
    writer.add_float32("a.float32", 0.5)
    writer.add_float64("a.float64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grüße")
    writer.add_array("a.texts", ["x", "", "yz"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_tensor("t", numpy.arange(6, dtype=numpy.float32).reshape(2, 3))
    writer.add_tensor("u", numpy.ones(5, dtype=numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "whole.gguf")


def test_every_type_of_value_is_read(path: Path) -> None:
    metadata = dict(read_header(path).metadata)
    assert metadata == {
        "general.architecture": "llama",
        "a.uint8": 200,
        "a.int8": -3,
        "a.uint16": 60_000,
        "a.int32": -70_000,
        "a.uint64": 1 << 40,
        "a.float32": 0.5,
        "a.float64": 0.1,
        "a.bool": True,
        "a.string": "grüße",
        "a.texts": ["x", "", "yz"],
        "a.numbers": [1, 2, 3],
    }


def test_a_tensor_is_found_where_it_lies(path: Path) -> None:
    tensor = read_header(path).tensors["t"]
    assert tensor.shape == (2, 3)
    assert numpy.fromfile(path, numpy.float32, 6, offset=tensor.offset).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_field_of_the_wrong_type_or_none_is_named(path: Path) -> None:
    header = read_header(path)
    assert (header.integer("a.uint8"), header.integer("absent", 7), header.real("a.uint8")) == (200, 7, 200.0)
    for read, key in (
        (header.integer, "a.float32"),
        (header.integer, "a.bool"),
        (header.real, "a.string"),
        (header.text, "a.numbers"),
        (header.texts, "a.numbers"),
        (header.integer, "absent"),
    ):
        with pytest.raises(ModelFileError, match=f"field {key}"):
            read(key)


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_an_empty_or_absent_file_gets_a_sentence(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "empty":
        path.touch()
    with pytest.raises(ModelFileError, match=name):
        read_header(path)


def head(version: int = 3, num_tensors: int = 0, num_fields: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (head(version=1), "version 1 is not 2 or 3"),
        (head(version=0x0300_0000), "is not 2 or 3"),
        (head(num_fields=1) + struct.pack("<Q", 1 << 60), "the file is truncated"),
        (head(num_fields=1) + string("k") + struct.pack("<I", 99), "field k: value type 99 is unknown"),
        (head(num_fields=1) + string("k") + struct.pack("<IIQ", 9, 8, 1 << 60), "field k: a list of"),
        (head(num_fields=1) + string("k") + struct.pack("<IIQ", 9, 9, 1), "field k: a list of lists"),
        (head(num_fields=1) + struct.pack("<Q", 1) + b"\xff", "not UTF-8"),
        (head(num_tensors=1) + string("t") + struct.pack("<I", 1_000_000), "field t: 1000000 dimensions"),
        (head(num_tensors=1) + string("t") + struct.pack("<IQIQ", 1, 4, 0, 1 << 40), "field t: .* past the end"),
        (head(num_fields=1) + string("general.alignment") + struct.pack("<II", 4, 0), "general.alignment: 0"),
    ],
)
def test_a_file_that_lies_is_refused_by_the_name_of_its_field(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "liar.gguf").write_bytes(content)
    with pytest.raises(ModelFileError, match=sentence):
        read_header(tmp_path / "liar.gguf")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_spoilt_file_is_read_or_refused_but_nothing_else(path: Path, data: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, 400))] = data.draw(st.integers(0, 255))
    spoilt = path.with_name("spoilt.gguf")
    spoilt.write_bytes(content[: data.draw(st.integers(1, len(content)))])
    try:
        tensors = read_header(spoilt).tensors.values()
    except ModelFileError:
        tensors = ()
    assert all(tensor.offset < spoilt.stat().st_size for tensor in tensors)
