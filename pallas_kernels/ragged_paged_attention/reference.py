"""The op, slow and obvious: gathers every row's whole context and masks.

Written before the fast ones; shares no helper with them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.contract import AttentionOp, RaggedBatch


class ReferenceWork(NamedTuple):
    """The batch itself, one row index per token.

    Attributes:
      row_T: int32 row of each token (the last row for padding).
      position_T: int32 position of each token in its row's context; negative for padding.
      window: positions seen, or None.
    """

    batch: RaggedBatch
    row_T: jax.Array
    position_T: jax.Array
    window: int | None


def page_shapes(num_pages, num_kv_heads, head_dim, page_size, dtype):
    """Keys and values, both [P, Z, K, H]."""
    shape = jax.ShapeDtypeStruct((num_pages, page_size, num_kv_heads, head_dim), dtype)
    return shape, shape


def write(pages, k_TKH, v_TKH, page_T, offset_T):
    """Writes each token's key and value at (page, offset)."""
    k_PZKH, v_PZKH = pages
    return (
        k_PZKH.at[page_T, offset_T].set(k_TKH.astype(k_PZKH.dtype)),
        v_PZKH.at[page_T, offset_T].set(v_TKH.astype(v_PZKH.dtype)),
    )


def prepare(batch: RaggedBatch, *, num_tokens, max_query_len, page_size, sliding_window):
    """Finds each token's row and position."""
    del max_query_len, page_size
    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    starts_R = batch.query_start_R
    row_T = jnp.clip((token_T[:, None] >= starts_R[None, 1:]).sum(1), 0, batch.context_len_B.shape[0] - 1).astype(
        jnp.int32
    )
    position_T = batch.context_len_B[row_T] - starts_R[row_T + 1] + token_T
    is_real_T = token_T < starts_R[-1]
    return ReferenceWork(batch, row_T, jnp.where(is_real_T, position_T, -1), sliding_window)


def attend(q_TKGH, pages, work: ReferenceWork, *, scale, soft_cap=None):
    """Softmax over the row's whole table, masked by position."""
    k_PZKH, v_PZKH = pages
    table_TM = work.batch.page_table_BM[work.row_T]
    num_tokens, width = table_TM.shape
    page_size = k_PZKH.shape[1]
    k_TSKH = k_PZKH[table_TM].reshape(num_tokens, width * page_size, *k_PZKH.shape[2:]).astype(jnp.float32)
    v_TSKH = v_PZKH[table_TM].reshape(num_tokens, width * page_size, *v_PZKH.shape[2:]).astype(jnp.float32)
    s_TKGS = jnp.einsum("TKGH,TSKH->TKGS", q_TKGH.astype(jnp.float32), k_TSKH) * scale
    if soft_cap is not None:
        s_TKGS = soft_cap * jnp.tanh(s_TKGS / soft_cap)
    position_S = jnp.arange(width * page_size, dtype=jnp.int32)
    sees_TS = position_S[None, :] <= work.position_T[:, None]
    if work.window is not None:
        sees_TS &= position_S[None, :] > work.position_T[:, None] - work.window
    s_TKGS = jnp.where(sees_TS[:, None, None, :], s_TKGS, -jnp.inf)
    peak_TKG1 = jnp.max(s_TKGS, axis=-1, keepdims=True, initial=-1e30)
    p_TKGS = jnp.where(sees_TS[:, None, None, :], jnp.exp(s_TKGS - peak_TKG1), 0.0)
    v_TSKH = jnp.where(sees_TS[:, :, None, None], v_TSKH, 0.0)
    out_TKGH = jnp.einsum("TKGS,TSKH->TKGH", p_TKGS, v_TSKH)
    total_TKG1 = jnp.sum(p_TKGS, axis=-1, keepdims=True)
    return (out_TKGH / jnp.where(total_TKG1 == 0.0, 1.0, total_TKG1)).astype(q_TKGH.dtype)


OP = AttentionOp(
    name="reference",
    default_page_size=16,
    kv_head_axis=2,
    page_shapes=page_shapes,
    write=write,
    prepare=prepare,
    attend=attend,
)
