"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.model.params import declare


class RMSNorm(nnx.Module):
    """Scales the last axis to unit mean square, then by a learnt weight; computed in float32, returned in x's dtype.

    Attributes:
      weight: [size].
      adds_one: the factor is 1 + weight, kept apart because 1 + weight in bfloat16 would lose the weight's low bits.
    """

    def __init__(self, size: int, eps: float, *, dtype, rngs: nnx.Rngs | None, adds_one: bool = False):
        self.weight = declare(rngs, (size,), (None,), dtype=dtype, scale=0.0 if adds_one else None)
        self.eps = eps
        self.adds_one = adds_one

    def __call__(self, x):
        x32 = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
        weight = jnp.expand_dims(self.weight[...].astype(jnp.float32), tuple(range(x.ndim - 1)))
        if self.adds_one:
            weight = 1.0 + weight
        return (x32 * lax.rsqrt(mean + self.eps) * weight).astype(x.dtype)
