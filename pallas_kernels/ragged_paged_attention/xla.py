"""The op in plain XLA, fast on a CPU: work is bounded by the real contexts in the batch, never by the longest allowed.

Keys are [P, K, H, Z] and values [P, K, Z, H]: decode then sums along neither's last axis. Quantized ones have two more
arrays behind them, the scales of keys and of values, both [P, K, Z]. Two paths share a step:

  rows with one query token   flat list of (row, page) items, C at a time:

      row 0: 3 pages, row 1: 1 page, row 2: 2 pages      C = 4
      item   0 1 2 3 | 4 5 . .       each item gives a partial softmax; items are summed into
      row    0 0 0 1 | 2 2 2 2       their rows by a one-hot product, so one row with a long
      page   7 4 9 2 | 8 3 8 8       context costs as little as many rows with short ones

  rows with more              tiles of Q query tokens of one row; per tile a loop over that row's pages, up to the
                              causal edge. What a tile computes for tokens that are not its own is thrown away.

Masks are added, not selected: XLA's CPU back end keeps sums and products in fast fused loops and drops out of them at a
select. For the same reason a stale value in an owned page is not masked out but must be finite (see `contract.py`).

Flash-style online softmax in float32 (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention.contract import AttentionNeeds, AttentionOp, RaggedBatch
from pallas_kernels.ragged_paged_attention.kv_quant import is_quantized, quantize_heads, why_not_dtype

QUERY_TILE = 256  # query tokens of a prefill tile
KEY_BLOCK = 256  # key positions of one inner step of a prefill tile
LOWEST = -1e30  # a finite stand-in for -inf: LOWEST - LOWEST must not be NaN


class FlatItems(NamedTuple):
    """(row, page) items of the single-token rows. W is the most there can be, rounded up to C.

    Attributes:
      page_W, row_W: int32; items past the last real one repeat the last real page, all masked.
      mask_WZ: float32, 0 where the row sees the position and LOWEST elsewhere.
      num_chunks: int32 scalar, chunks of C items that hold real ones.
      token_B: int32, token index of each row's query; T (dropped) for rows that are not single-token rows.
      chunk_C0: zero-size; carries C as a static shape, so that the tuple stays a pytree of arrays.
    """

    page_W: jax.Array
    row_W: jax.Array
    mask_WZ: jax.Array
    num_chunks: jax.Array
    token_B: jax.Array
    chunk_C0: jax.Array


class Tiles(NamedTuple):
    """Tiles of the rows with more than one query token. N is the most there can be.

    Attributes:
      row_N, token_N, position_N: int32 row, first token and that token's position, of each tile.
      num_queries_N: int32 query tokens that belong to the tile's row, at most Q.
      num_tiles: int32 scalar.
      page_table_BM: int32, width padded to a whole number of key blocks.
      window: int32 scalar, positions seen; None when there is no window.
      tile_Q0: zero-size; carries Q.
    """

    row_N: jax.Array
    token_N: jax.Array
    position_N: jax.Array
    num_queries_N: jax.Array
    num_tiles: jax.Array
    page_table_BM: jax.Array
    window: jax.Array | None
    tile_Q0: jax.Array


class XlaWork(NamedTuple):
    """Work of a step; `tiles` is None when no row can have more than one token."""

    items: FlatItems
    tiles: Tiles | None


def page_shapes(num_pages, num_kv_heads, head_dim, page_size, dtype):
    """Keys [P, K, H, Z] and values [P, K, Z, H]; scales of both, [P, K, Z], where the dtype has them."""
    k_PKHZ = jax.ShapeDtypeStruct((num_pages, num_kv_heads, head_dim, page_size), dtype)
    v_PKZH = jax.ShapeDtypeStruct((num_pages, num_kv_heads, page_size, head_dim), dtype)
    if not is_quantized(dtype):
        return k_PKHZ, v_PKZH
    scale_PKZ = jax.ShapeDtypeStruct((num_pages, num_kv_heads, page_size), jnp.float32)
    return k_PKHZ, v_PKZH, scale_PKZ, scale_PKZ


def write(pages, k_TKH, v_TKH, page_T, offset_T):
    """Writes each token's key and value at (page, offset); indices are always in range, so no bounds are checked."""
    k_PKHZ, v_PKZH, *scales = pages
    new_scales = []
    if scales:
        k_TKH, k_scale_TK = quantize_heads(k_TKH, k_PKHZ.dtype)
        v_TKH, v_scale_TK = quantize_heads(v_TKH, v_PKZH.dtype)
        new_scales = [k_scale_TK, v_scale_TK]
    return (
        k_PKHZ.at[page_T, :, :, offset_T].set(k_TKH.astype(k_PKHZ.dtype), mode="promise_in_bounds"),
        v_PKZH.at[page_T, :, offset_T].set(v_TKH.astype(v_PKZH.dtype), mode="promise_in_bounds"),
        *(
            scale_PKZ.at[page_T, :, offset_T].set(scale_TK, mode="promise_in_bounds")
            for scale_PKZ, scale_TK in zip(scales, new_scales, strict=True)
        ),
    )


