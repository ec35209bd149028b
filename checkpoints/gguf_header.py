"""The checked pass over a GGUF file's header: everything is verified before anything is allocated.

    magic  version  tensor count  pair count | key, type, value | name, dims, type, offset | pad | data
    `GGUF`   u32        u64          u64     | for each pair    | for each tensor          |

Written here rather than taken from `gguf.GGUFReader`, which maps the file and follows counts and offsets before it
checks them: a damaged file then gives whatever numpy raises, late, or a very large allocation. Here each count and
length is compared with the bytes that are left first. Memory is a small multiple of the header's size, which is
itself bounded. Constants (value types, block sizes) are the `gguf` package's. Tensor data is read in `gguf.py`.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, GGUFValueType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 256k tokens with its merges takes about 20 MB
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_NAME_BYTES = 64  # the format's own limit
MAX_DIMS = 4
MAX_ELEMENTS = 2**63 - 1
MIN_PAIR_BYTES = 8 + 4 + 1
MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8
READABLE = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
)

_DTYPES = {
    GGUFValueType.UINT8: np.dtype("<u1"),
    GGUFValueType.INT8: np.dtype("<i1"),
    GGUFValueType.UINT16: np.dtype("<u2"),
    GGUFValueType.INT16: np.dtype("<i2"),
    GGUFValueType.UINT32: np.dtype("<u4"),
    GGUFValueType.INT32: np.dtype("<i4"),
    GGUFValueType.UINT64: np.dtype("<u8"),
    GGUFValueType.INT64: np.dtype("<i8"),
    GGUFValueType.FLOAT32: np.dtype("<f4"),
    GGUFValueType.FLOAT64: np.dtype("<f8"),
    GGUFValueType.BOOL: np.dtype("<u1"),  # one byte, 0 or 1
}


class GGUFError(ValueError):
    """A GGUF file that is missing, damaged, or of a kind that is not read. The message names the file and the field."""


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies and what it holds.

    Attributes:
      name: at most 64 bytes of UTF-8, unique in the file.
      shape: numpy order, row-major: the reverse of the order in the file. One to four dimensions, none of them zero.
      block_type: how the values are stored; one of `READABLE`.
      offset: bytes from the beginning of the file.
      num_bytes: of the stored blocks.
    """

    name: str
    shape: tuple[int, ...]
    block_type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Header:
    """All that stands before the data.

    Attributes:
      metadata: int, float, bool, str, a list of str, or a read-only numpy array per key.
      tensors: by name, in the file's order.
      file_size: bytes, when the header was read.
    """

    version: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    file_size: int


def read_header(path: Path) -> Header:
    """Reads and checks the header of the file at `path`.

    Raises:
      GGUFError: the file cannot be opened, or the first thing found wrong with it.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before opening: opening a pipe would wait for a writer
            raise GGUFError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            return _read(_Cursor(file, path))
    except OSError as error:
        raise GGUFError(f"{path}: cannot be read: {error.strerror or error}") from error


def quote(name: str) -> str:
    """`name` for an error message: escaped, and cut when it is long, for it comes from an untrusted file."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


