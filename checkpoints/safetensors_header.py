"""The checked pass over a safetensors file's header: everything is verified before anything is allocated.

    length   header                                                     data
    u64      {"name": {"dtype", "shape", "data_offsets": [b, e]}, ...}  values, end to end, no holes

Written here rather than taken from the `safetensors` package, whose numpy front end maps the file: one cut short while
in use then gives a bus error. Values are read in `huggingface.py`.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpoints.gguf_header import quote

MAX_HEADER_BYTES = 32 << 20  # 36 thousand tensors, more than the largest mixtures of experts have, take 5 MB
MAX_DIMS = 8
MAX_ELEMENTS = 2**63 - 1
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}


class HuggingFaceError(ValueError):
    """A model folder that is missing, damaged, or of a kind that is not read. The message names the file and field."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies and what it holds.

    Attributes:
      name: unique in the file.
      shape: row-major; empty for a single value.
      dtype: the format's name of it, a key of ITEM_BYTES.
      path: the file.
      file_size: bytes, when the header was read.
      offset: bytes from the beginning of the file.
      num_bytes: of the values.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    path: Path
    file_size: int
    offset: int
    num_bytes: int


def read_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, in the order of their data.

    Raises:
      HuggingFaceError: the file cannot be read, or the first thing found wrong with it.
    """
    text, file_size = _header_text(path)
    entries = parse_object(text, f"{path}: header")
    data_start = 8 + len(text)
    tensors = [
        _tensor(name, entry, path, file_size, data_start) for name, entry in entries.items() if name != "__metadata__"
    ]
    tensors.sort(key=lambda t: (t.offset, t.num_bytes))
    end = data_start
    for t in tensors:
        if t.offset != end:
            what = "overlap the ones before" if t.offset < end else "leave a hole in front"
            raise HuggingFaceError(f"{path}: tensor {quote(t.name)} data_offsets: they {what}")
        end += t.num_bytes
    if end != file_size:
        raise HuggingFaceError(
            f"{path}: the tensors end at byte {end}, but the file at byte {file_size}; it is damaged or cut short"
        )
    return {t.name: t for t in tensors}


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """A whole small file.

    Raises:
      HuggingFaceError: it is no regular file, cannot be read, or is larger.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # before opening: opening a pipe would wait for a writer
            raise HuggingFaceError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise HuggingFaceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(data) > max_bytes:
        raise HuggingFaceError(f"{path}: larger than {max_bytes} bytes")
    return data


def parse_object(data: bytes, what: str) -> dict[str, Any]:
    """A JSON object, strictly: UTF-8, no name twice in one object, no NaN or Infinity.

    Args:
      what: file and field, for errors.

    Raises:
      HuggingFaceError: it is not one.
    """

    def refuse(text: str) -> None:
        raise ValueError(f"{text} is not a number of JSON")

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            (twice, _) = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ValueError(f"{quote(twice)} is given twice")
        return found

    try:
        value = json.loads(data.decode(), parse_constant=refuse, object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise HuggingFaceError(f"{what}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise HuggingFaceError(f"{what}: a JSON {type(value).__name__} where an object is needed")
    return value


def _header_text(path: Path) -> tuple[bytes, int]:
    """The header's bytes, and the file's size."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise HuggingFaceError(f"{path}: not a regular file")
        with open(path, "rb") as file:
            file_size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if file_size < 8 or 8 + length > file_size:
                raise HuggingFaceError(
                    f"{path}: header length: needs {8 + length} bytes, but the file ends at byte {file_size}; "
                    "it is damaged or cut short"
                )
            if length > MAX_HEADER_BYTES:
                raise HuggingFaceError(f"{path}: header length: {length}; at most {MAX_HEADER_BYTES} are allowed")
            text = file.read(length)
    except OSError as error:
        raise HuggingFaceError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(text) != length:
        raise HuggingFaceError(f"{path}: header: the file became shorter while it was read")
    return text, file_size


def _tensor(name: str, entry: Any, path: Path, file_size: int, data_start: int) -> StoredTensor:
    def error(field: str, problem: str) -> HuggingFaceError:
        return HuggingFaceError(f"{path}: tensor {quote(name)}{field}: {problem}")

    if not isinstance(entry, Mapping) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise error("", "must be an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise error(" dtype", f"{quote(str(dtype))} is not a type of the format")
    if not _are_sizes(shape) or len(shape) > MAX_DIMS or math.prod(shape) > MAX_ELEMENTS:
        raise error(" shape", f"must be at most {MAX_DIMS} whole numbers, their product below 2**63")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise error(" data_offsets", "must be two whole numbers")
    begin, end = offsets
    num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != num_bytes:
        raise error(" data_offsets", f"{end - begin} bytes; {dtype} of shape {tuple(shape)} takes {num_bytes}")
    if data_start + end > file_size:
        problem = f"its data end at byte {data_start + end}, but the file ends at byte {file_size}"
        raise error(" data_offsets", f"{problem}; it is damaged or cut short")
    return StoredTensor(name, tuple(shape), dtype, path, file_size, data_start + begin, num_bytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and 0 <= x <= MAX_ELEMENTS for x in value)
