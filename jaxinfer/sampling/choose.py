"""The next token of every row: guard, adjust, filter, draw, report. What no live row asks for is skipped at run time.

    logits -> guard + argmax -> (adjusted? sampled?) -> adjust_logits -> argmax, or sampling_weights -> draw
                            \\-> (log probabilities asked?) -> log_softmax, rank, top 20

Runs inside the step's `while_loop`: no host state, and one compiled graph for every mix of parameters.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.request import MAX_LOGPROBS
from jaxinfer.sampling.adjust import adjust_logits, adjusts
from jaxinfer.sampling.draw import draw, row_keys
from jaxinfer.sampling.filters import sampling_weights
from jaxinfer.sampling.logprobs import token_logprobs, top_logprobs
from jaxinfer.sampling.nan_guard import is_bad_rows
from jaxinfer.sampling.params_batch import SlotParams, gather_rows
from jaxinfer.sampling.rows import argmax_rows


class Choice(NamedTuple):
    """What came out for each row. Rows that are bad or not live hold values in range that mean nothing.

    Attributes:
      token_B: int32 in [0, V).
      is_bad_B: bool; the row's logits were not all finite.
      logprob_B: float32, of the token under the raw logits; zeros when no live row asks for log probabilities.
      rank_B: int32; likewise.
      top_ids_BK, top_logprobs_BK: int32, float32, K = MAX_LOGPROBS, best first; zeros when no live row asks for any.
    """

    token_B: jax.Array
    is_bad_B: jax.Array
    logprob_B: jax.Array
    rank_B: jax.Array
    top_ids_BK: jax.Array
    top_logprobs_BK: jax.Array


def choose(
    logits_BV: jax.Array,
    slot_params: SlotParams,
    slot_ids_B: jax.Array,
    counts_SV: jax.Array,
    tail_BW: jax.Array,
    output_pos_B: jax.Array,
    is_live_B: jax.Array,
) -> Choice:
    """Chooses one token per row.

    Args:
      logits_BV: float32, raw.
      slot_ids_B: int32; slot of each row, in range (any slot for rows that are not live).
      counts_SV: int32; see `penalties`.
      tail_BW: int32; last output tokens, see `adjust.banned_by_words`.
      output_pos_B: int32; output tokens before this one.
      is_live_B: bool; other rows switch nothing on.
    """
    assert logits_BV.dtype == jnp.float32
    assert logits_BV.shape[1] >= MAX_LOGPROBS, "a vocabulary smaller than the log probabilities one may ask for"
    assert slot_ids_B.shape == output_pos_B.shape == is_live_B.shape == logits_BV.shape[:1]
    is_bad_B = is_bad_rows(logits_BV)
    best_B = argmax_rows(logits_BV)
    rows = gather_rows(slot_params, slot_ids_B)
    samples_B = rows.temperature > 0
    works_B = is_live_B & ~is_bad_B

    def choose_adjusted() -> jax.Array:
        x_BV = adjust_logits(logits_BV, slot_params, slot_ids_B, counts_SV, tail_BW, output_pos_B, works_B)
        greedy_B = argmax_rows(x_BV)

        def sample() -> jax.Array:
            drawn_B = draw(sampling_weights(x_BV, rows, works_B), row_keys(rows.seed_words, output_pos_B))
            return jnp.where(samples_B, drawn_B, greedy_B)

        return lax.cond(jnp.any(works_B & samples_B), sample, lambda: greedy_B)

    needs_B = works_B & (samples_B | adjusts(rows, output_pos_B))
    token_B = lax.cond(jnp.any(needs_B), choose_adjusted, lambda: best_B)
    asks_B = works_B & rows.has_logprobs
    logprob_B, rank_B = lax.cond(
        jnp.any(asks_B),
        lambda: token_logprobs(logits_BV, token_B),
        lambda: (jnp.zeros(token_B.shape, jnp.float32), jnp.zeros(token_B.shape, jnp.int32)),
    )
    shape_BK = (token_B.shape[0], MAX_LOGPROBS)
    top_ids_BK, top_logprobs_BK = lax.cond(
        jnp.any(asks_B & (rows.num_logprobs > 0)),
        lambda: top_logprobs(logits_BV),
        lambda: (jnp.zeros(shape_BK, jnp.int32), jnp.zeros(shape_BK, jnp.float32)),
    )
    return Choice(token_B, is_bad_B, logprob_B, rank_B, top_ids_BK, top_logprobs_BK)
