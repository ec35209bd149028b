"""What a compiled program sends between devices, read from its text.

Two reductions of the hidden states per layer and one gathering of the logits are needed; more than that means that an
array is divided in a way that a product cannot use, and is put together again in every step.
"""

from __future__ import annotations

import math
import re

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")
# An operation in two parts is counted at its end, whose type is that of the results alone.
_OPERATION = re.compile(rf" = (\(.*?\)|\S+) ({'|'.join(_KINDS)})(?:-done)?\(")
_ARRAY = re.compile(r"\b(pred|bf16|f8\w+|[suf]\d+)\[([\d,]*)\]")


def exchanged_bytes(text: str) -> dict[str, int]:
    """Bytes of the results on one device, by kind of operation; the body of a loop counts once.

    Args:
      text: of an optimized HLO module.
    """
    found: dict[str, int] = {}
    for shape, kind in _OPERATION.findall(text):
        found[kind] = found.get(kind, 0) + sum(_num_bytes(dtype, dims) for dtype, dims in _ARRAY.findall(shape))
    return found


def _num_bytes(dtype: str, dims: str) -> int:
    bits = 8 if dtype == "pred" or dtype.startswith("f8") else int(re.sub(r"\D", "", dtype))
    return -(-math.prod(int(dim) for dim in dims.split(",") if dim) * bits // 8)
