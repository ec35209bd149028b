"""The op in plain XLA, fast on a CPU: work is bounded by the real contexts in the batch, never by the longest allowed.

Pages are k [P, K, H, Z] and v [P, K, Z, H]: both products then run along the last axis. Two paths share a step:

  rows with one query token   flat list of (row, page) items, C at a time:

      row 0: 3 pages, row 1: 1 page, row 2: 2 pages      C = 4
      item   0 1 2 3 | 4 5 . .       each item gives a partial softmax; items are summed into
      row    0 0 0 1 | 2 2 2 2       their rows by a one-hot product, so one row with a long
      page   7 4 9 2 | 8 3 8 8       context costs as little as many rows with short ones

  rows with more              tiles of Q query tokens; per tile a loop over its own pages, up to the causal edge. A tile
                              may spill into the next row's tokens: tiles are written in order, so the next row's tile
                              overwrites it, and single-token rows are written last.

Flash-style online softmax in float32 (Milakov & Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention.contract import AttentionOp, RaggedBatch

QUERY_TILE = 64  # query tokens of a prefill tile
KEY_BLOCK = 128  # key positions of one inner step of a prefill tile
LOWEST = -1e30  # a finite stand-in for -inf: exp(LOWEST - LOWEST) must not be NaN


class FlatItems(NamedTuple):
    """(row, page) items of the single-token rows. W is the most there can be, rounded up to C.

    Attributes:
      page_W, row_W, first_pos_W: int32; items past the last real one repeat a real page, with first_pos past every context.
      num_chunks: int32 scalar, chunks of C items that hold real ones.
      context_len_B: int32, 0 for rows that are not single-token rows.
      token_B: int32, token index of each row's query; T (dropped) for rows that are not single-token rows.
    """

    page_W: jax.Array
    row_W: jax.Array
    first_pos_W: jax.Array
    num_chunks: jax.Array
    context_len_B: jax.Array
    token_B: jax.Array


class Tiles(NamedTuple):
    """Tiles of the rows with more than one query token. N is the most there can be.

    Attributes:
      row_N, token_N, position_N: int32 row, first token and that token's position, of each tile.
      num_queries_N: int32 query tokens that belong to the tile's row, at most Q.
      num_tiles: int32 scalar.
    """

    row_N: jax.Array
    token_N: jax.Array
    position_N: jax.Array
    num_queries_N: jax.Array
    num_tiles: jax.Array


class XlaWork(NamedTuple):
    """Attributes:
    items, tiles: what to do; `tiles` is None when no row can have more than one token.
    page_table_BM: int32, width padded to a whole number of key blocks.
    chunk, tile: C items and Q query tokens (static shapes carried as zero-size arrays so that the tuple stays a pytree).
    window: positions seen, an int32 scalar; larger than any context when there is no window.
    """

    items: FlatItems
    tiles: Tiles | None
    page_table_BM: jax.Array
    chunk_C0: jax.Array
    tile_Q0: jax.Array
    window: jax.Array


def page_shapes(num_pages, num_kv_heads, head_dim, page_size, dtype):
    """k [P, K, H, Z] and v [P, K, Z, H]."""
    return (
        jax.ShapeDtypeStruct((num_pages, num_kv_heads, head_dim, page_size), dtype),
        jax.ShapeDtypeStruct((num_pages, num_kv_heads, page_size, head_dim), dtype),
    )


def write(pages, k_TKH, v_TKH, page_T, offset_T):
    """Writes each token's key and value at (page, offset); indices are always in range, so no bounds are checked."""
    k_PKHZ, v_PKZH = pages
    return (
        k_PKHZ.at[page_T, :, :, offset_T].set(k_TKH.astype(k_PKHZ.dtype), mode="promise_in_bounds"),
        v_PKZH.at[page_T, :, offset_T].set(v_TKH.astype(v_PKZH.dtype), mode="promise_in_bounds"),
    )


