"""Choosing tokens on the device: pure functions of arrays, every parameter an array with one row per slot.

    choose(logits_BV, slot_params, slot_ids_B, counts_SV, tail_BW, output_pos_B, is_live_B) -> Choice

Its pieces are exported for the verification of drafts: `adjust_logits`, `sampling_weights`, `row_keys`, `draw`.
"""

from jaxinfer.sampling.adjust import TAIL_TOKENS, adjust_logits, adjusts, push_tail, tail_from_history
from jaxinfer.sampling.check_params import check_against_vocabulary
from jaxinfer.sampling.choose import Choice, choose
from jaxinfer.sampling.draw import draw, row_keys
from jaxinfer.sampling.filters import sampling_weights
from jaxinfer.sampling.logprobs import token_logprobs, top_logprobs
from jaxinfer.sampling.nan_guard import is_bad_rows
from jaxinfer.sampling.params_batch import (
    MAX_END_IDS,
    MAX_EOS_IDS,
    NO_TOKEN,
    RowParams,
    SlotParams,
    gather_rows,
    is_end,
    pack_row,
    packed_row_size,
    write_row,
    write_rows,
)
from jaxinfer.sampling.penalties import IN_PROMPT, count_tokens, row_from_history
from jaxinfer.sampling.rows import argmax_rows, top_k_rows

__all__ = [
    "IN_PROMPT",
    "MAX_END_IDS",
    "MAX_EOS_IDS",
    "NO_TOKEN",
    "TAIL_TOKENS",
    "Choice",
    "RowParams",
    "SlotParams",
    "adjust_logits",
    "adjusts",
    "argmax_rows",
    "check_against_vocabulary",
    "choose",
    "count_tokens",
    "draw",
    "gather_rows",
    "is_bad_rows",
    "is_end",
    "pack_row",
    "packed_row_size",
    "push_tail",
    "row_from_history",
    "row_keys",
    "sampling_weights",
    "tail_from_history",
    "token_logprobs",
    "top_k_rows",
    "top_logprobs",
    "write_row",
    "write_rows",
]
