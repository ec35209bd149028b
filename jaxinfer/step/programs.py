"""The bodies of the compiled programs, as pure functions of arrays.

Each takes its dynamic input as one packed int32 array and returns its news as one packed int32 array, so that host and
device meet once per dispatch. Everything else (parameters, pages, slots) stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.model import Architecture, LayerCall, MeshRules, ModelParams, StepTokensInput, final_norm, forward, logits
from jaxinfer.request import MAX_LOGPROBS
from jaxinfer.sampling import Choice, token_logprobs, top_logprobs
from jaxinfer.step.slot_state import SlotState, emit, read
from pallas_kernels.ragged_paged_attention import AttentionOp, RaggedBatch

NUM_ROW_NUMBERS = 5  # of a mixed row: slot, start, query length, is_decode, samples
LOGPROB_WORDS = 2 + 2 * MAX_LOGPROBS  # logprob, rank, ids, logprobs; floats by their bits
FEW_HEAD_ROWS = 2  # rows a mixed step samples at most, most of the time
SCORE_BLOCK = 32  # positions scored at once for prompt_logprobs: bounds the logits in memory


@dataclass(frozen=True)
class ProgramContext:
    """What is static in every program.

    Attributes:
      rebuild: flat leaves -> ModelParams.
      call_layer: one layer, traced once.
    """

    arch: Architecture
    op: AttentionOp
    rules: MeshRules
    page_size: int
    rebuild: Any
    call_layer: LayerCall

    def run(self, leaves, pages, inputs: StepTokensInput, max_query_len: int):
        """All layers."""
        params: ModelParams = self.rebuild(leaves)
        return forward(
            params,
            self.arch,
            self.op,
            self.rules,
            pages,
            inputs,
            max_query_len=max_query_len,
            page_size=self.page_size,
            call_layer=self.call_layer,
        )

    def head(self, leaves, x_TD):
        """Float32 logits [T, V] of hidden states."""
        params: ModelParams = self.rebuild(leaves)
        return logits(params, self.rules, final_norm(params, x_TD))


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def _pack_logprobs(logprob_B, rank_B, ids_BK, logprobs_BK):
    """int32 [B, LOGPROB_WORDS]: the one layout of log probabilities on their way to the host."""
    return jnp.concatenate([_bits(logprob_B)[:, None], rank_B[:, None], ids_BK, _bits(logprobs_BK)], axis=1)


def _logprob_words(choice: Choice):
    """int32 [B, LOGPROB_WORDS] of sampled tokens."""
    return _pack_logprobs(choice.logprob_B, choice.rank_B, choice.top_ids_BK, choice.top_logprobs_BK)


class DecodeNews(NamedTuple):
    """What a dispatch brings back.

    Attributes:
      tokens_BX: int32; per row: number of tokens, is_bad, then the tokens.
      logprobs_BRW: int32; LOGPROB_WORDS words per token; read only when a request asks.
    """

    tokens_BX: jax.Array
    logprobs_BRW: jax.Array


def decode(ctx: ProgramContext, max_rounds: int, leaves, pages, state: SlotState, packed_BX, num_rounds):
    """Up to `max_rounds` tokens for every row, in one loop that leaves early when no row is live.

    Args:
      packed_BX: int32; per row: slot (the number of slots for padding), then its page table.
      num_rounds: int32 scalar, at most `max_rounds`.

    Returns:
      (pages, state, DecodeNews).
    """
    slot_B, table_BM = packed_BX[:, 0], packed_BX[:, 1:]
    num_rows = slot_B.shape[0]
    num_slots = state.history_SL.shape[0]
    starts_R = jnp.arange(num_rows + 1, dtype=jnp.int32)

    def live_rows(state: SlotState):
        return (slot_B < num_slots) & read(state.is_live_S, slot_B)

    def one_round(carry):
        r, pages, state, tokens_BX, logprobs_BRW = carry
        is_live_B = live_rows(state)
        position_B = jnp.where(is_live_B, read(state.num_tokens_S, slot_B) - 1, 0)
        token_B = state.history_SL.at[slot_B, position_B].get(mode="clip")
        page_B = jnp.where(is_live_B, table_BM[starts_R[:-1], position_B // ctx.page_size], 0)
        batch = RaggedBatch(table_BM, jnp.where(is_live_B, position_B + 1, 0), starts_R)
        inputs = StepTokensInput(token_B, position_B, page_B, position_B % ctx.page_size, batch)
        x_BD, pages = ctx.run(leaves, pages, inputs, 1)
        state, choice, emitted_B = emit(state, ctx.head(leaves, x_BD), slot_B, is_live_B)
        tokens_BX = lax.dynamic_update_slice(tokens_BX, jnp.where(emitted_B, choice.token_B, 0)[:, None], (0, 2 + r))
        tokens_BX = (
            tokens_BX.at[:, 0]
            .add(emitted_B.astype(jnp.int32))
            .at[:, 1]
            .max((is_live_B & choice.is_bad_B).astype(jnp.int32))
        )
        logprobs_BRW = lax.dynamic_update_slice(logprobs_BRW, _logprob_words(choice)[:, None], (0, r, 0))
        return r + 1, pages, state, tokens_BX, logprobs_BRW

    def goes_on(carry):
        r, _, state, _, _ = carry
        return (r < num_rounds) & jnp.any(live_rows(state))

    start = (
        jnp.int32(0),
        pages,
        state,
        jnp.zeros((num_rows, 2 + max_rounds), jnp.int32),
        jnp.zeros((num_rows, max_rounds, LOGPROB_WORDS), jnp.int32),
    )
    _, pages, state, tokens_BX, logprobs_BRW = lax.while_loop(goes_on, one_round, start)
    return pages, state, DecodeNews(tokens_BX, logprobs_BRW)


class PromptHidden(NamedTuple):
    """What scoring a prompt's tokens needs, padded to the largest bucket.

    Attributes:
      x_TD: hidden states before the final norm.
      target_T: int32, the token after each query token.
    """

    x_TD: jax.Array
    target_T: jax.Array


def mixed(ctx: ProgramContext, num_tokens: int, max_tokens: int, leaves, pages, state: SlotState, packed_BX):
    """One pass over a ragged batch of prefill chunks and decode rows, in a bucket of `num_tokens` query tokens.

    Args:
      max_tokens: the largest bucket.
      packed_BX: int32; per row: slot, start, query length (0 for padding), is_decode, samples, then its page table.

    Returns:
      (pages, state, DecodeNews with one round, PromptHidden).
    """
    slot_B, start_B, length_B, is_decode_B, samples_B = (packed_BX[:, i] for i in range(NUM_ROW_NUMBERS))
    table_BM = packed_BX[:, NUM_ROW_NUMBERS:]
    num_rows = slot_B.shape[0]
    works_B = (length_B > 0) & ((is_decode_B == 0) | read(state.is_live_S, slot_B))
    start_B = jnp.where(is_decode_B > 0, read(state.num_tokens_S, slot_B) - 1, start_B)
    end_B = jnp.cumsum(length_B)
    starts_R = jnp.concatenate([jnp.zeros(1, jnp.int32), end_B])

    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    row_T = jnp.minimum((token_T[:, None] >= end_B[None, :]).sum(1, dtype=jnp.int32), num_rows - 1)
    is_real_T = (token_T < end_B[-1]) & works_B[row_T]
    position_T = jnp.where(is_real_T, start_B[row_T] + token_T - starts_R[row_T], 0)
    page_T = jnp.where(is_real_T, table_BM[row_T, position_T // ctx.page_size], 0)
    input_T = state.history_SL.at[slot_B[row_T], position_T].get(mode="clip")
    batch = RaggedBatch(table_BM, jnp.where(works_B, start_B + length_B, 0), starts_R)
    inputs = StepTokensInput(input_T, position_T, page_T, position_T % ctx.page_size, batch)
    x_TD, pages = ctx.run(leaves, pages, inputs, num_tokens)

    emits_B = works_B & (samples_B > 0) & read(state.is_live_S, slot_B)
    logits_BV = _logits_of_some(ctx, leaves, x_TD[jnp.maximum(end_B - 1, 0)], emits_B)
    next_T = state.history_SL.at[slot_B[row_T], position_T + 1].get(mode="clip")
    state, choice, emitted_B = emit(state, logits_BV, slot_B, emits_B)
    is_bad_B = emits_B & choice.is_bad_B
    tokens_BX = jnp.stack(
        [emitted_B.astype(jnp.int32), is_bad_B.astype(jnp.int32), jnp.where(emitted_B, choice.token_B, 0)], axis=1
    )
    padding = max_tokens - num_tokens
    hidden = PromptHidden(jnp.pad(x_TD, ((0, padding), (0, 0))), jnp.pad(next_T, (0, padding)))
    return pages, state, DecodeNews(tokens_BX, _logprob_words(choice)[:, None]), hidden


def _logits_of_some(ctx: ProgramContext, leaves, x_BD, needed_B):
    """Float32 logits [B, V] of the rows needed, anything finite in the others.

    A step that ends one prompt needs one row of a batch that is padded to many: few rows have a head of their own.
    """
    num_rows = x_BD.shape[0]
    few = min(FEW_HEAD_ROWS, num_rows)
    no_logits_BV = jnp.zeros((num_rows, ctx.arch.vocab_size), jnp.float32)
    needed_first_B = jnp.argsort(~needed_B, stable=True)[:few]

    def head_of_few():
        return no_logits_BV.at[needed_first_B].set(ctx.head(leaves, x_BD[needed_first_B]))

    num_needed = needed_B.sum(dtype=jnp.int32)
    which = (num_needed > 0).astype(jnp.int32) + (num_needed > few).astype(jnp.int32)
    return lax.switch(which, [lambda: no_logits_BV, head_of_few, lambda: ctx.head(leaves, x_BD)])


def score(ctx: ProgramContext, leaves, hidden: PromptHidden, num_tokens):
    """Log probabilities of prompt tokens: int32 [T, LOGPROB_WORDS], row t about the token after query token t.

    Args:
      num_tokens: int32 scalar; rows from there on are zero.
    """
    max_tokens = hidden.target_T.shape[0]
    block = min(SCORE_BLOCK, max_tokens)

    def one_block(i, words_TW):
        # The last block is moved back rather than cut: scoring a position twice gives the same words.
        first = jnp.minimum(i * block, max_tokens - block)
        x_BD = lax.dynamic_slice_in_dim(hidden.x_TD, first, block)
        target_B = lax.dynamic_slice_in_dim(hidden.target_T, first, block)
        logits_BV = ctx.head(leaves, x_BD)
        logprob_B, rank_B = token_logprobs(logits_BV, target_B)
        ids_BK, logprobs_BK = top_logprobs(logits_BV)
        words_BW = _pack_logprobs(logprob_B, rank_B, ids_BK, logprobs_BK)
        return lax.dynamic_update_slice(words_TW, words_BW, (first, 0))

    num_blocks = (num_tokens + block - 1) // block
    return lax.fori_loop(0, num_blocks, one_block, jnp.zeros((max_tokens, LOGPROB_WORDS), jnp.int32))


def copy_out(pages, page_C):
    """These pages of every layer, for host memory."""
    return jax.tree.map(lambda a: a.at[page_C].get(mode="clip"), pages)


def copy_in(pages, page_C, values):
    """Writes pages back; entries of page_C equal to the number of pages are ignored."""
    return jax.tree.map(lambda a, v: a.at[page_C].set(v, mode="drop"), pages, values)
