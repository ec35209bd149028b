"""What a step's GPU kernels have to do: pieces of contexts for rows with few query tokens, tiles for the others.

Lists have the static length of the most there can be; what is past the end of the real ones is in range and ignored.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.contract import RaggedBatch

ALIGN = 64  # positions; items begin at multiples, so that blocks of keys do too


class Items(NamedTuple):
    """Pieces of the contexts of the rows with few query tokens. W is the most there can be.

    Attributes:
      num_items_1: int32 [1].
      row_W, first_W, end_W: int32 row and positions of an item; `end` is past its last.
      first_item_B, items_B: int32, a row's first item and how many it has; 0 for a row that has many query tokens.
    """

    num_items_1: jax.Array
    row_W: jax.Array
    first_W: jax.Array
    end_W: jax.Array
    first_item_B: jax.Array
    items_B: jax.Array


class Tiles(NamedTuple):
    """Tiles of the rows with more query tokens. N is the most there can be.

    Attributes:
      num_tiles_1: int32 [1].
      row_N, token_N, position_N, queries_N: int32 row, first token, that token's position and number of tokens.
    """

    num_tiles_1: jax.Array
    row_N: jax.Array
    token_N: jax.Array
    position_N: jax.Array
    queries_N: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("batch", "items", "window_1"),
    meta_fields=("max_short", "has_tiles"),
)
@dataclass(frozen=True)
class GpuWork:
    """Work of a step.

    Attributes:
      batch: as given.
      window_1: int32 [1], positions seen; None when there is no window.
      max_short: most query tokens of a row in `items`.
      has_tiles: whether a row can have more.
    """

    batch: RaggedBatch
    items: Items
    window_1: jax.Array | None
    max_short: int
    has_tiles: bool

    @property
    def is_decode(self) -> bool:
        """Whether every row has one query token, row b's token b."""
        return self.max_short == 1 and not self.has_tiles


def cdiv(a, b):
    return (a + b - 1) // b


def _offsets(count_B):
    """Sums of the counts before each row, and of all."""
    row_B = jnp.arange(count_B.shape[0], dtype=jnp.int32)
    before_BB = row_B[None, :] < row_B[:, None]
    return jnp.where(before_BB, count_B[None, :], 0).sum(1, dtype=jnp.int32), count_B.sum(dtype=jnp.int32)


def _owners(start_B, count_B, capacity: int):
    """Row of each of `capacity` entries, of which row b has `count_B[b]` from `start_B[b]`; in range past the last."""
    entry_E = jnp.arange(capacity, dtype=jnp.int32)
    row_E = (entry_E[:, None] >= (start_B + count_B)[None, :]).sum(1, dtype=jnp.int32)
    return entry_E, jnp.minimum(row_E, start_B.shape[0] - 1)


def list_items(
    batch: RaggedBatch, *, max_short: int, window: int | None, most_positions: int, split_keys: int, num_splits: int
) -> Items:
    """Cuts the contexts of the rows with up to `max_short` query tokens.

    Args:
      window: positions a query sees, or None.
      most_positions: that a row's pages can hold.
      split_keys: positions that are worth an item of their own.
      num_splits: items after which longer ones are better than more.
    """
    num_rows = batch.context_len_B.shape[0]
    query_len_B = batch.query_start_R[1:] - batch.query_start_R[:-1]
    is_short_B = (query_len_B > 0) & (query_len_B <= max_short)
    first_B = jnp.zeros_like(batch.context_len_B)
    if window is not None:
        first_B = jnp.maximum(batch.context_len_B - query_len_B + 1 - window, 0) // ALIGN * ALIGN
    length_B = jnp.where(is_short_B, batch.context_len_B - first_B, 0)
    per_item = jnp.maximum(split_keys, cdiv(length_B.sum(dtype=jnp.int32), num_splits))
    # Items of one row are equally long but for the last.
    per_item_B = cdiv(cdiv(length_B, jnp.maximum(cdiv(length_B, per_item), 1)), ALIGN) * ALIGN
    per_item_B = jnp.maximum(per_item_B, ALIGN)
    # A row without context has an item too, which writes zeros.
    items_B = jnp.where(is_short_B, jnp.maximum(cdiv(length_B, per_item_B), 1), 0)
    start_B, num_items = _offsets(items_B)
    capacity = min(num_rows + num_splits, num_rows * cdiv(most_positions, split_keys))
    item_W, row_W = _owners(start_B, items_B, capacity)
    first_W = first_B[row_W] + (item_W - start_B[row_W]) * per_item_B[row_W]
    return Items(
        num_items_1=num_items[None],
        row_W=row_W,
        first_W=first_W,
        end_W=jnp.minimum(first_W + per_item_B[row_W], batch.context_len_B[row_W]),
        first_item_B=start_B,
        items_B=items_B,
    )


def list_tiles(batch: RaggedBatch, *, max_short: int, num_tokens: int, tile: int) -> Tiles:
    """Cuts the query tokens of the rows with more than `max_short` into tiles of `tile`."""
    num_rows = batch.context_len_B.shape[0]
    query_len_B = batch.query_start_R[1:] - batch.query_start_R[:-1]
    tiles_B = jnp.where(query_len_B > max_short, cdiv(query_len_B, tile), 0)
    start_B, num_tiles = _offsets(tiles_B)
    capacity = num_tokens // tile + min(num_rows, max(1, num_tokens // (max_short + 1)))
    tile_N, row_N = _owners(start_B, tiles_B, capacity)
    offset_N = (tile_N - start_B[row_N]) * tile
    left_N = query_len_B[row_N] - offset_N
    return Tiles(
        num_tiles_1=num_tiles[None],
        row_N=row_N,
        token_N=batch.query_start_R[row_N] + offset_N,
        position_N=batch.context_len_B[row_N] - left_N,
        queries_N=jnp.minimum(left_N, tile),
    )
