"""The TPU kernel's list of work: which query tokens, and which pages of their row they read.

Every token of the packed axis belongs to one tile of at most Q tokens; a tile never mixes rows:

    T:     0 1 2 3 4 5 | 6 | 7 | . . .      Q = 4; row 1 decodes, row 2 is frozen (context 0)
    tiles: [0 1 2 3][4 5][6] [7] [8 9 10]   tiles 3 and 4 read no page: they come last and their outputs are zero
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.contract import RaggedBatch


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["table_X", "base_N", "token_N", "count_N", "position_N", "first_page_N", "end_page_N", "counts_2"],
    meta_fields=["queries_per_tile", "window"],
)
@dataclass(frozen=True)
class TpuWork:
    """Work of a step. N is the most tiles there can be.

    Attributes:
      table_X: int32, the page table, flat.
      base_N: int32, where the tile's row begins in the table.
      token_N, count_N, position_N: int32, the tile's first token, its tokens, and the first one's position.
      first_page_N, end_page_N: int32, the pages [first, end) of the row's table that some token of the tile sees.
      counts_2: int32, tiles that read pages, and tiles.
      queries_per_tile: Q, a power of two.
      window: positions seen, or None.
    """

    table_X: jax.Array
    base_N: jax.Array
    token_N: jax.Array
    count_N: jax.Array
    position_N: jax.Array
    first_page_N: jax.Array
    end_page_N: jax.Array
    counts_2: jax.Array
    queries_per_tile: int
    window: int | None


def tile_size(max_query_len: int, queries_per_tile: int) -> int:
    """Q: 1 for decode, else a power of two from 8 (sublanes of a register) to `queries_per_tile`."""
    if max_query_len == 1:
        return 1
    return min(max(8, 1 << (max_query_len - 1).bit_length()), queries_per_tile)


def list_tiles(batch: RaggedBatch, *, num_tokens: int, page_size: int, window: int | None, tile: int) -> TpuWork:
    """Lists the tiles; the padding behind the last row's tokens counts as one more row, of context 0."""
    num_rows, width = batch.page_table_BM.shape
    start_R = batch.query_start_R
    length_R = jnp.concatenate([start_R[1:], jnp.full(1, num_tokens, jnp.int32)]) - start_R
    context_R = jnp.concatenate([batch.context_len_B, jnp.zeros(1, jnp.int32)])
    tiles_R = (length_R + tile - 1) // tile
    # Stable: tiles with pages keep the order of their rows, then come those without.
    order_R = jnp.argsort(context_R == 0, stable=True).astype(jnp.int32)
    end_R = jnp.cumsum(tiles_R[order_R])
    capacity = min(num_tokens, (num_tokens + (num_rows + 1) * (tile - 1)) // tile)
    tile_N = jnp.arange(capacity, dtype=jnp.int32)
    rank_N = jnp.minimum((tile_N[:, None] >= end_R[None, :]).sum(1, dtype=jnp.int32), num_rows)
    row_N = order_R[rank_N]
    offset_N = (tile_N - end_R[rank_N] + tiles_R[row_N]) * tile
    count_N = jnp.clip(length_R[row_N] - offset_N, 0, tile)
    position_N = context_R[row_N] - length_R[row_N] + offset_N
    last_N = position_N + count_N - 1
    seen_N = jnp.zeros_like(position_N) if window is None else jnp.maximum(position_N - (window - 1), 0)
    return TpuWork(
        table_X=batch.page_table_BM.reshape(-1),
        base_N=jnp.minimum(row_N, num_rows - 1) * width,
        token_N=start_R[row_N] + offset_N,
        count_N=count_N,
        position_N=position_N,
        first_page_N=seen_N // page_size,
        end_page_N=last_N // page_size + 1,
        counts_2=jnp.stack([jnp.where(context_R > 0, tiles_R, 0).sum(dtype=jnp.int32), end_R[-1]]),
        queries_per_tile=tile,
        window=window,
    )
