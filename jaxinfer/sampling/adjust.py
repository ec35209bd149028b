"""What a request allows and prefers, put on the logits: bias, penalties, allowed ids, minimum length, bad words.

Order: bias, penalties, then the masks. (vLLM masks before it penalises; -inf stays -inf under every penalty, so the
outcome is the same.) Every step is skipped at run time when no live row uses it.

When bad words and min_tokens leave a row nothing at all, they give way at that position; allowed_token_ids never does.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.request import MAX_BAD_WORD_TOKENS
from jaxinfer.sampling.params_batch import NO_TOKEN, RowParams, SlotParams, gather_rows
from jaxinfer.sampling.penalties import apply_penalties, uses_penalties

TAIL_TOKENS = MAX_BAD_WORD_TOKENS - 1  # W: how far back bad words look


def add_bias(logits_BV: jax.Array, slot_params: SlotParams, slot_ids_B: jax.Array) -> jax.Array:
    """Adds each row's logit bias."""
    row_B1 = jnp.arange(logits_BV.shape[0], dtype=jnp.int32)[:, None]
    ids_BX = slot_params.bias_ids.at[slot_ids_B].get(mode="clip")
    values_BX = slot_params.bias_values.at[slot_ids_B].get(mode="clip")
    return logits_BV.at[row_B1, ids_BX].add(values_BX, mode="drop")


def mask_not_allowed(logits_BV: jax.Array, slot_params: SlotParams, slot_ids_B: jax.Array) -> jax.Array:
    """-inf for ids outside allowed_token_ids, in rows that have such a list."""
    num_rows, vocab = logits_BV.shape
    words_BX = slot_params.allowed_bits.at[slot_ids_B].get(mode="clip")
    bits = (words_BX[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None, :]) & jnp.uint32(1)
    is_allowed_BV = bits.reshape(num_rows, -1)[:, :vocab] != 0
    has_list_B = slot_params.row.has_allowed.at[slot_ids_B].get(mode="clip")
    return jnp.where(is_allowed_BV | ~has_list_B[:, None], logits_BV, -jnp.inf)


def banned_ends(slot_params: SlotParams, slot_ids_B: jax.Array, output_pos_B: jax.Array) -> jax.Array:
    """int32 [B, MAX_END_IDS]: end ids of rows still short of min_tokens; NO_TOKEN elsewhere."""
    end_ids_BE = slot_params.end_ids.at[slot_ids_B].get(mode="clip")
    min_tokens_B = slot_params.row.min_tokens.at[slot_ids_B].get(mode="clip")
    return jnp.where((output_pos_B < min_tokens_B)[:, None], end_ids_BE, NO_TOKEN)


def banned_by_words(slot_params: SlotParams, slot_ids_B: jax.Array, tail_BW: jax.Array) -> jax.Array:
    """int32 [B, MAX_BAD_WORDS]: last token of each bad word whose other tokens end the output; NO_TOKEN elsewhere.

    Args:
      tail_BW: int32; the last MAX_BAD_WORD_TOKENS - 1 output tokens, latest last; NO_TOKEN where there are fewer.
    """
    words_BXY = slot_params.bad_words.at[slot_ids_B].get(mode="clip")
    before_BXW = words_BXY[:, :, :-1]
    is_match_BX = jnp.all((before_BXW == NO_TOKEN) | (before_BXW == tail_BW[:, None, :]), axis=2)
    return jnp.where(is_match_BX, words_BXY[:, :, -1], NO_TOKEN)


def tail_from_history(history_L: jax.Array, num_prompt_tokens: jax.Array, num_tokens: jax.Array) -> jax.Array:
    """The last TAIL_TOKENS output tokens of a sequence, int32 [W], latest last. Arguments as for `row_from_history`."""
    at_W = num_tokens - TAIL_TOKENS + jnp.arange(TAIL_TOKENS, dtype=jnp.int32)
    tail_W = history_L.at[jnp.maximum(at_W, 0)].get(mode="clip")
    return jnp.where(at_W >= num_prompt_tokens, tail_W, NO_TOKEN)


