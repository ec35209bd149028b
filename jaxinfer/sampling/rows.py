"""Reductions over the vocabulary of every row: argmax and top k. Exact, and fast on XLA:CPU as well.

XLA:CPU runs a plain max at memory speed, its (value, index) reduce 20 times slower. So rows are cut into blocks:

    x_BV -> [B, blocks, BLOCK] -> block maxima -> the best blocks -> the best entries inside those

Measured on 2 cores at [32, 49152] float32: jnp.argmax 3.4 ms, `argmax_rows` 0.15; lax.top_k(20) 1.7, `top_k_rows` 0.5.
"""

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 128  # one TPU lane row; a multiple of every CPU vector


def in_blocks(x_BV: jax.Array, fill: float, block: int = BLOCK) -> jax.Array:
    """[B, V] as [B, ceil(V / block), block]; what lies past V is `fill`. No copy when `block` divides V."""
    num_rows, vocab = x_BV.shape
    short = -vocab % block
    if short:
        x_BV = jnp.pad(x_BV, ((0, 0), (0, short)), constant_values=fill)
    return x_BV.reshape(num_rows, (vocab + short) // block, block)


def argmax_rows(x_BV: jax.Array) -> jax.Array:
    """int32 [B]: index of each row's maximum, of equals the lowest. In range, but meaningless, for a row with NaN."""
    blocks = in_blocks(x_BV, -jnp.inf)
    best_block_B = jnp.argmax(jnp.max(blocks, axis=2), axis=1).astype(jnp.int32)
    block_BX = take_blocks(blocks, best_block_B[:, None])
    index_B = best_block_B * BLOCK + jnp.argmax(block_BX, axis=1).astype(jnp.int32)
    return jnp.minimum(index_B, x_BV.shape[1] - 1)


def take_blocks(blocks: jax.Array, ids_BK: jax.Array) -> jax.Array:
    """Entries of the chosen blocks, side by side: [B, blocks, block], int32 [B, K] in range -> [B, K * block]."""
    taken = jnp.take_along_axis(blocks, ids_BK[:, :, None], axis=1, mode="promise_in_bounds")
    return taken.reshape(ids_BK.shape[0], ids_BK.shape[1] * blocks.shape[2])


def top_k_rows(x_BV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest entries of each row, largest first, of equals the lowest index first; k is at most V.

    The k blocks with the largest maxima hold them: k blocks ahead of an entry's own would hold k entries ahead of it.
    The blocks are put back in index order, so that ties fall as they do in a scan of the whole row.

    Returns:
      values_BK: as x_BV.
      ids_BK: int32.
    """
    blocks = in_blocks(x_BV, -jnp.inf)
    if blocks.shape[1] < 2 * k:
        values_BK, ids_BK = lax.top_k(x_BV, k)
        return values_BK, ids_BK
    _, block_ids_BK = lax.top_k(jnp.max(blocks, axis=2), k)
    block_ids_BK = jnp.sort(block_ids_BK, axis=1)
    values_BK, at_BK = lax.top_k(take_blocks(blocks, block_ids_BK), k)
    ids_BK = jnp.take_along_axis(block_ids_BK, at_BK // BLOCK, axis=1) * BLOCK + at_BK % BLOCK
    return values_BK, ids_BK
