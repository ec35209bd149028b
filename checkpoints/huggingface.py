"""Reads model folders of Hugging Face's form: config.json, and one safetensors file or several with an index.

    config.json   model.safetensors
    config.json   model.safetensors.index.json   model-00001-of-00002.safetensors   model-00002-of-00002.safetensors

Opening reads and checks every header (`safetensors_header.py`). A tensor is then read with plain file reads straight
into the array that is returned: no memory map, and no second copy. Pickled weights are not read, for reading them runs
what they say. What the configuration means for a model is not known here.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.gguf_header import quote
from checkpoints.safetensors_header import HuggingFaceError, StoredTensor, parse_object, read_bytes, read_tensors

MAX_JSON_BYTES = 32 << 20
FILE_NAME = re.compile(r"[A-Za-z0-9_.+-]+\.safetensors")
CHUNK_BYTES = 1 << 20  # read and checked at a time
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "consolidated.00.pth")
# dtype -> numpy's, and (as whole numbers) the exponent's bits, which are all set in what is not finite.
READABLE: dict[str, tuple[Any, Any]] = {
    "F32": (np.dtype("<f4"), np.uint32(0x7F800000)),
    "F16": (np.dtype("<f2"), np.uint16(0x7C00)),
    "BF16": (np.dtype(ml_dtypes.bfloat16), np.uint16(0x7F80)),
}


@dataclass(frozen=True)
class HuggingFaceFolder:
    """One checked folder. It holds no open file; `load` opens them anew.

    Attributes:
      path: as given.
      config: contents of config.json.
      tensors: read-only; by name.
    """

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]

    @staticmethod
    def open(path: str | os.PathLike[str]) -> HuggingFaceFolder:
        """Reads and checks config.json and the weights' headers; no tensor data.

        Raises:
          HuggingFaceError: a file is missing, damaged, cut short, or of a kind that is not read.
        """
        path = Path(path)
        if not path.is_dir():
            raise HuggingFaceError(f"{path}: no such folder")
        config = read_json(path / "config.json")
        index = path / INDEX_FILE
        tensors = _sharded(path, index) if index.exists() else read_tensors(_single(path))
        return HuggingFaceFolder(path, config, MappingProxyType(tensors))

    def load(self, name: str) -> np.ndarray:
        """The tensor `name` as it is stored: float32, float16 or bfloat16, C order.

        Peak memory is the result and under 4 MB.

        Raises:
          HuggingFaceError: no such tensor, one of another dtype, its file changed since it was opened, or a value is
            not finite.
        """
        info = self.tensors.get(name)
        if info is None:
            raise HuggingFaceError(f"{self.path}: tensor {quote(name)}: missing{_nearest(name, self.tensors)}")
        where = f"{info.path}: tensor {quote(name)}"
        if info.dtype not in READABLE:
            raise HuggingFaceError(f"{where}: dtype {info.dtype} is not read; it must be one of {', '.join(READABLE)}")
        try:
            with open(info.path, "rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != info.file_size:
                    raise HuggingFaceError(f"{where}: the file's size changed since it was opened")
                file.seek(info.offset)
                return _read(file, info, where)
        except OSError as error:
            raise HuggingFaceError(f"{where}: {error.strerror or error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """One of the folder's JSON files; an object.

    Raises:
      HuggingFaceError: it cannot be read, or is not one.
    """
    return parse_object(read_bytes(path, MAX_JSON_BYTES), str(path))


def _single(folder: Path) -> Path:
    """The one file of weights."""
    path = folder / SINGLE_FILE
    if path.exists():
        return path
    pickled = [name for name in PICKLED if (folder / name).exists()]
    if pickled:
        raise HuggingFaceError(
            f"{folder / pickled[0]}: pickled weights can run code and are not read; save the model as safetensors"
        )
    raise HuggingFaceError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")


def _sharded(folder: Path, index: Path) -> dict[str, StoredTensor]:
    """The tensors that the index names, each from the file it names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise HuggingFaceError(f"{index}: weight_map: must be an object of tensor and file names")
    for name, file_name in weight_map.items():
        # A plain name: nothing that an index says leads out of the folder.
        if not isinstance(file_name, str) or not FILE_NAME.fullmatch(file_name):
            raise HuggingFaceError(
                f"{index}: weight_map {quote(name)}: {quote(str(file_name))} is not the name of a safetensors file "
                "in the folder"
            )
    files = {file_name: read_tensors(folder / file_name) for file_name in sorted(set(weight_map.values()))}
    found = {}
    for name, file_name in weight_map.items():
        if name not in files[file_name]:
            raise HuggingFaceError(f"{folder / file_name}: tensor {quote(name)}: missing, though {INDEX_FILE} names it")
        found[name] = files[file_name][name]
    return found


def _read(file: FileIO, info: StoredTensor, where: str) -> np.ndarray:
    """The values from the file's position on, a chunk at a time, each checked while it is in the CPU's cache."""
    dtype, exponent = READABLE[info.dtype]
    out = np.empty(info.num_bytes, np.uint8)
    view = out.data
    bits = out.view(exponent.dtype)
    for first in range(0, info.num_bytes, CHUNK_BYTES):
        last = min(first + CHUNK_BYTES, info.num_bytes)
        filled = first
        while filled < last:
            count = file.readinto(view[filled:last])
            if not count:
                raise HuggingFaceError(f"{where}: the file became shorter while it was read")
            filled += count
        chunk = bits[first // bits.itemsize : last // bits.itemsize]
        if ((chunk & exponent) == exponent).any():
            raise HuggingFaceError(f"{where}: holds a value that is not finite")
    return out.view(dtype).reshape(info.shape)


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, 1)
    return f"; the nearest is {quote(near[0])}" if near else ""
