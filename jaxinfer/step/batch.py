"""Packs plans into the int32 arrays the programs take, and unpacks what they bring back. numpy only.

Every array is fresh: a numpy buffer handed to a running program and written again would change under it.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.request import MAX_LOGPROBS
from jaxinfer.sampling import pack_row, packed_row_size
from jaxinfer.schedule.step_plan import Admission, PlannedRow, RowTokens, StepPlan, TokenLogprobs
from jaxinfer.step.programs import NUM_ROW_NUMBERS
from jaxinfer.step.slot_state import NUM_ADMISSION_NUMBERS


def pack_admissions(
    admissions: tuple[Admission, ...],
    num_rows: int,
    *,
    num_slots: int,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> np.ndarray:
    """int32 [num_rows, X] for `slot_state.admit`; at most `num_rows` admissions."""
    packed = np.zeros((num_rows, NUM_ADMISSION_NUMBERS + max_model_len + packed_row_size(vocab_size)), np.int32)
    packed[:, 0] = num_slots
    for row, a in zip(packed, admissions, strict=False):
        row[:NUM_ADMISSION_NUMBERS] = (a.slot, len(a.token_ids), a.num_prompt_tokens, a.max_total_tokens)
        row[NUM_ADMISSION_NUMBERS : NUM_ADMISSION_NUMBERS + len(a.token_ids)] = a.token_ids
        row[NUM_ADMISSION_NUMBERS + max_model_len :] = pack_row(
            a.params, seed=a.seed, vocab_size=vocab_size, eos_token_ids=eos_token_ids, bad_word_ids=a.bad_word_ids
        )
    return packed


def pack_decode(plan: StepPlan, num_rows: int, num_slots: int) -> np.ndarray:
    """int32 [num_rows, 1 + M] for `programs.decode`."""
    packed = np.zeros((num_rows, 1 + plan.page_table.shape[1]), np.int32)
    packed[:, 0] = num_slots
    packed[: len(plan.rows), 0] = [row.slot for row in plan.rows]
    packed[: len(plan.rows), 1:] = plan.page_table
    return packed


def pack_mixed(plan: StepPlan, num_rows: int, num_slots: int) -> np.ndarray:
    """int32 [num_rows, NUM_ROW_NUMBERS + M] for `programs.mixed`."""
    packed = np.zeros((num_rows, NUM_ROW_NUMBERS + plan.page_table.shape[1]), np.int32)
    packed[:, 0] = num_slots
    for out, row in zip(packed, plan.rows, strict=False):
        out[:NUM_ROW_NUMBERS] = (row.slot, row.start or 0, row.num_tokens, row.start is None, row.samples)
    packed[: len(plan.rows), NUM_ROW_NUMBERS:] = plan.page_table
    return packed


def unpack_logprobs(words_NW: np.ndarray, num_top: int) -> tuple[TokenLogprobs, ...]:
    """int32 [N, LOGPROB_WORDS] as records with `num_top` of the likeliest tokens each."""
    floats_NW = words_NW.view(np.float32)
    first_logprob = 2 + MAX_LOGPROBS
    return tuple(
        TokenLogprobs(
            logprob=float(floats[0]),
            rank=int(words[1]),
            top_ids=tuple(words[2 : 2 + num_top].tolist()),
            top_logprobs=tuple(floats[first_logprob : first_logprob + num_top].tolist()),
        )
        for words, floats in zip(words_NW, floats_NW, strict=True)
    )


def unpack_row(
    row: PlannedRow,
    tokens_X: np.ndarray,
    logprobs_RW: np.ndarray | None,
    prompt_NW: np.ndarray | None,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
) -> RowTokens:
    """One row's news.

    Args:
      tokens_X: int32: number of tokens, is_bad, tokens.
      logprobs_RW: int32 words of each token, or None when nobody asked.
      prompt_NW: int32 words of the chunk's tokens, or None when the row did not ask.
      num_logprobs, num_prompt_logprobs: as in the request's parameters.
    """
    count = int(tokens_X[0])
    logprobs: tuple[TokenLogprobs, ...] = ()
    if num_logprobs is not None and logprobs_RW is not None:
        logprobs = unpack_logprobs(logprobs_RW[:count], num_logprobs)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    if prompt_NW is not None and num_prompt_logprobs is not None:
        # The final chunk's last position scores the first output token, which is not the prompt's.
        scored = row.num_tokens - 1 if row.samples else row.num_tokens
        prompt_logprobs = unpack_logprobs(prompt_NW[:scored], num_prompt_logprobs)
    return RowTokens(tuple(tokens_X[2 : 2 + count].tolist()), logprobs, prompt_logprobs, bool(tokens_X[1]))
