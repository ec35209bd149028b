"""Reads GGUF model files: metadata, the list of tensors, and one tensor at a time as float32.

Opening reads and checks the header alone (`gguf_header.py`). A tensor is then read with plain file reads, 64 kB at a
time, into the array that is returned: no memory map, so that a file cut short while in use gives an error rather than
a bus error, and no second copy of the tensor. Dequantization is the `gguf` package's reference implementation.
What the metadata mean for a model is not known here.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize

from checkpoints.gguf_header import GGUFError, TensorInfo, quote, read_header

CHUNK_BYTES = 1 << 16  # of stored blocks; the temporaries of the dequantizers then stay inside the CPU's caches
Kind = TypeVar("Kind", int, float, bool, str, list, np.ndarray)


@dataclass(frozen=True)
class GGUFFile:
    """One checked GGUF file. It holds no open file; `load` opens it anew.

    Attributes:
      path: as given.
      version: of the format, 2 or 3.
      metadata: read-only; int, float, bool, str, a list of str, or a read-only numpy array per key.
      tensors: read-only; by name, in the file's order.
      file_size: bytes, when it was opened.
    """

    path: Path
    version: int
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    file_size: int

    @staticmethod
    def open(path: str | os.PathLike[str]) -> GGUFFile:
        """Reads and checks the header; no tensor data.

        Raises:
          GGUFError: the file cannot be read, is damaged or cut short, or holds a block type that is not read.
        """
        path = Path(path)
        header = read_header(path)
        metadata, tensors = MappingProxyType(header.metadata), MappingProxyType(header.tensors)
        return GGUFFile(path, header.version, metadata, tensors, header.file_size)

    def require(self, key: str, kind: type[Kind]) -> Kind:
        """The metadata value of `key`.

        Args:
          kind: int, float, bool, str, list (of str) or np.ndarray (of numbers). Strict: a bool is no int.

        Raises:
          GGUFError: there is no such key, or its value is of another type, or it is a float that is not finite.
        """
        value = self.find(key, kind)
        if value is None:
            near = difflib.get_close_matches(key, self.metadata, 1)
            hint = f"; the nearest is {quote(near[0])}" if near else ""
            raise GGUFError(f"{self.path}: metadata {quote(key)}: missing{hint}")
        return value

    def find(self, key: str, kind: type[Kind]) -> Kind | None:
        """As `require`, but None where there is no such key."""
        value = self.metadata.get(key)
        if value is None:
            return None
        if type(value) is not kind:
            raise GGUFError(
                f"{self.path}: metadata {quote(key)}: {type(value).__name__} where {kind.__name__} is needed"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise GGUFError(f"{self.path}: metadata {quote(key)}: {value} is not finite")
        return value

    def load(self, name: str) -> np.ndarray:
        """The tensor `name`, dequantized: float32, C order, in the shape of its `TensorInfo`.

        Peak memory is the result and under 4 MB.

        Raises:
          GGUFError: no such tensor, the file changed since it was opened, or a value is not finite.
        """
        info = self.tensors.get(name)
        if info is None:
            near = difflib.get_close_matches(name, self.tensors, 1)
            hint = f"; the nearest is {quote(near[0])}" if near else ""
            raise GGUFError(f"{self.path}: tensor {quote(name)}: missing{hint}")
        try:
            with open(self.path, "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != self.file_size:
                    raise GGUFError(f"{self.path}: tensor {quote(name)}: the file's size changed since it was opened")
                file.seek(info.offset)
                return self._dequantize(file, info)
        except OSError as error:
            raise GGUFError(f"{self.path}: tensor {quote(name)}: {error.strerror or error}") from error

    def _dequantize(self, file: FileIO, info: TensorInfo) -> np.ndarray:
        block_values, block_bytes = GGML_QUANT_SIZES[info.block_type]
        blocks_per_chunk = CHUNK_BYTES // block_bytes
        num_blocks = info.num_bytes // block_bytes
        out = np.empty(num_blocks * block_values, np.float32)
        for first in range(0, num_blocks, blocks_per_chunk):
            last = min(first + blocks_per_chunk, num_blocks)
            stored = _read_exactly(file, (last - first) * block_bytes)
            if stored is None:
                raise GGUFError(f"{self.path}: tensor {quote(info.name)}: the file became shorter while it was read")
            with np.errstate(all="ignore"):  # inf * 0 in a damaged scale; found by the next check
                values = dequantize(stored.reshape(1, -1), info.block_type)
            if not np.isfinite(values).all():
                raise GGUFError(f"{self.path}: tensor {quote(info.name)}: holds a value that is not finite")
            out[first * block_values : last * block_values] = values[0]
        return out.reshape(info.shape)


def _read_exactly(file: FileIO, num_bytes: int) -> np.ndarray | None:
    """The next bytes as uint8, or None when the file ends before them."""
    data = bytearray(num_bytes)
    view, filled = memoryview(data), 0
    while filled < num_bytes:
        count = file.readinto(view[filled:])
        if not count:
            return None
        filled += count
    return np.frombuffer(data, np.uint8)
