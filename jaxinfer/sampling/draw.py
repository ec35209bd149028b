"""One draw per row from unnormalised probabilities, by inverse cumulative sum in token-id order.

    weights [B, V] -> block sums [B, blocks] -> block by the first uniform -> entry inside it by the second

Both uniforms come from the key `fold_in(key(seed), output position)`, so a draw depends on the seed and the position
alone: not on the batch, the slot, preemption or a restart. Gumbel noise would cost a hash for every entry of the row.
"""

import jax
import jax.numpy as jnp

from jaxinfer.sampling.rows import in_blocks, take_blocks


def row_keys(seed_words_B2: jax.Array, output_pos_B: jax.Array) -> jax.Array:
    """One threefry key per row: `fold_in(key(seed), output position)`. Equal to jax.random.key(seed) for 64-bit seeds.

    Args:
      seed_words_B2: uint32; high and low half of the seed.
      output_pos_B: int32; output tokens before the one being chosen.
    """
    keys_B = jax.random.wrap_key_data(seed_words_B2, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(keys_B, output_pos_B.astype(jnp.uint32))


def draw(weight_BV: jax.Array, key_B: jax.Array) -> jax.Array:
    """int32 [B]: token v with probability weight[v] / sum(weight). A token of weight 0 is never chosen.

    Args:
      weight_BV: float32, >= 0, some entry of each row > 0. A row of zeros or NaN gives an id in range.
      key_B: from `row_keys`; consumed.
    """
    uniform_B2 = jax.vmap(lambda key: jax.random.uniform(key, (2,), jnp.float32))(key_B)
    blocks = in_blocks(weight_BV, 0.0)
    block_B = _pick(jnp.sum(blocks, axis=2), uniform_B2[:, 0])
    at_B = _pick(take_blocks(blocks, block_B[:, None]), uniform_B2[:, 1])
    return jnp.minimum(block_B * blocks.shape[2] + at_B, weight_BV.shape[1] - 1)


def _pick(weight_BX: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """int32 [B]: first entry of weight > 0 whose cumulative sum exceeds uniform * total, uniform in [0, 1).

    A parallel cumulative sum need not rise everywhere, by rounding, so an entry of weight 0 is ruled out by name, and
    the last entry of weight > 0 takes what rounding leaves over.
    """
    size = weight_BX.shape[1]
    sum_BX = jnp.cumsum(weight_BX, axis=1)
    target_B1 = (uniform_B * jnp.max(sum_BX, axis=1))[:, None]
    index_BX = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None, :], weight_BX.shape)
    is_positive_BX = weight_BX > 0
    last_B = jnp.max(jnp.where(is_positive_BX, index_BX, 0), axis=1)
    first_B = jnp.min(jnp.where(is_positive_BX & (sum_BX > target_B1), index_BX, size), axis=1)
    return jnp.minimum(first_B, last_B)