def _items_per_chunk(num_rows: int, page_size: int) -> int:
    """C: enough that a loop's fixed cost (about 60 us on a CPU) is spread, few enough that short contexts waste little."""
    return max(4, num_rows * max(1, 96 // page_size))


def _flat_items(batch: RaggedBatch, is_single_B, num_tokens: int, page_size: int, window: int | None) -> FlatItems:
    num_rows, width = batch.page_table_BM.shape
    chunk = _items_per_chunk(num_rows, page_size)
    context_len_B = jnp.where(is_single_B, batch.context_len_B, 0)
    first_page_B = jnp.zeros_like(context_len_B)
    if window is not None:
        first_page_B = jnp.maximum(context_len_B - window, 0) // page_size
    num_pages_B = (context_len_B + page_size - 1) // page_size - first_page_B
    end_B = jnp.cumsum(num_pages_B)
    num_items = end_B[-1]
    num_chunks = (num_items + chunk - 1) // chunk
    capacity = -(-num_rows * width // chunk) * chunk
    start_B = end_B - num_pages_B

    def fill(j, arrays):
        item_C = j * chunk + jnp.arange(chunk, dtype=jnp.int32)
        is_real_C = item_C < num_items
        item_C = jnp.minimum(item_C, num_items - 1)
        row_C = (item_C[:, None] >= end_B[None, :]).sum(1, dtype=jnp.int32)
        index_C = item_C - start_B[row_C] + first_page_B[row_C]
        found = (
            batch.page_table_BM[row_C, index_C],
            row_C,
            jnp.where(is_real_C, index_C * page_size, jnp.int32(2**30)),
        )
        return tuple(lax.dynamic_update_slice_in_dim(a, x, j * chunk, 0) for a, x in zip(arrays, found, strict=True))

    empty_W = jnp.zeros(capacity, jnp.int32)
    page_W, row_W, first_pos_W = lax.fori_loop(0, num_chunks, fill, (empty_W, empty_W, empty_W))
    token_B = jnp.where(is_single_B, batch.query_start_R[:-1], num_tokens)
    return FlatItems(page_W, row_W, first_pos_W, num_chunks, context_len_B, token_B)


def _tiles(batch: RaggedBatch, num_tokens: int, tile: int) -> Tiles:
    query_len_B = batch.query_start_R[1:] - batch.query_start_R[:-1]
    num_rows = query_len_B.shape[0]
    tiles_B = jnp.where(query_len_B > 1, (query_len_B + tile - 1) // tile, 0)
    end_B = jnp.cumsum(tiles_B)
    capacity = num_tokens // tile + min(num_rows, max(1, num_tokens // 2))
    tile_N = jnp.arange(capacity, dtype=jnp.int32)
    row_N = jnp.minimum((tile_N[:, None] >= end_B[None, :]).sum(1, dtype=jnp.int32), num_rows - 1)
    offset_N = (tile_N - (end_B - tiles_B)[row_N]) * tile
    left_N = query_len_B[row_N] - offset_N
    return Tiles(
        row_N=row_N,
        token_N=batch.query_start_R[row_N] + offset_N,
        position_N=batch.context_len_B[row_N] - left_N,
        num_queries_N=jnp.minimum(left_N, tile),
        num_tiles=end_B[-1],
    )


def prepare(batch: RaggedBatch, *, num_tokens, max_query_len, page_size, sliding_window):
    """Lists the work of a step, once for all layers."""
    query_len_B = batch.query_start_R[1:] - batch.query_start_R[:-1]
    is_single_B = query_len_B == 1
    items = _flat_items(batch, is_single_B, num_tokens, page_size, sliding_window)
    num_rows, width = batch.page_table_BM.shape
    tile = min(num_tokens, QUERY_TILE)
    block_pages = max(1, KEY_BLOCK // page_size)
    table_BM = jnp.pad(batch.page_table_BM, ((0, 0), (0, -width % block_pages)))
    return XlaWork(
        items=items,
        tiles=None if max_query_len == 1 else _tiles(batch, num_tokens, tile),
        page_table_BM=table_BM,
        chunk_C0=jnp.zeros((_items_per_chunk(num_rows, page_size), 0), jnp.int32),
        tile_Q0=jnp.zeros((tile, 0), jnp.int32),
        window=jnp.int32(2**30 if sliding_window is None else sliding_window),
    )


def _take(x, index):
    """Rows of x, flattened so that XLA copies whole rows; indices are always in range."""
    flat = x.reshape(x.shape[0], -1).at[index].get(mode="promise_in_bounds")
    return flat.reshape(index.shape + x.shape[1:])


def _cap(scores, soft_cap):
    return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)


def _attend_single(q_BKGH, pages, work: XlaWork, scale, soft_cap):
    """Decode path. q_BKGH is each row's one query; rows without one get finite rubbish."""
    k_PKHZ, v_PKZH = pages
    items = work.items
    num_rows, num_kv, group, head_dim = q_BKGH.shape
    page_size = k_PKHZ.shape[-1]
    chunk = work.chunk_C0.shape[0]
    q_BKGH = q_BKGH.astype(jnp.float32) * scale
    row_B = jnp.arange(num_rows, dtype=jnp.int32)
    width = num_kv * group * head_dim

    def body(j, carry):
        peak_BKG, sum_BX = carry
        page_C, row_C, first_C = (lax.dynamic_slice_in_dim(a, j * chunk, chunk) for a in items[:3])
        k_CKHZ, v_CKZH = _take(k_PKHZ, page_C).astype(jnp.float32), _take(v_PKZH, page_C).astype(jnp.float32)
        s_CKGZ = _cap((_take(q_BKGH, row_C)[..., None] * k_CKHZ[:, :, None]).sum(3), soft_cap)
        position_CZ = first_C[:, None] + jnp.arange(page_size, dtype=jnp.int32)[None, :]
        context_C1 = _take(items.context_len_B[:, None], row_C)
        sees_CZ = (position_CZ < context_C1) & (position_CZ >= context_C1 - work.window)
        s_CKGZ = jnp.where(sees_CZ[:, None, None, :], s_CKGZ, LOWEST)
        v_CKZH = jnp.where(
            sees_CZ[:, None, :, None], v_CKZH, 0.0
        )  # a page's stale tail may hold NaN, and 0 * NaN is NaN
        is_row_BC = row_B[:, None] == row_C[None, :]
        item_peak_CKG = s_CKGZ.max(-1)
        spread_BCKG = jnp.where(is_row_BC[:, :, None, None], item_peak_CKG[None], LOWEST)
        new_peak_BKG = jnp.maximum(peak_BKG, spread_BCKG.max(1))
        p_CKGZ = jnp.exp(s_CKGZ - _take(new_peak_BKG, row_C)[..., None])
        pv_CKGH = (p_CKGZ[..., None] * v_CKZH[:, :, None]).sum(3)
        # Weighted values and weights side by side: one product sums both into their rows.
        part_CX = jnp.concatenate([pv_CKGH.reshape(chunk, -1), p_CKGZ.sum(-1).reshape(chunk, -1)], axis=1)
        keep_BKG = jnp.exp(peak_BKG - new_peak_BKG)
        keep_BX = jnp.concatenate(
            [jnp.repeat(keep_BKG.reshape(num_rows, -1), head_dim, 1), keep_BKG.reshape(num_rows, -1)], 1
        )
        return new_peak_BKG, sum_BX * keep_BX + is_row_BC.astype(jnp.float32) @ part_CX

    start = (
        jnp.full((num_rows, num_kv, group), LOWEST, jnp.float32),
        jnp.zeros((num_rows, width + num_kv * group), jnp.float32),
    )
    _, sum_BX = lax.fori_loop(0, items.num_chunks, body, start)
    weight_BKG1 = jnp.maximum(sum_BX[:, width:], 1e-30).reshape(num_rows, num_kv, group, 1)
    return sum_BX[:, :width].reshape(q_BKGH.shape) / weight_BKG1


def _attend_tiles(q_TKGH, pages, work: XlaWork, scale, soft_cap):
    """Prefill path. Returns out_TKGH in float32; tokens of single-token rows and padding hold rubbish."""
    k_PKHZ, v_PKZH = pages
    tiles = work.tiles
    assert tiles is not None
    num_tokens, num_kv, group, head_dim = q_TKGH.shape
    page_size = k_PKHZ.shape[-1]
    tile = work.tile_Q0.shape[0]
    block_pages = max(1, KEY_BLOCK // page_size)
    block = block_pages * page_size
    q_UKGH = jnp.pad(q_TKGH.astype(jnp.float32) * scale, ((0, tile), (0, 0), (0, 0), (0, 0)))

    def one_tile(n, out_UKGH):
        first_pos = tiles.position_N[n]
        last_pos = first_pos + tiles.num_queries_N[n] - 1
        q_QKGH = lax.dynamic_slice_in_dim(q_UKGH, tiles.token_N[n], tile)
        q_KXH = q_QKGH.transpose(1, 0, 2, 3).reshape(num_kv, tile * group, head_dim)
        position_X = jnp.repeat(first_pos + jnp.arange(tile, dtype=jnp.int32), group)
        table_M = lax.dynamic_index_in_dim(work.page_table_BM, tiles.row_N[n], keepdims=False)

        def one_block(j, carry):
            peak_KX1, total_KX1, acc_KXH = carry
            page_C = lax.dynamic_slice_in_dim(table_M, j * block_pages, block_pages)
            key_pos_S = j * block + jnp.arange(block, dtype=jnp.int32)
            k_KHS = _take(k_PKHZ, page_C).astype(jnp.float32).transpose(1, 2, 0, 3).reshape(num_kv, head_dim, block)
            v_KSH = _take(v_PKZH, page_C).astype(jnp.float32).transpose(1, 0, 2, 3).reshape(num_kv, block, head_dim)
            v_KSH = jnp.where((key_pos_S <= last_pos)[None, :, None], v_KSH, 0.0)
            s_KXS = _cap(jnp.einsum("KXH,KHS->KXS", q_KXH, k_KHS), soft_cap)
            age_XS = position_X[:, None] - key_pos_S[None, :]
            sees_XS = (age_XS >= 0) & (age_XS < work.window)
            s_KXS = jnp.where(sees_XS[None], s_KXS, LOWEST)
            new_peak_KX1 = jnp.maximum(peak_KX1, s_KXS.max(-1, keepdims=True))
            p_KXS = jnp.exp(s_KXS - new_peak_KX1)
            keep_KX1 = jnp.exp(peak_KX1 - new_peak_KX1)
            acc_KXH = acc_KXH * keep_KX1 + jnp.einsum("KXS,KSH->KXH", p_KXS, v_KSH)
            return new_peak_KX1, total_KX1 * keep_KX1 + p_KXS.sum(-1, keepdims=True), acc_KXH

        column = (num_kv, tile * group, 1)
        start = (jnp.full(column, LOWEST, jnp.float32), jnp.zeros(column, jnp.float32), jnp.zeros_like(q_KXH))
        first_block = jnp.maximum(first_pos - work.window + 1, 0) // block
        _, total_KX1, acc_KXH = lax.fori_loop(first_block, last_pos // block + 1, one_block, start)
        out_QKGH = (acc_KXH / total_KX1).reshape(num_kv, tile, group, head_dim).transpose(1, 0, 2, 3)
        return lax.dynamic_update_slice_in_dim(out_UKGH, out_QKGH, tiles.token_N[n], 0)

    return lax.fori_loop(0, tiles.num_tiles, one_tile, jnp.zeros_like(q_UKGH))[:num_tokens]


def attend(q_TKGH, pages, work: XlaWork, *, scale, soft_cap=None):
    """See the contract in `contract.py`."""
    if work.tiles is None:
        return _attend_single(q_TKGH, pages, work, scale, soft_cap).astype(q_TKGH.dtype)
    token_B = jnp.minimum(work.items.token_B, q_TKGH.shape[0] - 1)
    out_TKGH = _attend_tiles(q_TKGH, pages, work, scale, soft_cap)
    single_BKGH = _attend_single(_take(q_TKGH, token_B), pages, work, scale, soft_cap)
    return out_TKGH.at[work.items.token_B].set(single_BKGH, mode="drop").astype(q_TKGH.dtype)


OP = AttentionOp(
    name="xla",
    default_page_size=32,
    kv_head_axis=1,
    page_shapes=page_shapes,
    write=write,
    prepare=prepare,
    attend=attend,
)
