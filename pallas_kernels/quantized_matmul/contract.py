"""The op's contract: y = x W with W stored in 8 or 4 bits, divided by scales.

    scheme   values_IO   scale            product
    w8a16    int8        float32 [O]      of x and the integers, summed in float32, times the column's scale
    w4a16    int4        float32 [U, O]   group u of I / U neighbouring inputs has a scale of its own in each column
    w8a8     int8        float32 [O]      x is rounded to int8 too, one scale a row; summed in int32

Scales are symmetric: a weight is its integer times its scale. Letters: I inputs, O outputs, U groups of inputs.

int4 is jax's own dtype: XLA keeps it in half a byte on every platform. Where an implementation reads it as bytes, the
low half of a byte is the even column.

Sharded: an implementation that is a Pallas kernel runs under `shard_map`. With O split, values and scales are split
alike. With I split, groups must not be torn: each device holds whole groups and their scales, and the outputs are added
up. In w8a8 each device then rounds its part of a row by that part's own scale, so that none waits for the others.

NaN or infinity in a row of x makes that row of the result NaN or infinite, in every scheme, and no other row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax

SCHEMES = ("w8a16", "w4a16", "w8a8")


class QuantizedWeight(NamedTuple):
    """A weight [I, O].

    Attributes:
      values_IO: int8 in [-127, 127], or int4 in [-8, 7].
      scale: float32 [O], or [U, O] for int4; positive.
    """

    values_IO: jax.Array
    scale: jax.Array


@dataclass(frozen=True, kw_only=True)
class MatmulNeeds:
    """What an implementation must run. None where the caller does not know it yet.

    Attributes:
      platform: jax's name of the devices' platform.
      scheme: one of `SCHEMES`.
      num_rows: T, a bucket of the step's.
      num_inputs, num_outputs: I and O, of one device's shard.
      group_size: inputs that share a scale, in w4a16.
      dtype: name of the activations' dtype.
      device_kind: jax's name of the kind of device, such as "TPU v6 lite".
    """

    platform: str
    scheme: str
    num_rows: int | None = None
    num_inputs: int | None = None
    num_outputs: int | None = None
    group_size: int | None = None
    dtype: str | None = None
    device_kind: str | None = None

    def __post_init__(self):
        assert self.scheme in SCHEMES, f"scheme is {self.scheme!r}; there are: {', '.join(SCHEMES)}"


@dataclass(frozen=True)
class MatmulOp:
    """One implementation.

    Attributes:
      name: as asked for by the user.
      matmul: (x_TI, weight, *, scheme, x_scale=None) -> y_TO in x's dtype, float32 or bfloat16. `x_scale` is for w8a8
        alone: a positive float32 [] from calibration in place of each row's own; x beyond 127 of it is cut off.
      why_not: MatmulNeeds -> None, or why this implementation cannot run them here, and what to do about it.
    """

    name: str
    matmul: Callable[..., jax.Array]
    why_not: Callable[[MatmulNeeds], str | None] = lambda needs: None


def check_shapes(x_TI: jax.Array, weight: QuantizedWeight, scheme: str, x_scale: jax.Array | None) -> None:
    """Checks shapes and dtypes at trace time.

    Raises:
      AssertionError: they are not the contract's.
    """
    values_IO, scale = weight
    assert scheme in SCHEMES, f"scheme is {scheme!r}; there are: {', '.join(SCHEMES)}"
    stored = "int4" if scheme == "w4a16" else "int8"
    assert values_IO.dtype == stored, f"{scheme} takes {stored} weights; these are {values_IO.dtype}"
    assert scale.dtype == "float32", f"scales are float32; these are {scale.dtype}"
    assert x_TI.dtype in ("float32", "bfloat16"), f"activations are float32 or bfloat16; these are {x_TI.dtype}"
    inputs, outputs = values_IO.shape
    assert x_TI.shape == (x_TI.shape[0], inputs), f"x is {x_TI.shape}, the weight {values_IO.shape}"
    if scheme == "w4a16":
        assert scale.shape == (scale.shape[0], outputs), f"scales are {scale.shape}, the weight {values_IO.shape}"
        assert inputs % scale.shape[0] == 0, f"{inputs} inputs do not make {scale.shape[0]} equal groups"
    else:
        assert scale.shape == (outputs,), f"scales are {scale.shape}, the weight {values_IO.shape}"
    assert x_scale is None or (scheme == "w8a8" and x_scale.shape == ()), "x_scale is a scalar, for w8a8"