class _Cursor:
    """A position in the file that refuses to go past its end, or past the largest header allowed.

    Attributes:
      position: bytes from the beginning.
      file_size: bytes.
    """

    def __init__(self, file: BinaryIO, path: Path):
        self._file = file
        self._path = path
        self.file_size = os.fstat(file.fileno()).st_size
        self.position = 0

    def error(self, field: str, problem: str) -> GGUFError:
        return GGUFError(f"{self._path}: {field}: {problem}")

    def need(self, num_bytes: int, field: str) -> None:
        """Raises unless `num_bytes` more bytes can be read."""
        end = self.position + num_bytes
        if end > self.file_size:
            problem = f"needs {num_bytes} bytes at byte {self.position}, but the file ends at byte {self.file_size}"
            raise self.error(field, f"{problem}; it is damaged or cut short")
        if end > MAX_HEADER_BYTES:
            raise self.error(field, f"the header would exceed {MAX_HEADER_BYTES} bytes")

    def take(self, num_bytes: int, field: str) -> bytes:
        self.need(num_bytes, field)
        data = self._file.read(num_bytes)
        if len(data) != num_bytes:
            raise self.error(field, "the file became shorter while it was read")
        self.position += num_bytes
        return data

    def integer(self, num_bytes: int, field: str) -> int:
        """An unsigned integer of that many bytes."""
        return int.from_bytes(self.take(num_bytes, field), "little")

    def string(self, field: str, max_bytes: int = MAX_HEADER_BYTES) -> str:
        num_bytes = self.integer(8, field)
        if num_bytes > max_bytes:
            raise self.error(field, f"a string of {num_bytes} bytes; at most {max_bytes} are allowed")
        try:
            return self.take(num_bytes, field).decode()
        except UnicodeDecodeError as error:
            raise self.error(field, "not valid UTF-8") from error

    def count(self, field: str, max_count: int, min_item_bytes: int) -> int:
        """A count of items to follow, each of at least `min_item_bytes`, checked against the bytes that are left."""
        count = self.integer(8, field)
        if count > max_count:
            raise self.error(field, f"{count} entries; at most {max_count} are allowed")
        self.need(count * min_item_bytes, f"{field} ({count} entries)")
        return count


def _read(cursor: _Cursor) -> Header:
    magic = cursor.take(4, "magic")
    if magic != MAGIC:
        raise cursor.error("magic", f"{magic!r} instead of {MAGIC!r}; this is not a GGUF file")
    version = cursor.integer(4, "version")
    if version not in VERSIONS:
        hint = "; big-endian files are not read" if version >> 24 in VERSIONS else ""
        raise cursor.error("version", f"{version}; versions 2 and 3 are read{hint}")
    num_tensors = cursor.count("tensor count", MAX_TENSORS, MIN_TENSOR_BYTES)
    num_pairs = cursor.count("metadata count", MAX_PAIRS, MIN_PAIR_BYTES)
    metadata: dict[str, object] = {}
    for index in range(num_pairs):
        key = cursor.string(f"metadata key {index}", MAX_KEY_BYTES)
        if not key or key in metadata:
            raise cursor.error(f"metadata key {index}", f"{quote(key)} is given twice" if key else "empty")
        metadata[key] = _value(cursor, f"metadata {quote(key)}")
    alignment = _alignment(cursor, metadata)
    in_data: dict[str, TensorInfo] = {}
    for index in range(num_tensors):
        tensor = _tensor(cursor, f"tensor {index}", alignment)
        if tensor.name in in_data:
            raise cursor.error(f"tensor {quote(tensor.name)}", "its name is given twice")
        in_data[tensor.name] = tensor
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {name: replace(tensor, offset=data_start + tensor.offset) for name, tensor in in_data.items()}
    _check_places(cursor, list(tensors.values()))
    return Header(version, metadata, tensors, cursor.file_size)


def _value(cursor: _Cursor, field: str) -> object:
    """One metadata value with its type in front."""
    kind = _value_type(cursor, f"{field} type")
    if kind == GGUFValueType.STRING:
        return cursor.string(field)
    if kind == GGUFValueType.ARRAY:
        return _array(cursor, field)
    return _numbers(cursor, field, kind, 1)[0].item()


def _array(cursor: _Cursor, field: str) -> list[str] | np.ndarray:
    kind = _value_type(cursor, f"{field} element type")
    if kind == GGUFValueType.ARRAY:
        raise cursor.error(field, "an array of arrays; arrays may not be nested")
    if kind == GGUFValueType.STRING:
        count = cursor.count(f"{field} length", MAX_HEADER_BYTES, 8)
        return [cursor.string(f"{field}[{index}]") for index in range(count)]
    count = cursor.count(f"{field} length", MAX_HEADER_BYTES, _DTYPES[kind].itemsize)
    return _numbers(cursor, field, kind, count)


