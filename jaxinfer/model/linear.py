"""A matrix product whose stored order is chosen by measurement: [in, out] or [out, in].

Which is faster depends on the machine.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.model.params import declare
from jaxinfer.model.sharding import Axis

WEIGHT_ORDERS = ("in_out", "out_in")


class Linear(nnx.Module):
    """y_TO = x_TI W + b, accumulated in float32.

    The matrix is stored as the product reads it: a reshape of it could be a copy of all weights in every dispatch.

    Attributes:
      weight: [I, O] or [O, I], by `order`.
      bias: [O], or None.
    """

    def __init__(
        self,
        size_in: int,
        axis_in: Axis,
        size_out: int,
        axis_out: Axis,
        *,
        order: str,
        dtype,
        rngs: nnx.Rngs | None,
        has_bias: bool = False,
    ):
        assert order in WEIGHT_ORDERS
        scale = 1.0 / math.sqrt(size_in)
        shape, axes = (size_in, size_out), (axis_in, axis_out)
        if order == "out_in":
            shape, axes = shape[::-1], axes[::-1]
        self.weight = declare(rngs, shape, axes, dtype=dtype, scale=scale)
        self.bias = declare(rngs, (size_out,), (axis_out,), dtype=dtype, scale=scale) if has_bias else None
        self.order = order

    def __call__(self, x_TI):
        contract = 0 if self.order == "in_out" else 1
        return dot(x_TI, self.weight[...], contract, None if self.bias is None else self.bias[...])


def dot(x_TI, w, contract: int, bias_O=None):
    """x @ w + bias over w's axis `contract`; float32 inputs keep full float32 precision on every platform."""
    precision = lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else lax.Precision.DEFAULT
    y_TO = lax.dot_general(
        x_TI, w, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    if bias_O is not None:
        y_TO = y_TO + bias_O.astype(jnp.float32)[None, :]
    return y_TO.astype(x_TI.dtype)
