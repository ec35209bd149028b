"""Gated feed-forward block (SwiGLU and GeGLU; Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.model.architecture import Architecture
from jaxinfer.model.linear import Linear


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, arch: Architecture, *, order: str, dtype, rngs: nnx.Rngs | None):
        d, f = arch.hidden_size, arch.intermediate_size
        options = {"order": order, "dtype": dtype, "rngs": rngs, "has_bias": arch.has_mlp_bias}
        self.gate_up = Linear((d,), (None,), (2, f), (None, "mlp"), **options)
        self.down = Linear((f,), ("mlp",), (d,), (None,), **options)
        self.activation = arch.activation

    def __call__(self, x_TD):
        h_T2F = self.gate_up(x_TD)
        return self.down(self._activate(h_T2F[:, 0]) * h_T2F[:, 1])

    def _activate(self, gate_TF):
        if self.activation == "silu":
            return jax.nn.silu(gate_TF)
        # In float32: the cube and the tanh of the approximation each round in bfloat16.
        return jax.nn.gelu(gate_TF.astype(jnp.float32), approximate=True).astype(gate_TF.dtype)
