"""Block sizes that a tuner found: `tuned.json` in an op's folder, by device kind and shape bucket.

    {"TPU v5 lite": {"decode/K8/G4/H128/Z64/bfloat16": {"pages_per_block": 16},
                     "work/Z64":                       {"queries_per_tile": 256}}}

Data, never code. A field, bucket or device that is not there has the implementation's own default: a table makes a
kernel faster and never decides whether it runs. `scripts/tune_kernels.py` writes it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

FILE = "tuned.json"
MODES = ("decode", "mixed")  # of attention
_BUCKET = re.compile(r"[a-z0-9]+(?:/[A-Z][1-9]\d*)+(?:/[a-z]+\d[a-z0-9_]*)?")

Sizes = TypeVar("Sizes")
Table = dict[str, dict[str, dict[str, int]]]


class BadTable(ValueError):
    """A file of block sizes that is not as this module describes it."""


def bucket(kind: str, *, dtype: Any = None, **sizes: int) -> str:
    """Key of a shape: bucket("w8a16", I=4096, O=14336, dtype="int8") is "w8a16/I4096/O14336/int8".

    Args:
      kind: what the op does there, or the part of it that is sized.
      dtype: of what is read most.
      sizes: by the letter of their axis, always in the same order.
    """
    parts = [kind, *(f"{letter}{size}" for letter, size in sizes.items())]
    return "/".join(parts if dtype is None else [*parts, jnp.dtype(dtype).name])


def shape_bucket(mode: str, *, num_kv_heads: int, group: int, head_dim: int, page_size: int, kv_dtype: Any) -> str:
    """Key of the sizes that an attention kernel takes when it is called.

    Args:
      mode: decode: every row has one query token; mixed: some may have more.
      num_kv_heads: K of one device.
      kv_dtype: of pages.
    """
    assert mode in MODES, mode
    return bucket(mode, K=num_kv_heads, G=group, H=head_dim, Z=page_size, dtype=kv_dtype)


def work_bucket(page_size: int) -> str:
    """Key of the sizes that a step's work list takes, which is made before heads are known."""
    return bucket("work", Z=page_size)


def device_kind() -> str:
    """Jax's name of the device that is being compiled for: of the mesh in use, else the first one here.

    Under `jax.set_mesh` of a compile-only topology this is a device that is not here.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.device_kind if device is not None else jax.devices()[0].device_kind


def parse(text: str, source: str) -> Table:
    """Reads a table.

    Raises:
      BadTable: the message names the source and the key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise BadTable(f"{source}: {twice[0]!r} stands there twice")
        return dict(pairs)

    try:
        table = json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as why:
        raise BadTable(f"{source}: not JSON: {why}") from why
    _need(isinstance(table, dict), source, "the whole must be an object by device kind")
    for kind, buckets in table.items():
        _need(isinstance(buckets, dict), source, f"{kind!r} must be an object by shape bucket")
        for name, sizes in buckets.items():
            place = f"{kind!r}: {name!r}"
            _need(
                _BUCKET.fullmatch(name) is not None,
                source,
                f"{place} is no shape bucket; one is decode/K8/G4/H128/Z64/bfloat16",
            )
            _need(isinstance(sizes, dict) and bool(sizes), source, f"{place} must be an object of sizes by field")
            for field, size in sizes.items():
                _need(
                    type(size) is int and size > 0, source, f"{place}: {field} is {size!r}; it must be an integer > 0"
                )
    return table


def _need(holds: bool, source: str, message: str) -> None:
    if not holds:
        raise BadTable(f"{source}: {message}")


class BlockSizeTable:
    """The part of an op's table that one implementation reads.

    Attributes:
      sizes: by device kind, then by bucket.
    """

    def __init__(self, sizes: Mapping[str, Mapping[str, Mapping[str, int]]]):
        self.sizes = sizes

    @staticmethod
    def load(op_folder: Path, device_prefix: str, fields_of: type) -> BlockSizeTable:
        """Reads and checks `tuned.json`; empty where there is no such file.

        Args:
          device_prefix: of the device kinds that the implementation runs on.
          fields_of: dataclass of its block sizes.

        Raises:
          BadTable: the file is not such a table, or sizes something that there is not.
        """
        path = op_folder / FILE
        if not path.exists():
            return BlockSizeTable({})
        known = {field.name for field in dataclasses.fields(fields_of)}
        table = parse(path.read_text(encoding="utf-8"), str(path))
        mine = {kind: buckets for kind, buckets in table.items() if kind.startswith(device_prefix)}
        for kind, buckets in mine.items():
            for name, sizes in buckets.items():
                for field in sizes:
                    _need(
                        field in known,
                        str(path),
                        f"{kind!r}: {name!r}: {field!r} is no block size; there are: {', '.join(sorted(known))}",
                    )
        return BlockSizeTable(mine)

    def find(self, kind: str, name: str) -> Mapping[str, int] | None:
        """Sizes by field, or None where nothing was tuned."""
        return self.sizes.get(kind, {}).get(name)

    def choose(self, name: str, default: Sizes) -> Sizes:
        """`default`, with what was tuned for the device that is being compiled for.

        Args:
          name: of the bucket.
          default: a dataclass.
        """
        found = self.find(device_kind(), name) if self.sizes else None
        return dataclasses.replace(default, **found) if found else default  # pyright: ignore  # a dataclass, see above


def write(op_folder: Path, table: Table) -> None:
    """Writes a table in an order of its own, so that a change shows as one."""
    text = json.dumps(table, indent=1, sort_keys=True) + "\n"
    parse(text, FILE)
    (op_folder / FILE).write_text(text, encoding="utf-8")
