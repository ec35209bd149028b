"""What the device remembers of each slot between programs, so that tokens feed the next program without the host.

history   [ p0 p1 p2 o0 o1 .  . ]      num_tokens 5, num_prompt_tokens 3
                        ^ input of the next decode round, at position 4
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.sampling import (
    Choice,
    SlotParams,
    choose,
    count_tokens,
    is_end,
    row_from_history,
    tail_from_history,
    write_rows,
)

NUM_ADMISSION_NUMBERS = 4  # slot, num_tokens, num_prompt_tokens, max_total_tokens


class SlotState(NamedTuple):
    """One row per slot; donated to every program.

    Attributes:
      history_SL: int32, tokens of the sequence in each slot.
      num_tokens_S, num_prompt_tokens_S: int32, how many of them there are, and how many are the prompt.
      max_total_tokens_S: int32; a slot freezes there.
      is_live_S: bool; False before admission and once the sequence has ended.
      counts_SV: int32, see `sampling.penalties`.
      params: sampling parameters.
    """

    history_SL: jax.Array
    num_tokens_S: jax.Array
    num_prompt_tokens_S: jax.Array
    max_total_tokens_S: jax.Array
    is_live_S: jax.Array
    counts_SV: jax.Array
    params: SlotParams

    @staticmethod
    def zeros(num_slots: int, max_model_len: int, vocab_size: int) -> SlotState:
        """No slot is live. No two fields share a buffer, so that all can be donated."""
        return SlotState(
            history_SL=jnp.zeros((num_slots, max_model_len), jnp.int32),
            num_tokens_S=jnp.zeros(num_slots, jnp.int32),
            num_prompt_tokens_S=jnp.zeros(num_slots, jnp.int32),
            max_total_tokens_S=jnp.zeros(num_slots, jnp.int32),
            is_live_S=jnp.zeros(num_slots, jnp.bool_),
            counts_SV=jnp.zeros((num_slots, vocab_size), jnp.int32),
            params=SlotParams.zeros(num_slots, vocab_size),
        )


def admit(state: SlotState, packed_AX: jax.Array) -> SlotState:
    """Writes admissions into their slots.

    Args:
      packed_AX: int32; per row: slot (the number of slots for an unused row), num_tokens, num_prompt_tokens,
        max_total_tokens, the history [L], the packed sampling parameters.
    """
    max_len = state.history_SL.shape[1]
    slot_A, num_tokens_A, num_prompt_A, max_total_A = (packed_AX[:, i] for i in range(NUM_ADMISSION_NUMBERS))
    history_AL = packed_AX[:, NUM_ADMISSION_NUMBERS : NUM_ADMISSION_NUMBERS + max_len]
    counts_AV = jax.vmap(row_from_history, in_axes=(0, 0, 0, None))(
        history_AL, num_prompt_A, num_tokens_A, state.counts_SV.shape[1]
    )

    def put(old, new):
        return old.at[slot_A].set(new, mode="drop")

    return SlotState(
        history_SL=put(state.history_SL, history_AL),
        num_tokens_S=put(state.num_tokens_S, num_tokens_A),
        num_prompt_tokens_S=put(state.num_prompt_tokens_S, num_prompt_A),
        max_total_tokens_S=put(state.max_total_tokens_S, max_total_A),
        is_live_S=put(state.is_live_S, jnp.ones_like(slot_A, jnp.bool_)),
        counts_SV=put(state.counts_SV, counts_AV),
        params=write_rows(state.params, slot_A, packed_AX[:, NUM_ADMISSION_NUMBERS + max_len :]),
    )


def read(slot_values: jax.Array, slot_B: jax.Array) -> jax.Array:
    """A field's values of these rows; an out-of-range slot (a padding row) reads the last slot's."""
    return slot_values.at[slot_B].get(mode="clip")


def emit(state: SlotState, logits_BV, slot_B, emits_B) -> tuple[SlotState, Choice, jax.Array]:
    """Samples one token for the rows in `emits_B` and appends it to their slots.

    Args:
      logits_BV: float32, of each row's last position.
      slot_B: int32, distinct where `emits_B`.
      emits_B: bool; rows that are live and due a token.

    Returns:
      (state, choice, emitted_B): `emitted_B` is `emits_B` without the rows whose logits were not finite. A slot whose
      token ends it, or that is bad, is no longer live.
    """
    num_slots, max_len = state.history_SL.shape
    num_tokens_B = read(state.num_tokens_S, slot_B)
    num_prompt_B = read(state.num_prompt_tokens_S, slot_B)
    safe_slot_B = jnp.minimum(slot_B, num_slots - 1)
    output_pos_B = num_tokens_B - num_prompt_B
    tail_BW = jax.vmap(lambda slot, prompt, total: tail_from_history(state.history_SL[slot], prompt, total))(
        safe_slot_B, num_prompt_B, num_tokens_B
    )
    choice = choose(logits_BV, state.params, safe_slot_B, state.counts_SV, tail_BW, output_pos_B, emits_B)
    emitted_B = emits_B & ~choice.is_bad_B
    to_B = jnp.where(emitted_B, slot_B, num_slots)
    ends_B = is_end(choice.token_B, state.params, safe_slot_B) | (
        num_tokens_B + 1 >= read(state.max_total_tokens_S, slot_B)
    )
    off_B = jnp.where(emits_B & (ends_B | choice.is_bad_B), slot_B, num_slots)
    new_state = state._replace(
        history_SL=state.history_SL.at[to_B, jnp.minimum(num_tokens_B, max_len - 1)].set(choice.token_B, mode="drop"),
        num_tokens_S=state.num_tokens_S.at[to_B].set(num_tokens_B + 1, mode="drop"),
        is_live_S=state.is_live_S.at[off_B].set(False, mode="drop"),
        counts_SV=count_tokens(state.counts_SV, safe_slot_B, choice.token_B, emitted_B),
    )
    return new_state, choice, emitted_B
