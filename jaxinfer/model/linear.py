"""A matrix product whose stored order is chosen by measurement: [in, out] or [out, in].

Which is faster depends on the machine.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.model.params import declare

WEIGHT_ORDERS = ("in_out", "out_in")


class Linear(nnx.Module):
    """y = x W + b over the trailing `len(in_shape)` axes of x, accumulated in float32.

    Attributes:
      weight: [*in_shape, *out_shape] or [*out_shape, *in_shape], by `order`.
      bias: [*out_shape], or None.
    """

    def __init__(
        self,
        in_shape,
        in_axes,
        out_shape,
        out_axes,
        *,
        order: str,
        dtype,
        rngs: nnx.Rngs | None,
        has_bias: bool = False,
    ):
        assert order in WEIGHT_ORDERS
        scale = 1.0 / math.sqrt(math.prod(in_shape))
        shape, axes = (
            (in_shape + out_shape, in_axes + out_axes)
            if order == "in_out"
            else (out_shape + in_shape, out_axes + in_axes)
        )
        self.weight = declare(rngs, shape, axes, dtype=dtype, scale=scale)
        self.bias = declare(rngs, out_shape, out_axes, dtype=dtype, scale=scale) if has_bias else None
        self.in_shape = in_shape
        self.out_shape = out_shape
        self.order = order

    def __call__(self, x):
        size_in, size_out = math.prod(self.in_shape), math.prod(self.out_shape)
        x_TI = x.reshape(x.shape[0], size_in)
        weight = self.weight[...]
        if self.order == "in_out":
            w, contract = weight.reshape(size_in, size_out), 0
        else:
            w, contract = weight.reshape(size_out, size_in), 1
        y_TO = dot(x_TI, w, contract, None if self.bias is None else self.bias[...].reshape(size_out))
        return y_TO.reshape(x.shape[0], *self.out_shape)


def dot(x_TI, w, contract: int, bias_O=None):
    """x @ w + bias over w's axis `contract`; float32 inputs keep full float32 precision on every platform."""
    precision = lax.Precision.HIGHEST if x_TI.dtype == jnp.float32 else lax.Precision.DEFAULT
    y_TO = lax.dot_general(
        x_TI, w, (((1,), (contract,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
    if bias_O is not None:
        y_TO = y_TO + bias_O.astype(jnp.float32)[None, :]
    return y_TO.astype(x_TI.dtype)
