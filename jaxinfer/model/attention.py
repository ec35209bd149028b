"""Self-attention over pages: projections, rotation, the write of new keys and values, and the op.

Each device runs the op over its own heads.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import PartitionSpec

from jaxinfer.model.architecture import Architecture
from jaxinfer.model.linear import Linear
from jaxinfer.model.rope import rotate
from jaxinfer.model.sharding import MeshRules
from pallas_kernels.ragged_paged_attention import AttentionOp


class AttentionInput(NamedTuple):
    """What attention needs beside the hidden states.

    Attributes:
      cos_TH, sin_TH: float32 [T, H / 2], rotary phases.
      page_T, offset_T: int32, where each token's key and value go; page 0 for padding.
      work: the op's work list for this layer's window.
    """

    cos_TH: jax.Array
    sin_TH: jax.Array
    page_T: jax.Array
    offset_T: jax.Array
    work: Any


class SelfAttention(nnx.Module):
    """Grouped-query attention.

    Queries, keys and values are one product, laid out by KV head so that heads shard together.
    """

    def __init__(self, arch: Architecture, *, order: str, dtype, rngs: nnx.Rngs):
        d, k, g, h = arch.hidden_size, arch.num_kv_heads, arch.group_size, arch.head_dim
        self.qkv = Linear((d,), (None,), (k, g + 2, h), ("kv_heads", None, None), order=order, dtype=dtype, rngs=rngs)
        self.out = Linear((k, g, h), ("kv_heads", None, None), (d,), (None,), order=order, dtype=dtype, rngs=rngs)
        self.group_size = g
        self.scale = h**-0.5

    def __call__(self, x_TD, pages, inputs: AttentionInput, op: AttentionOp, rules: MeshRules):
        """Returns (out_TD, pages with this step's keys and values written)."""
        qkv_TKXH = self.qkv(x_TD)
        g = self.group_size
        q_TKGH = rotate(qkv_TKXH[:, :, :g], inputs.cos_TH, inputs.sin_TH)
        k_TKH = rotate(qkv_TKXH[:, :, g], inputs.cos_TH, inputs.sin_TH)
        v_TKH = qkv_TKXH[:, :, g + 1]
        num_kv = k_TKH.shape[1]
        heads = "model" if num_kv % rules.mesh.shape["model"] == 0 else None
        on_heads = PartitionSpec(None, heads)
        page_specs = jax.tree.map(
            lambda a: PartitionSpec(*(heads if i == op.kv_head_axis else None for i in range(a.ndim))), pages
        )

        @functools.partial(
            jax.shard_map,
            mesh=rules.mesh,
            in_specs=(on_heads, on_heads, on_heads, page_specs, PartitionSpec()),
            out_specs=(on_heads, page_specs),
            check_vma=False,
        )
        def attend(q_TKGH, k_TKH, v_TKH, pages, inputs):
            pages = op.write(pages, k_TKH, v_TKH, inputs.page_T, inputs.offset_T)
            return op.attend(q_TKGH, pages, inputs.work, scale=self.scale, soft_cap=None), pages

        attended_TKGH, pages = attend(q_TKGH, k_TKH, v_TKH, pages, inputs)
        return self.out(attended_TKGH), pages
