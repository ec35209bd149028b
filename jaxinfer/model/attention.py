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
from jaxinfer.model.norms import RMSNorm
from jaxinfer.model.rope import rotate
from jaxinfer.model.sharding import MeshRules, PackedAxis
from pallas_kernels.ragged_paged_attention import AttentionOp


class AttentionInput(NamedTuple):
    """What attention needs beside the hidden states.

    Attributes:
      cos_T2H, sin_T2H: float32 [T, 2, H / 2], rotary phases of both halves of a head.
      page_T, offset_T: int32, where each token's key and value go; page 0 for padding.
      work: the op's work list for this layer's window.
    """

    cos_T2H: jax.Array
    sin_T2H: jax.Array
    page_T: jax.Array
    offset_T: jax.Array
    work: Any


class SelfAttention(nnx.Module):
    """Grouped-query attention.

    Queries, keys and values are one product, laid out by KV head so that heads shard together.

    Attributes:
      qkv: columns in the order (KV head, its queries, key and value, H).
      out: rows in the order (KV head, its queries, H).
      q_norm, k_norm: over each head's values, or None.
      scale, soft_cap: of the scores.
    """

    def __init__(self, arch: Architecture, *, order: str, dtype, rngs: nnx.Rngs | None):
        d, k, g, h = arch.hidden_size, arch.num_kv_heads, arch.group_size, arch.head_dim
        options = {"order": order, "dtype": dtype, "rngs": rngs}
        heads = PackedAxis("kv_heads", k)
        self.qkv = Linear(d, None, k * (g + 2) * h, heads, **options, has_bias=arch.has_qkv_bias)
        self.out = Linear(k * g * h, heads, d, None, **options, has_bias=arch.has_out_bias)
        norm = functools.partial(RMSNorm, h, arch.rms_norm_eps, dtype=dtype, rngs=rngs, adds_one=arch.norm_adds_one)
        self.q_norm = norm() if arch.has_qk_norm else None
        self.k_norm = norm() if arch.has_qk_norm else None
        self.num_kv_heads, self.group_size, self.head_dim = k, g, h
        self.scale = arch.attention_scale
        self.soft_cap = arch.attention_soft_cap

    def __call__(self, x_TD, pages, inputs: AttentionInput, op: AttentionOp, rules: MeshRules):
        """Returns (out_TD, pages with this step's keys and values written)."""
        num_tokens, g = x_TD.shape[0], self.group_size
        qkv_TKXH = self.qkv(x_TD).reshape(num_tokens, self.num_kv_heads, g + 2, self.head_dim)
        q_TKGH, k_TKH = qkv_TKXH[:, :, :g], qkv_TKXH[:, :, g]
        if self.q_norm is not None and self.k_norm is not None:
            q_TKGH, k_TKH = self.q_norm(q_TKGH), self.k_norm(k_TKH)
        q_TKGH = rotate(q_TKGH, inputs.cos_T2H, inputs.sin_T2H)
        k_TKH = rotate(k_TKH, inputs.cos_T2H, inputs.sin_T2H)
        v_TKH = qkv_TKXH[:, :, g + 1]
        heads = "model" if self.num_kv_heads % rules.mesh.shape["model"] == 0 else None
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
            return op.attend(q_TKGH, pages, inputs.work, scale=self.scale, soft_cap=self.soft_cap), pages

        attended_TKGH, pages = attend(q_TKGH, k_TKH, v_TKH, pages, inputs)
        return self.out(attended_TKGH.reshape(num_tokens, -1)), pages
