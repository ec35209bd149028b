"""GGUF files for tests: well-formed ones through `gguf.GGUFWriter`, and one in its fields, to be damaged."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType, GGUFValueType


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[np.ndarray, str]]) -> Path:
    """Writes a GGUF file of architecture `llama`.

    Args:
      metadata: bool, int (as uint32), float (as float32), str, or a list; `general.architecture` is added.
      tensors: {name: (values, format)}: float32 values are quantized, uint8 values are taken as finished blocks.
    """
    writer = gguf.GGUFWriter(path, "llama")
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        add.get(type(value), writer.add_array)(key, value)
    for name, (values, block_type) in tensors.items():
        kind = GGMLQuantizationType[block_type]
        blocks = values if values.dtype == np.uint8 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


def u64(value: int) -> bytes:
    return struct.pack("<Q", value)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return u64(len(data)) + data


def raw_parts() -> dict[str, bytes]:
    """A small file as its fields in order: four pairs, two tensors. Joined, it is well formed.

    The data: `blocks` is Q8_0 of shape (2, 32), all zeros, 68 bytes, padded to 96; `plain` is F32 of shape (3,), at 96.
    """
    parts = {
        "magic": b"GGUF",
        "version": u32(3),
        "tensor count": u64(2),
        "pair count": u64(4),
        "key 0": text("general.architecture"),
        "type 0": u32(GGUFValueType.STRING),
        "value 0": text("llama"),
        "key 1": text("tokens"),
        "type 1": u32(GGUFValueType.ARRAY),
        "element type 1": u32(GGUFValueType.STRING),
        "length 1": u64(3),
        "items 1": text("a") + text("<0x-1>") + text("a"),
        "key 2": text("scores"),
        "type 2": u32(GGUFValueType.ARRAY),
        "element type 2": u32(GGUFValueType.FLOAT32),
        "length 2": u64(2),
        "items 2": struct.pack("<ff", 1.5, -2.0),
        "key 3": text("flag"),
        "type 3": u32(GGUFValueType.BOOL),
        "value 3": b"\x01",
        "name 0": text("blocks"),
        "dimensions 0": u32(2),
        "dims 0": u64(32) + u64(2),
        "block type 0": u32(GGMLQuantizationType.Q8_0),
        "offset 0": u64(0),
        "name 1": text("plain"),
        "dimensions 1": u32(1),
        "dims 1": u64(3),
        "block type 1": u32(GGMLQuantizationType.F32),
        "offset 1": u64(96),
    }
    header_bytes = sum(map(len, parts.values()))
    data = bytes(96) + struct.pack("<fff", 1.0, 2.0, 3.0)
    return parts | {"padding": bytes(-header_bytes % 32), "data": data}


def write_parts(path: Path, changes: Mapping[str, bytes] | None = None) -> Path:
    """Writes `raw_parts` with some fields replaced, padding the header anew."""
    parts = raw_parts()
    changes = changes or {}
    assert changes.keys() <= parts.keys(), "no such field"
    parts |= changes
    if "padding" not in changes:
        header_bytes = sum(len(value) for field, value in parts.items() if field not in ("padding", "data"))
        parts["padding"] = bytes(-header_bytes % 32)
    path.write_bytes(b"".join(parts.values()))
    return path
