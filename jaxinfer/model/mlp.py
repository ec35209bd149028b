"""Gated feed-forward block (SwiGLU; Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import jax
from flax import nnx

from jaxinfer.model.architecture import Architecture
from jaxinfer.model.linear import Linear


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, arch: Architecture, *, order: str, dtype, rngs: nnx.Rngs):
        d, f = arch.hidden_size, arch.intermediate_size
        self.gate_up = Linear((d,), (None,), (2, f), (None, "mlp"), order=order, dtype=dtype, rngs=rngs)
        self.down = Linear((f,), ("mlp",), (d,), (None,), order=order, dtype=dtype, rngs=rngs)

    def __call__(self, x_TD):
        h_T2F = self.gate_up(x_TD)
        return self.down(jax.nn.silu(h_T2F[:, 0]) * h_T2F[:, 1])