def _value_type(cursor: _Cursor, field: str) -> GGUFValueType:
    number = cursor.integer(4, field)
    try:
        return GGUFValueType(number)
    except ValueError as error:
        raise cursor.error(field, f"{number} is not a type of the format") from error


def _numbers(cursor: _Cursor, field: str, kind: GGUFValueType, count: int) -> np.ndarray:
    """`count` numbers as a read-only array."""
    values = np.frombuffer(cursor.take(count * _DTYPES[kind].itemsize, field), _DTYPES[kind])
    if kind != GGUFValueType.BOOL:
        return values
    if (values > 1).any():
        raise cursor.error(field, f"a boolean is {int(values.max())}; it must be 0 or 1")
    return values.view(np.bool_)


def _alignment(cursor: _Cursor, metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
        raise cursor.error("metadata 'general.alignment'", "it must be an integer and a power of two")
    return value


def _tensor(cursor: _Cursor, field: str, alignment: int) -> TensorInfo:
    """One tensor's entry; its offset counts from the beginning of the data, which is not known yet."""
    name = cursor.string(f"{field} name", MAX_NAME_BYTES)
    if not name:
        raise cursor.error(f"{field} name", "empty")
    field = f"tensor {quote(name)}"
    num_dims = cursor.integer(4, f"{field} dimensions")
    if not 1 <= num_dims <= MAX_DIMS:
        raise cursor.error(f"{field} dimensions", f"{num_dims}; 1 to {MAX_DIMS} are allowed")
    dims = [cursor.integer(8, f"{field} dimension {axis}") for axis in range(num_dims)]
    if 0 in dims or math.prod(dims) > MAX_ELEMENTS:
        raise cursor.error(f"{field} dimensions", f"{dims}; their product must be in [1, 2**63)")
    block_type = _block_type(cursor, field)
    block_values, block_bytes = GGML_QUANT_SIZES[block_type]
    if dims[0] % block_values:
        problem = f"rows of {dims[0]} values; {block_type.name} needs a multiple of {block_values}"
        raise cursor.error(f"{field} dimensions", problem)
    offset = cursor.integer(8, f"{field} offset")
    if offset % alignment:
        raise cursor.error(f"{field} offset", f"{offset} is not a multiple of the alignment {alignment}")
    num_bytes = math.prod(dims) // block_values * block_bytes
    return TensorInfo(name, tuple(reversed(dims)), block_type, offset, num_bytes)


def _block_type(cursor: _Cursor, field: str) -> GGMLQuantizationType:
    number = cursor.integer(4, f"{field} type")
    try:
        block_type = GGMLQuantizationType(number)
    except ValueError as error:
        raise cursor.error(f"{field} type", f"{number} is not a block type of the format") from error
    if block_type not in READABLE:
        names = ", ".join(readable.name for readable in READABLE)
        raise cursor.error(f"{field} type", f"{block_type.name} is not read; convert the file to one of {names}")
    return block_type


def _check_places(cursor: _Cursor, tensors: list[TensorInfo]) -> None:
    """Each tensor inside the file, no two of them overlapping."""
    in_order = sorted(tensors, key=lambda tensor: tensor.offset)
    for tensor in in_order:
        end = tensor.offset + tensor.num_bytes
        if end > cursor.file_size:
            problem = f"its data end at byte {end}, but the file ends at byte {cursor.file_size}"
            raise cursor.error(f"tensor {quote(tensor.name)} data", f"{problem}; it is damaged or cut short")
    for before, after in itertools.pairwise(in_order):
        if before.offset + before.num_bytes > after.offset:
            raise cursor.error(f"tensor {quote(after.name)} data", f"they overlap those of tensor {quote(before.name)}")