def push_tail(tail_BW: jax.Array, token_B: jax.Array, is_new_B: jax.Array) -> jax.Array:
    """The tails after one more output token in the rows where `is_new_B`."""
    pushed_BW = jnp.concatenate([tail_BW[:, 1:], token_B[:, None]], axis=1)
    return jnp.where(is_new_B[:, None], pushed_BW, tail_BW)


def adjusts(rows: RowParams, output_pos_B: jax.Array) -> jax.Array:
    """bool [B]: `adjust_logits` may change the row."""
    is_short_B = output_pos_B < rows.min_tokens
    return uses_penalties(rows) | (rows.num_bias > 0) | rows.has_allowed | (rows.num_bad_words > 0) | is_short_B


def adjust_logits(
    logits_BV: jax.Array,
    slot_params: SlotParams,
    slot_ids_B: jax.Array,
    counts_SV: jax.Array,
    tail_BW: jax.Array,
    output_pos_B: jax.Array,
    is_live_B: jax.Array,
    draft_BJ: jax.Array | None = None,
    num_draft_B: jax.Array | None = None,
) -> jax.Array:
    """Bias, penalties and masks, each done only when a live row uses it. Rows that use none come back bit for bit.

    Args:
      logits_BV: float32, finite.
      counts_SV: see `penalties`.
      tail_BW: see `banned_by_words`.
      output_pos_B: int32; output tokens before the one being chosen.
      draft_BJ, num_draft_B: int32; tokens of the output that `counts_SV` does not hold yet, for verification: the first
        `num_draft_B` of a row count. `tail_BW` and `output_pos_B` already include them.

    Returns:
      float32 [B, V]; -inf where masked; every row keeps something finite.
    """
    rows = gather_rows(slot_params, slot_ids_B)

    def when(uses_B: jax.Array, change: Callable[[jax.Array], jax.Array], x_BV: jax.Array) -> jax.Array:
        return lax.cond(jnp.any(uses_B & is_live_B), change, lambda x: x, x_BV)

    def penalise(x_BV: jax.Array) -> jax.Array:
        counts_BV = counts_SV.at[slot_ids_B].get(mode="clip")
        if draft_BJ is not None and num_draft_B is not None:
            j_J = jnp.arange(draft_BJ.shape[1], dtype=jnp.int32)
            ids_BJ = jnp.where(j_J[None, :] < num_draft_B[:, None], draft_BJ, NO_TOKEN)
            row_B1 = jnp.arange(draft_BJ.shape[0], dtype=jnp.int32)[:, None]
            counts_BV = counts_BV.at[row_B1, ids_BJ].add(1, mode="drop")
        return apply_penalties(x_BV, rows, counts_BV)

    def ban(x_BV: jax.Array) -> jax.Array:
        ids_BX = jnp.concatenate(
            [banned_ends(slot_params, slot_ids_B, output_pos_B), banned_by_words(slot_params, slot_ids_B, tail_BW)],
            axis=1,
        )
        row_B1 = jnp.arange(x_BV.shape[0], dtype=jnp.int32)[:, None]
        left_BV = x_BV.at[row_B1, ids_BX].set(-jnp.inf, mode="drop")
        is_empty_B = jnp.max(left_BV, axis=1) == -jnp.inf
        return jnp.where(is_empty_B[:, None], x_BV, left_BV)

    x_BV = when(rows.num_bias > 0, lambda x: add_bias(x, slot_params, slot_ids_B), logits_BV)
    x_BV = when(uses_penalties(rows), penalise, x_BV)
    x_BV = when(rows.has_allowed, lambda x: mask_not_allowed(x, slot_params, slot_ids_B), x_BV)
    return when((rows.num_bad_words > 0) | (output_pos_B < rows.min_tokens), ban, x_BV)
