"""Repetition, presence and frequency penalties, and the token counts they read.

`counts_SV` int32 [S, V] lives on the device, one row per slot:

    bit 30 set: the token occurs in the prompt            low bits: how often it occurs in the output

Repetition looks at prompt and output, presence and frequency at the output alone (as in vLLM).
"""

import jax
import jax.numpy as jnp

from jaxinfer.sampling.params_batch import RowParams

IN_PROMPT = 1 << 30
_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


def row_from_history(
    history_L: jax.Array, num_prompt_tokens: jax.Array, num_tokens: jax.Array, vocab_size: int
) -> jax.Array:
    """Counts of one sequence, for its admission: int32 [V].

    Args:
      history_L: int32; prompt, then output tokens, then anything.
      num_prompt_tokens, num_tokens: int32 scalars; how many entries are prompt, and how many are prompt or output.
    """
    position_L = jnp.arange(history_L.shape[0], dtype=jnp.int32)
    prompt_L = jnp.where(position_L < num_prompt_tokens, history_L, vocab_size)
    is_output_L = (position_L >= num_prompt_tokens) & (position_L < num_tokens)
    output_L = jnp.where(is_output_L, history_L, vocab_size)
    counts_V = jnp.zeros((vocab_size,), jnp.int32).at[prompt_L].set(IN_PROMPT, mode="drop")
    return counts_V.at[output_L].add(1, mode="drop")


def count_tokens(counts_SV: jax.Array, slot_ids_B: jax.Array, tokens_B: jax.Array, is_new_B: jax.Array) -> jax.Array:
    """Adds one output token in each row where `is_new_B`. In place when donated, or carried by a loop."""
    # An index past the end is dropped; -1 would write the last slot.
    slots_B = jnp.where(is_new_B, slot_ids_B, counts_SV.shape[0])
    return counts_SV.at[slots_B, tokens_B].add(1, mode="drop")


def uses_penalties(rows: RowParams) -> jax.Array:
    """bool [B]."""
    return (rows.repetition_penalty != 1.0) | (rows.presence_penalty != 0.0) | (rows.frequency_penalty != 0.0)


def apply_penalties(logits_BV: jax.Array, rows: RowParams, counts_BV: jax.Array) -> jax.Array:
    """Penalised logits, float32 and finite where the given ones are; rows without penalties come back bit for bit.

    Args:
      counts_BV: the rows' counts, as described at the top.
    """
    assert logits_BV.shape == counts_BV.shape
    times_BV = counts_BV & (IN_PROMPT - 1)
    repetition_B1 = rows.repetition_penalty[:, None]
    repeated_BV = jnp.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
    x_BV = jnp.where(counts_BV > 0, repeated_BV, logits_BV)
    x_BV = x_BV - rows.frequency_penalty[:, None] * times_BV.astype(jnp.float32)
    x_BV = jnp.where(times_BV > 0, x_BV - rows.presence_penalty[:, None], x_BV)
    return jnp.clip(x_BV, -_FLOAT32_MAX, _FLOAT32_MAX)  # a tiny repetition penalty overflows the division
