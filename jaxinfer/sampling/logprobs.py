"""Log probabilities of the model's own distribution: log_softmax of the raw logits, whatever the sampling parameters.

-inf comes out as it is; the host floors at -9999.0 where it builds `Logprob`, so that JSON never sees it.
"""

import jax
import jax.numpy as jnp

from jaxinfer.request import MAX_LOGPROBS
from jaxinfer.sampling.rows import top_k_rows


def log_normalizer(logits_BV: jax.Array) -> jax.Array:
    """float32 [B]: log(sum(exp(logits)))."""
    top_B = jnp.max(logits_BV, axis=1)
    return top_B + jnp.log(jnp.sum(jnp.exp(logits_BV - top_B[:, None]), axis=1))


def token_logprobs(logits_BV: jax.Array, token_B: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log probability (float32 [B]) and rank (int32 [B], 1 for the likeliest, equals share the better one) of tokens.

    Args:
      logits_BV: float32, raw.
      token_B: int32, in range.
    """
    value_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1, mode="clip")[:, 0]
    rank_B = 1 + jnp.sum((logits_BV > value_B[:, None]).astype(jnp.int32), axis=1)
    return value_B - log_normalizer(logits_BV), rank_B


def top_logprobs(logits_BV: jax.Array, k: int = MAX_LOGPROBS) -> tuple[jax.Array, jax.Array]:
    """The k likeliest tokens, best first, of equals the lowest id first.

    Returns:
      ids_BK: int32.
      logprobs_BK: float32.
    """
    values_BK, ids_BK = top_k_rows(logits_BV, k)
    return ids_BK, values_BK - log_normalizer(logits_BV)[:, None]