def items_per_chunk(num_rows: int, page_size: int) -> int:
    """C: many, to spread a loop's fixed cost (about 60 us on a CPU); few, so that short contexts waste little."""
    return max(8, num_rows * max(1, 192 // page_size))


def _flat_items(batch: RaggedBatch, is_single_B, num_tokens: int, page_size: int, window: int | None) -> FlatItems:
    num_rows, width = batch.page_table_BM.shape
    chunk = items_per_chunk(num_rows, page_size)
    context_len_B = jnp.where(is_single_B, batch.context_len_B, 0)
    first_seen_B = jnp.zeros_like(context_len_B) if window is None else jnp.maximum(context_len_B - window, 0)
    first_page_B = first_seen_B // page_size
    num_pages_B = (context_len_B + page_size - 1) // page_size - first_page_B
    end_B = jnp.cumsum(num_pages_B)
    start_B = end_B - num_pages_B
    num_items = end_B[-1]
    num_chunks = (num_items + chunk - 1) // chunk
    capacity = -(-num_rows * width // chunk) * chunk
    offset_Z = jnp.arange(page_size, dtype=jnp.int32)

    def fill(j, arrays):
        item_C = j * chunk + jnp.arange(chunk, dtype=jnp.int32)
        is_real_C = item_C < num_items
        item_C = jnp.minimum(item_C, num_items - 1)
        row_C = (item_C[:, None] >= end_B[None, :]).sum(1, dtype=jnp.int32)
        index_C = item_C - start_B[row_C] + first_page_B[row_C]
        position_CZ = (index_C * page_size)[:, None] + offset_Z[None, :]
        sees_CZ = (position_CZ < context_len_B[row_C][:, None]) & (position_CZ >= first_seen_B[row_C][:, None])
        mask_CZ = jnp.where(sees_CZ & is_real_C[:, None], 0.0, LOWEST).astype(jnp.float32)
        found = (batch.page_table_BM[row_C, index_C], row_C, mask_CZ)
        return tuple(lax.dynamic_update_slice_in_dim(a, x, j * chunk, 0) for a, x in zip(arrays, found, strict=True))

    empty_W = jnp.zeros(capacity, jnp.int32)
    empty_WZ = jnp.zeros((capacity, page_size), jnp.float32)
    page_W, row_W, mask_WZ = lax.fori_loop(0, num_chunks, fill, (empty_W, empty_W, empty_WZ))
    token_B = jnp.where(is_single_B, batch.query_start_R[:-1], num_tokens)
    return FlatItems(page_W, row_W, mask_WZ, num_chunks, token_B, jnp.zeros((chunk, 0), jnp.int32))


def _tiles(batch: RaggedBatch, num_tokens: int, page_size: int, window: int | None) -> Tiles:
    tile = min(num_tokens, QUERY_TILE)
    query_len_B = batch.query_start_R[1:] - batch.query_start_R[:-1]
    num_rows, width = batch.page_table_BM.shape
    tiles_B = jnp.where(query_len_B > 1, (query_len_B + tile - 1) // tile, 0)
    end_B = jnp.cumsum(tiles_B)
    capacity = num_tokens // tile + min(num_rows, max(1, num_tokens // 2))
    tile_N = jnp.arange(capacity, dtype=jnp.int32)
    row_N = jnp.minimum((tile_N[:, None] >= end_B[None, :]).sum(1, dtype=jnp.int32), num_rows - 1)
    offset_N = (tile_N - (end_B - tiles_B)[row_N]) * tile
    left_N = query_len_B[row_N] - offset_N
    block_pages = max(1, KEY_BLOCK // page_size)
    return Tiles(
        row_N=row_N,
        token_N=batch.query_start_R[row_N] + offset_N,
        position_N=batch.context_len_B[row_N] - left_N,
        num_queries_N=jnp.minimum(left_N, tile),
        num_tiles=end_B[-1],
        page_table_BM=jnp.pad(batch.page_table_BM, ((0, 0), (0, -width % block_pages))),
        window=None if window is None else jnp.int32(window),
        tile_Q0=jnp.zeros((tile, 0), jnp.int32),
    )


def prepare(batch: RaggedBatch, *, num_tokens, max_query_len, page_size, sliding_window):
    """Lists the work of a step, once for all layers."""
    is_single_B = batch.query_start_R[1:] - batch.query_start_R[:-1] == 1
    items = _flat_items(batch, is_single_B, num_tokens, page_size, sliding_window)
    return XlaWork(items, None if max_query_len == 1 else _tiles(batch, num_tokens, page_size, sliding_window))


def _take(x, index):
    """Rows of x, flattened so that XLA copies whole rows; indices are always in range."""
    flat = x.reshape(x.shape[0], -1).at[index].get(mode="promise_in_bounds")
    return flat.reshape(index.shape + x.shape[1:])


def _exp(x):
    """exp of float32 x <= 0, to 1e-7 of its value; 0 below -87, NaN of NaN (the NaN guard relies on it).

    XLA's CPU back end leaves its own exp scalar inside a fused loop (64 us for 28,000 values against 1 us for this).
    Range reduction by ln 2 in two parts and a degree-6 polynomial: Cephes, `expf`.
    """
    is_zero = x < -87.25
    x = jnp.where(is_zero, 0.0, x)
    n = jnp.round(x * 1.4426950408889634)
    f = (x - n * 0.693359375) + n * 2.12194440e-4
    y = jnp.float32(1.9875691500e-4)
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        y = y * f + c
    y = y * f * f + f + 1.0
    power = lax.bitcast_convert_type((n.astype(jnp.int32) + 127) << 23, jnp.float32)
    return jnp.where(is_zero, 0.0, y * power)


def _cap(scores, soft_cap):
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _attend_single(q_BKGH, pages, items: FlatItems, scale, soft_cap):
    """Decode path. q_BKGH is each row's one query; rows without one get zeros."""
    k_PKHZ, v_PKZH, *scales = pages
    num_rows, num_kv, group, _ = q_BKGH.shape
    chunk = items.chunk_C0.shape[0]
    q_BKGH = q_BKGH.astype(jnp.float32) * scale
    row_B = jnp.arange(num_rows, dtype=jnp.int32)

    def body(j, carry):
        peak_BKG, total_BKG, acc_BKGH = carry
        page_C, row_C, mask_CZ = (lax.dynamic_slice_in_dim(a, j * chunk, chunk) for a in items[:3])
        k_CKHZ, v_CKZH = _take(k_PKHZ, page_C).astype(jnp.float32), _take(v_PKZH, page_C).astype(jnp.float32)
        s_CKGZ = (_take(q_BKGH, row_C)[..., None] * k_CKHZ[:, :, None]).sum(3)
        if scales:
            s_CKGZ = s_CKGZ * _take(scales[0], page_C)[:, :, None]
        s_CKGZ = _cap(s_CKGZ, soft_cap) + mask_CZ[:, None, None, :]
        is_row_BC = row_B[:, None] == row_C[None, :]
        spread_BCKG = jnp.where(is_row_BC[:, :, None, None], s_CKGZ.max(3)[None], LOWEST)
        new_peak_BKG = jnp.maximum(peak_BKG, spread_BCKG.max(1))
        p_CKGZ = _exp(s_CKGZ - _take(new_peak_BKG, row_C)[..., None])
        pv_CKGZ = p_CKGZ * _take(scales[1], page_C)[:, :, None] if scales else p_CKGZ
        pv_CKGH = (pv_CKGZ[..., None] * v_CKZH[:, :, None]).sum(3)
        keep_BKG = _exp(peak_BKG - new_peak_BKG)
        total_BX, acc_BX = _sum_into_rows(
            is_row_BC.astype(jnp.float32), p_CKGZ.sum(3).reshape(chunk, -1), pv_CKGH.reshape(chunk, -1)
        )
        total_BKG = total_BKG * keep_BKG + total_BX.reshape(total_BKG.shape)
        acc_BKGH = acc_BKGH * keep_BKG[..., None] + acc_BX.reshape(acc_BKGH.shape)
        return new_peak_BKG, total_BKG, acc_BKGH

    column = (num_rows, num_kv, group)
    start = (jnp.full(column, LOWEST, jnp.float32), jnp.zeros(column, jnp.float32), jnp.zeros_like(q_BKGH))
    _, total_BKG, acc_BKGH = lax.fori_loop(0, items.num_chunks, body, start)
    return acc_BKGH / jnp.maximum(total_BKG, 1e-30)[..., None]


def _sum_into_rows(to_row_BC, total_CX, value_CX):
    """Sums items into their rows by a one-hot product. An item that is not finite makes its own row NaN and no other.

    0 * NaN is NaN, so a product alone would spread one row's fault to all. The careful form runs only when that
    happened.
    """
    total_BX, value_BX = to_row_BC @ total_CX, to_row_BC @ value_CX

    def isolate():
        is_bad_C1 = ~(jnp.isfinite(total_CX).all(1) & jnp.isfinite(value_CX).all(1))[:, None]
        fault_B1 = jnp.where(to_row_BC @ is_bad_C1.astype(jnp.float32) > 0, jnp.nan, 0.0)
        clean_total_CX, clean_value_CX = (jnp.where(is_bad_C1, 0.0, x) for x in (total_CX, value_CX))
        return to_row_BC @ clean_total_CX + fault_B1, to_row_BC @ clean_value_CX + fault_B1

    # A sum of x * 0 is 0 unless some x is not finite. It costs nothing here; isfinite().all() a tenth of the step.
    is_fine = (total_BX * 0.0).sum() + (value_BX * 0.0).sum() == 0.0
    return lax.cond(is_fine, lambda: (total_BX, value_BX), isolate)


def _attend_tiles(q_TKGH, pages, tiles: Tiles, scale, soft_cap):
    """Prefill path. Returns out_TKGH in float32; tokens that are in no tile get zeros."""
    num_tokens, num_kv, group, head_dim = q_TKGH.shape
    tile = tiles.tile_Q0.shape[0]
    q_KTGH = (q_TKGH.astype(jnp.float32) * scale).transpose(1, 0, 2, 3)
    offset_Q = jnp.arange(tile, dtype=jnp.int32)

    def one_tile(n, out_KTGH):
        first_pos = tiles.position_N[n]
        last_pos = first_pos + tiles.num_queries_N[n] - 1
        # A tile that would reach past T begins earlier, by `shift` tokens that are not its own.
        token = jnp.minimum(tiles.token_N[n], num_tokens - tile)
        shift = tiles.token_N[n] - token
        q_KXH = lax.dynamic_slice_in_dim(q_KTGH, token, tile, 1).reshape(num_kv, tile * group, head_dim)
        position_X = first_pos - shift + jnp.repeat(offset_Q, group)
        table_M = lax.dynamic_index_in_dim(tiles.page_table_BM, tiles.row_N[n], keepdims=False)
        out_KXH = _attend_tile(q_KXH, position_X, first_pos, last_pos, table_M, pages, tiles.window, soft_cap)
        is_own_Q = (offset_Q >= shift) & (offset_Q < shift + tiles.num_queries_N[n])
        old_KQGH = lax.dynamic_slice_in_dim(out_KTGH, token, tile, 1)
        out_KQGH = jnp.where(is_own_Q[None, :, None, None], out_KXH.reshape(old_KQGH.shape), old_KQGH)
        return lax.dynamic_update_slice_in_dim(out_KTGH, out_KQGH, token, 1)

    return lax.fori_loop(0, tiles.num_tiles, one_tile, jnp.zeros_like(q_KTGH)).transpose(1, 0, 2, 3)


def _attend_tile(q_KXH, position_X, first_pos, last_pos, table_M, pages, window, soft_cap):
    """One tile against its row's pages, a block of keys at a time. X is query token and query head together.

    Args:
      position_X: int32 position of each query.
      first_pos, last_pos: int32 positions of the tile's first and last own query.
      table_M: int32, the row's page table, padded to whole blocks.
      window: int32 positions seen, or None.
    """
    page_size = pages[0].shape[3]
    num_kv, num_queries, head_dim = q_KXH.shape
    block_pages = max(1, KEY_BLOCK // page_size)
    block = block_pages * page_size
    # One row of memory per (page, head): a gather then yields the head first.
    k_RHZ, v_RZH, *scales = (a.reshape(-1, *a.shape[2:]) for a in pages)
    head_K1 = jnp.arange(num_kv, dtype=jnp.int32)[:, None]

    def pages_of(x_R, scale_RZ, head_dim_axis, j):
        page_1C = lax.dynamic_slice_in_dim(table_M, j * block_pages, block_pages)[None, :]
        x = _take(x_R, page_1C * num_kv + head_K1).astype(jnp.float32)
        if scale_RZ is None:
            return x
        # A tile has more queries than a head has numbers: scaling heads as they are cast is the cheaper side.
        return x * jnp.expand_dims(_take(scale_RZ, page_1C * num_kv + head_K1), head_dim_axis)

    k_scale_RZ, v_scale_RZ = scales or (None, None)

    def scores(j):
        k_KHS = pages_of(k_RHZ, k_scale_RZ, 2, j).transpose(0, 2, 1, 3).reshape(num_kv, head_dim, block)
        return _cap(jnp.einsum("KXH,KHS->KXS", q_KXH, k_KHS), soft_cap)

    def values(j):
        return pages_of(v_RZH, v_scale_RZ, 3, j).reshape(num_kv, block, head_dim)

    def whole_block(j, carry):
        return _add_block(carry, scores(j), values(j))

    def edge_block(j, carry):
        key_pos_S = j * block + jnp.arange(block, dtype=jnp.int32)
        age_XS = position_X[:, None] - key_pos_S[None, :]
        sees_XS = (age_XS >= 0) & (key_pos_S <= last_pos)[None, :]
        if window is not None:
            sees_XS &= age_XS < window
        # A block may reach into pages the row does not own: there even the finite mask would meet NaN.
        s_KXS = jnp.where(sees_XS[None], scores(j), LOWEST)
        v_KSH = jnp.where((key_pos_S <= last_pos)[None, :, None], values(j), 0.0)
        return _add_block(carry, s_KXS, v_KSH)

    column = (num_kv, num_queries, 1)
    carry = (jnp.full(column, LOWEST, jnp.float32), jnp.zeros(column, jnp.float32), jnp.zeros_like(q_KXH))
    if window is None:
        first_edge = (first_pos + 1) // block  # blocks wholly before the first query need no mask
        carry = lax.fori_loop(0, first_edge, whole_block, carry)
    else:
        first_edge = jnp.maximum(first_pos - window + 1, 0) // block
    _, total_KX1, acc_KXH = lax.fori_loop(first_edge, last_pos // block + 1, edge_block, carry)
    return acc_KXH / total_KX1


def _add_block(carry, s_KXS, v_KSH):
    """One step of the online softmax: (peak_KX1, total_KX1, acc_KXH) with one more block of scores and values."""
    peak_KX1, total_KX1, acc_KXH = carry
    new_peak_KX1 = jnp.maximum(peak_KX1, s_KXS.max(-1, keepdims=True))
    p_KXS = _exp(s_KXS - new_peak_KX1)
    keep_KX1 = _exp(peak_KX1 - new_peak_KX1)
    acc_KXH = acc_KXH * keep_KX1 + jnp.einsum("KXS,KSH->KXH", p_KXS, v_KSH)
    return new_peak_KX1, total_KX1 * keep_KX1 + p_KXS.sum(-1, keepdims=True), acc_KXH


def attend(q_TKGH, pages, work: XlaWork, *, scale, soft_cap=None):
    """See the contract in `contract.py`."""
    if work.tiles is None:
        return _attend_single(q_TKGH, pages, work.items, scale, soft_cap).astype(q_TKGH.dtype)
    token_B = jnp.minimum(work.items.token_B, q_TKGH.shape[0] - 1)
    out_TKGH = _attend_tiles(q_TKGH, pages, work.tiles, scale, soft_cap)
    single_BKGH = _attend_single(_take(q_TKGH, token_B), pages, work.items, scale, soft_cap)
    return out_TKGH.at[work.items.token_B].set(single_BKGH, mode="drop").astype(q_TKGH.dtype)


def why_not(needs: AttentionNeeds) -> str | None:
    """Any platform and shape; the dtypes of pages that are tested."""
    return why_not_dtype(needs.kv_dtype)


OP = AttentionOp(
    name="xla",
    default_page_size=64,
    kv_head_axis=1,
    page_shapes=page_shapes,
    write=write,
    prepare=prepare,
    attend=attend,
    why_not=why_not,
)
