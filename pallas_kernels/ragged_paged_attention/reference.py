"""The op, slow and obvious: gathers every row's whole context and masks.

Written before the fast ones; shares no helper with them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.contract import AttentionNeeds, AttentionOp, RaggedBatch

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # of the dtypes that have scales


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
    """Keys and values, both [P, Z, K, H]; where those have scales, theirs behind them, both [P, Z, K]."""
    stored = jax.ShapeDtypeStruct((num_pages, page_size, num_kv_heads, head_dim), dtype)
    if jnp.dtype(dtype).name not in LARGEST:
        return stored, stored
    scale = jax.ShapeDtypeStruct(stored.shape[:3], jnp.float32)
    return stored, stored, scale, scale


def write(pages, k_TKH, v_TKH, page_T, offset_T):
    """Writes each token's key and value at (page, offset), and their scales."""
    dtype = pages[0].dtype
    if dtype.name in LARGEST:
        (k_TKH, k_scale_TK), (v_TKH, v_scale_TK) = _divided(k_TKH, dtype), _divided(v_TKH, dtype)
        new = (k_TKH, v_TKH, k_scale_TK, v_scale_TK)
    else:
        new = (k_TKH.astype(dtype), v_TKH.astype(dtype))
    return tuple(old.at[page_T, offset_T].set(x) for old, x in zip(pages, new, strict=True))


def _divided(x_TKH, dtype):
    """Each head over its own scale, in the dtype; and the scales, NaN of a head that is not finite."""
    largest = LARGEST[dtype.name]
    x_TKH = x_TKH.astype(jnp.float32)
    peak_TK = jnp.max(jnp.abs(x_TKH), axis=-1)
    scale_TK = jnp.where(peak_TK / largest == 0.0, 1.0, peak_TK / largest)
    scale_TK = jnp.where(jnp.all(jnp.isfinite(x_TKH), axis=-1), scale_TK, jnp.nan)
    x_TKH = jnp.clip(jnp.nan_to_num(x_TKH / scale_TK[:, :, None]), -largest, largest)
    return (jnp.rint(x_TKH) if dtype == jnp.int8 else x_TKH).astype(dtype), scale_TK


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
    table_TM = work.batch.page_table_BM[work.row_T]
    num_tokens, width = table_TM.shape
    page_size = pages[0].shape[1]
    k_TSKH, v_TSKH, *scales = (
        a[table_TM].reshape(num_tokens, width * page_size, *a.shape[2:]).astype(jnp.float32) for a in pages
    )
    if scales:
        k_TSKH, v_TSKH = k_TSKH * scales[0][..., None], v_TSKH * scales[1][..., None]
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


def why_not(needs: AttentionNeeds) -> str | None:
    """Any platform and shape; the dtypes of pages that are tested."""
    allowed = ("float32", "bfloat16", *LARGEST)
    if needs.kv_dtype is None or needs.kv_dtype in allowed:
        return None
    return f"pages of {needs.kv_dtype}; it knows {', '.join(allowed)}"


OP = AttentionOp(
    name="reference",
    default_page_size=16,
    kv_head_axis=2,
    page_shapes=page_shapes,
    write=write,
    prepare=prepare,
    attend=attend,
    why_not=why_not,
)
