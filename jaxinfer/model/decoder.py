"""The decoder: embedding, unrolled layers, final norm, head. Modules say what there is; the functions below are pure.

Layers are unrolled (a scan copies each layer's weights out of a stack), yet traced once: every layer has the same
static graph, and `LayerCall` lets the caller hand in a cached version of `run_layer`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.model.architecture import Architecture
from jaxinfer.model.attention import AttentionInput, SelfAttention
from jaxinfer.model.linear import dot
from jaxinfer.model.mlp import GatedMLP
from jaxinfer.model.norms import RMSNorm
from jaxinfer.model.params import ModelParams, declare
from jaxinfer.model.rope import phases
from jaxinfer.model.sharding import MeshRules
from pallas_kernels.ragged_paged_attention import AttentionOp, RaggedBatch

LayerCall = Callable[..., tuple[jax.Array, Any]]


class DecoderLayer(nnx.Module):
    """Attention and feed-forward blocks with residuals, a norm in front of each, and behind each where there is one."""

    def __init__(self, arch: Architecture, *, order: str, dtype, rngs: nnx.Rngs | None):
        norm = functools.partial(_norm, arch, dtype=dtype, rngs=rngs)
        self.attention_norm = norm()
        self.attention = SelfAttention(arch, order=order, dtype=dtype, rngs=rngs)
        self.attention_post_norm = norm() if arch.has_post_norms else None
        self.mlp_norm = norm()
        self.mlp = GatedMLP(arch, order=order, dtype=dtype, rngs=rngs)
        self.mlp_post_norm = norm() if arch.has_post_norms else None

    def __call__(self, x_TD, pages, inputs: AttentionInput, op: AttentionOp, rules: MeshRules):
        attended_TD, pages = self.attention(self.attention_norm(x_TD), pages, inputs, op, rules)
        if self.attention_post_norm is not None:
            attended_TD = self.attention_post_norm(attended_TD)
        x_TD = x_TD + attended_TD
        fed_TD = self.mlp(self.mlp_norm(x_TD), rules)
        if self.mlp_post_norm is not None:
            fed_TD = self.mlp_post_norm(fed_TD)
        return x_TD + fed_TD, pages


class Decoder(nnx.Module):
    """Declares every parameter of a dense decoder.

    Attributes:
      embedding: [V, D].
      head: [V, D], or None when tied to the embedding.
      layers: taken out by `params.split_decoder`, which leaves None.
      embedding_scale: what embeddings are multiplied by, or None.
      logit_soft_cap: c in c * tanh(logit / c), or None.
    """

    def __init__(self, arch: Architecture, *, order: str = "in_out", dtype=jnp.float32, rngs: nnx.Rngs | None):
        table = (arch.vocab_size, arch.hidden_size)
        self.embedding = declare(rngs, table, ("vocab", None), dtype=dtype, scale=0.02)
        self.head = None if arch.is_tied else declare(rngs, table, ("vocab", None), dtype=dtype, scale=0.02)
        self.norm = _norm(arch, dtype=dtype, rngs=rngs)
        self.embedding_scale = math.sqrt(arch.hidden_size) if arch.is_embedding_scaled else None
        self.logit_soft_cap = arch.logit_soft_cap
        self.layers = nnx.data(
            [DecoderLayer(arch, order=order, dtype=dtype, rngs=rngs) for _ in range(arch.num_layers)]
        )


class StepTokensInput(NamedTuple):
    """The packed query tokens of a step.

    Attributes:
      token_T, position_T: int32; padding tokens are token 0 at position 0.
      page_T, offset_T: int32, where keys and values go; page 0 for padding.
      batch: rows, page tables and contexts.
    """

    token_T: jax.Array
    position_T: jax.Array
    page_T: jax.Array
    offset_T: jax.Array
    batch: RaggedBatch


def run_layer(graph, op: AttentionOp, rules: MeshRules, state, x_TD, pages, inputs: AttentionInput):
    """One layer; `graph`, `op` and `rules` are static and hashable."""
    return nnx.merge(graph, state)(x_TD, pages, inputs, op, rules)


def embed(params: ModelParams, rules: MeshRules, token_T):
    """Hidden states [T, D] of int32 tokens, divided over "data" where they divide."""
    top = nnx.merge(params.top_graph, params.top)
    x_TD = top.embedding[...].at[token_T].get(mode="promise_in_bounds")
    if top.embedding_scale is not None:
        # Rounded first, as the model was trained: in bfloat16 sqrt(3072) = 55.43 is 55.5.
        x_TD = x_TD * jnp.asarray(top.embedding_scale, x_TD.dtype)
    return lax.with_sharding_constraint(x_TD, NamedSharding(rules.mesh, rules.spec(x_TD.shape, ("tokens", None))))


def forward(
    params: ModelParams,
    arch: Architecture,
    op: AttentionOp,
    rules: MeshRules,
    pages,
    inputs: StepTokensInput,
    *,
    max_query_len: int,
    page_size: int,
    call_layer: LayerCall = run_layer,
):
    """Runs all layers.

    Args:
      pages: tuple of each layer's pages.
      max_query_len: bound on a row's query tokens; 1 promises that row b's token is token b.
      call_layer: `run_layer`, or a cached version of it.

    Returns:
      (x_TD before the final norm, pages).
    """
    works = {
        window: op.prepare(
            inputs.batch,
            num_tokens=inputs.token_T.shape[0],
            max_query_len=max_query_len,
            page_size=page_size,
            sliding_window=window,
        )
        for window in arch.windows
    }
    cos_T2H, sin_T2H = phases(arch, inputs.position_T)
    x_TD = embed(params, rules, inputs.token_T)
    new_pages = []
    for i, (graph, state) in enumerate(zip(params.layer_graphs, params.layers, strict=True)):
        attention_input = AttentionInput(cos_T2H, sin_T2H, inputs.page_T, inputs.offset_T, works[arch.window(i)])
        x_TD, layer_pages = call_layer(graph, op, rules, state, x_TD, pages[i], attention_input)
        new_pages.append(layer_pages)
    return x_TD, tuple(new_pages)


def final_norm(params: ModelParams, x_TD):
    """The norm in front of the head."""
    return nnx.merge(params.top_graph, params.top).norm(x_TD)


def logits(params: ModelParams, rules: MeshRules, x_TD):
    """Unnormalised float32 [T, V] of normalised hidden states."""
    top = nnx.merge(params.top_graph, params.top)
    table_VD = (top.embedding if top.head is None else top.head)[...]
    # Table first: on a CPU [V, D] x [T, D]^T is up to a quarter faster than the other way round.
    y_VT = dot(table_VD, x_TD, 1)
    y_TV = y_VT.T.astype(jnp.float32)
    if top.logit_soft_cap is not None:
        y_TV = top.logit_soft_cap * jnp.tanh(y_TV / top.logit_soft_cap)
    return lax.with_sharding_constraint(y_TV, NamedSharding(rules.mesh, PartitionSpec()))


def _norm(arch: Architecture, *, dtype, rngs: nnx.Rngs | None) -> RMSNorm:
    return RMSNorm(arch.hidden_size, arch.rms_norm_eps, dtype=dtype, rngs=rngs, adds_one=arch.norm_adds_one)
