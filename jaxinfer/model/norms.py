"""Root-mean-square normalisation (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxinfer.model.params import declare


class RMSNorm(nnx.Module):
    """Scales each token to unit mean square, then by a learnt weight; computed in float32, returned in x's dtype."""

    def __init__(self, size: int, eps: float, *, dtype, rngs: nnx.Rngs):
        self.weight = declare(rngs, (size,), (None,), dtype=dtype, scale=None)
        self.eps = eps

    def __call__(self, x_TD):
        x32_TD = x_TD.astype(jnp.float32)
        mean_T1 = jnp.mean(jnp.square(x32_TD), axis=-1, keepdims=True)
        weight_1D = self.weight[...].astype(jnp.float32)[None, :]
        return (x32_TD * lax.rsqrt(mean_T1 + self.eps) * weight_1D).astype(x_TD.dtype)
