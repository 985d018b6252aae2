"""The header of a GGUF file: its metadata and where each tensor lies. Standard library only, quick and light.

Knows the container (github.com/ggml-org/ggml, docs/gguf.md, versions 2 and 3, little endian);
refuses to know what a tensor means.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SCALAR_LETTERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32


class ModelFileError(Exception):
    """A model file is not what it claims. The message is one sentence that names the file and the field."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies. ``shape`` is row-major (slowest first), the reverse of the order in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int  # of its first byte, from the start of the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Always: every offset in ``tensors`` lies inside the file."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]

    def integer(self, key: str, default: int | None = None) -> int:
        """Raises ModelFileError when the field is missing (and has no default) or is no whole number."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ModelFileError(f"{self.path.name}: field {key} must be a whole number, not {value!r}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """Like ``integer``, for a number of any kind."""
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelFileError(f"{self.path.name}: field {key} must be a number, not {value!r}")
        return float(value)

    def text(self, key: str) -> str:
        """Like ``integer``, for a string."""
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise ModelFileError(f"{self.path.name}: field {key} must be a string, not {value!r}")
        return value

    def texts(self, key: str) -> list[str]:
        """Like ``integer``, for a list of strings."""
        value = self.metadata.get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ModelFileError(f"{self.path.name}: field {key} must be a list of strings")
        return value


def read_header(path: Path) -> GgufHeader:
    """Raises ModelFileError when the file is missing, truncated or no GGUF."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).header()
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelFileError(f"{path.name}: is empty or no GGUF file") from error


class _Reader:
    """A cursor over the mapped file. Always: never reads past the end; says which field it was reading."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._offset = 0
        self._field = "magic"

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise self._wrong("it does not start with GGUF")
        self._offset = 4
        self._field = "version"
        version = self._integer("I")
        if version not in (2, 3):
            raise self._wrong(f"version {version} is not 2 or 3 (little endian)")
        self._field = "tensor_count"
        num_tensors, num_fields = self._integer("Q"), self._integer("Q")
        metadata = dict(self._metadata_field() for _ in range(num_fields))
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        self._field = "general.alignment"
        if not isinstance(alignment, int) or alignment <= 0:
            raise self._wrong(f"{alignment!r} is not a positive number")
        start = -(-self._offset // alignment) * alignment
        tensors = {tensor.name: self._placed(tensor, start) for tensor in found}
        return GgufHeader(self._path, metadata, tensors)

    def _placed(self, tensor: GgufTensor, start: int) -> GgufTensor:
        offset = start + tensor.offset
        if offset >= len(self._data):
            self._field = tensor.name
            raise self._wrong("the tensor lies past the end of the file; the file is truncated")
        return GgufTensor(tensor.name, tensor.shape, tensor.type_id, offset)

    def _metadata_field(self) -> tuple[str, object]:
        key = self._string()
        self._field = key
        return key, self._value(self._integer("I"))

    def _tensor(self) -> GgufTensor:
        name = self._string()
        self._field = name
        num_dimensions = self._integer("I")
        if num_dimensions > MAX_DIMENSIONS:
            raise self._wrong(f"{num_dimensions} dimensions are more than {MAX_DIMENSIONS}")
        shape = tuple(self._integer("Q") for _ in range(num_dimensions))
        return GgufTensor(name, shape[::-1], self._integer("I"), self._integer("Q"))

    def _value(self, type_id: int) -> object:
        if type_id == STRING:
            return self._string()
        if type_id == ARRAY:
            return self._array()
        return self._scalars(type_id, 1)[0]

    def _array(self) -> list[object]:
        type_id, length = self._integer("I"), self._integer("Q")
        if type_id == ARRAY:
            raise self._wrong("a list of lists is not supported")
        if length > len(self._data) - self._offset:
            raise self._wrong(f"a list of {length} entries does not fit the file; the file is truncated")
        if type_id != STRING:
            return self._scalars(type_id, length)
        read: Callable[[], object] = self._string
        return [read() for _ in range(length)]

    def _scalars(self, type_id: int, count: int) -> list[object]:
        letter = SCALAR_LETTERS.get(type_id)
        if letter is None:
            raise self._wrong(f"value type {type_id} is unknown")
        return list(struct.unpack(f"<{count}{letter}", self._take(count * struct.calcsize(f"<{letter}"))))

    def _integer(self, letter: str) -> int:
        value: int = struct.unpack(f"<{letter}", self._take(struct.calcsize(f"<{letter}")))[0]
        return value

    def _string(self) -> str:
        raw = self._take(self._integer("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._wrong("a string is not UTF-8") from error

    def _take(self, num_bytes: int) -> bytes:
        end = self._offset + num_bytes
        if end > len(self._data):
            raise self._wrong("the file ends inside it; the file is truncated")
        taken = self._data[self._offset : end]
        self._offset = end
        return taken

    def _wrong(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self._path.name}: field {self._field}: {what}")
