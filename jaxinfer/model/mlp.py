"""Gated feed-forward block (SwiGLU and GeGLU; Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.model.architecture import Architecture
from jaxinfer.model.linear import Linear
from jaxinfer.model.sharding import MeshRules, PackedAxis


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); gate and up are one product.

    Attributes:
      gate_up: columns in the order (device, gate or up, column): a device has both factors of what it multiplies.
    """

    def __init__(self, arch: Architecture, *, order: str, dtype, rngs: nnx.Rngs | None):
        d, f = arch.hidden_size, arch.intermediate_size
        options = {"order": order, "dtype": dtype, "rngs": rngs, "has_bias": arch.has_mlp_bias}
        self.gate_up = Linear(d, None, 2 * f, PackedAxis("mlp", f, num_members=2), **options)
        self.down = Linear(f, "mlp", d, None, **options)
        self.size = f
        self.activation = arch.activation

    def __call__(self, x_TD, rules: MeshRules):
        columns = rules.spec((x_TD.shape[0], self.size), ("tokens", "mlp"))

        # On each device: two slices of a matrix are read in place, those of a reshaped one are copied on a TPU.
        @functools.partial(jax.shard_map, mesh=rules.mesh, in_specs=columns, out_specs=columns, check_vma=False)
        def gated(h_T2F):
            gate_TF, up_TF = jnp.split(h_T2F, 2, axis=1)
            return self._activate(gate_TF) * up_TF

        return self.down(gated(self.gate_up(x_TD)))

    def _activate(self, gate_TF):
        if self.activation == "silu":
            return jax.nn.silu(gate_TF)
        # In float32: the cube and the tanh of the approximation each round in bfloat16.
        return jax.nn.gelu(gate_TF.astype(jnp.float32), approximate=True).astype(gate_TF.dtype)
