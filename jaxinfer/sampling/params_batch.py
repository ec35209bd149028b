"""Sampling parameters as arrays, one row per slot: no parameter is ever static, so no request causes a recompile.

    SamplingParams --pack_row (numpy)--> int32 [X] --one copy--> write_row --> SlotParams on the device

A packed row is one int32 vector (floats by their bits), so that an admission uploads one array. `NO_TOKEN` fills unused
entries of every list of ids: it equals no token, and as a scatter index it is out of range and dropped.

Axes: S slots of the engine, B rows of the step (row b belongs to slot `slot_ids_B[b]`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.request import (
    INT32_MAX,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)

NO_TOKEN = INT32_MAX
MAX_EOS_IDS = 8
MAX_END_IDS = MAX_EOS_IDS + MAX_STOP_TOKEN_IDS
MIN_TEMPERATURE = 1e-5  # below it, as in vLLM, a row is greedy
_MIN_PENALTY = 1e-30  # keeps the float32 of a repetition penalty above 0


class RowParams(NamedTuple):
    """The fields that are one number per row; leading axis [S] in the slots, [B] when gathered for a step.

    Attributes:
      temperature: float32; 0 means greedy (also written for top_k = 1, which is the same choice).
      top_k: int32; 0 is off, else in [2, V).
      top_p, min_p: float32; 1 and 0 are off.
      presence_penalty, frequency_penalty, repetition_penalty: float32; 0, 0 and 1 are off.
      min_tokens: int32; end ids are banned before this output position.
      seed_words: uint32 [., 2]: high and low half of the seed.
      num_bias, num_bad_words: int32; used entries of the lists in `SlotParams`.
      has_allowed, has_logprobs: bool.
      num_logprobs: int32; how many top tokens are wanted, 0 also when `has_logprobs` is False.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    presence_penalty: jax.Array
    frequency_penalty: jax.Array
    repetition_penalty: jax.Array
    min_tokens: jax.Array
    seed_words: jax.Array
    num_bias: jax.Array
    num_bad_words: jax.Array
    has_allowed: jax.Array
    has_logprobs: jax.Array
    num_logprobs: jax.Array


class SlotParams(NamedTuple):
    """All sampling parameters of all slots. The lists are read only when some row of the step uses them.

    Attributes:
      row: numbers, leading axis [S].
      end_ids: int32 [S, MAX_END_IDS]; end-of-sequence ids unless ignored, then stop ids, then NO_TOKEN.
      bias_ids, bias_values: int32, float32 [S, max_logit_bias].
      allowed_bits: uint32 [S, ceil(V / 32)]; bit v % 32 of word v // 32 says that v is allowed. All zero when unused.
      bad_words: int32 [S, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS], right-aligned, NO_TOKEN in front and in unused words.
    """

    row: RowParams
    end_ids: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    allowed_bits: jax.Array
    bad_words: jax.Array

    @classmethod
    def zeros(cls, num_slots: int, vocab_size: int, max_logit_bias: int = MAX_LOGIT_BIAS) -> "SlotParams":
        """Every slot greedy, with nothing else switched on."""
        row = pack_row(
            SamplingParams(temperature=0.0),
            seed=0,
            vocab_size=vocab_size,
            eos_token_ids=(),
            max_logit_bias=max_logit_bias,
        )
        fields = _unpack(jnp.asarray(row)[None, :], vocab_size, max_logit_bias)
        return jax.tree.map(lambda x: jnp.repeat(x, num_slots, axis=0), fields)

    @property
    def vocab_words(self) -> int:
        return self.allowed_bits.shape[-1]


def _layout(vocab_words: int, max_logit_bias: int) -> list[tuple[str, type, tuple[int, ...]]]:
    """(field, dtype, shape of one row) in the order of the packed vector; `RowParams` fields first."""
    numbers: dict[str, tuple[type, tuple[int, ...]]] = {
        "top_k": (np.int32, ()),
        "min_tokens": (np.int32, ()),
        "seed_words": (np.uint32, (2,)),
        "num_bias": (np.int32, ()),
        "num_bad_words": (np.int32, ()),
        "has_allowed": (np.bool_, ()),
        "has_logprobs": (np.bool_, ()),
        "num_logprobs": (np.int32, ()),
    }
    return [(name, *numbers.get(name, (np.float32, ()))) for name in RowParams._fields] + [
        ("end_ids", np.int32, (MAX_END_IDS,)),
        ("bias_ids", np.int32, (max_logit_bias,)),
        ("bias_values", np.float32, (max_logit_bias,)),
        ("allowed_bits", np.uint32, (vocab_words,)),
        ("bad_words", np.int32, (MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)),
    ]


def packed_row_size(vocab_size: int, max_logit_bias: int = MAX_LOGIT_BIAS) -> int:
    """Length X of a packed row, in int32 words."""
    return sum(int(np.prod(shape)) for _, _, shape in _layout(-(-vocab_size // 32), max_logit_bias))


def pack_row(
    params: SamplingParams,
    *,
    seed: int,
    vocab_size: int,
    eos_token_ids: Sequence[int],
    bad_word_ids: Sequence[Sequence[int]] = (),
    max_logit_bias: int = MAX_LOGIT_BIAS,
) -> np.ndarray:
    """One request's parameters as int32 [packed_row_size]. Host side, numpy only; a fresh array on every call.

    Args:
      params: already past `check_against_vocabulary`.
      seed: in [0, 2**63), of this sequence (choices of one request have different ones).
      eos_token_ids: of the model; at most MAX_EOS_IDS.
      bad_word_ids: `params.bad_words` as token sequences.
    """
    assert len(eos_token_ids) <= MAX_EOS_IDS
    assert len(bad_word_ids) <= MAX_BAD_WORDS
    bias = params.logit_bias or {}
    assert len(bias) <= max_logit_bias
    is_greedy = params.temperature < MIN_TEMPERATURE or params.top_k == 1
    end_ids = [] if params.ignore_eos else list(eos_token_ids)
    end_ids += [i for i in params.stop_token_ids if i not in end_ids]
    bad_words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), NO_TOKEN, np.int32)
    for word, ids in zip(bad_words, bad_word_ids, strict=False):
        word[MAX_BAD_WORD_TOKENS - len(ids) :] = ids
    values = {
        "temperature": 0.0 if is_greedy else params.temperature,
        "top_k": params.top_k if 0 < params.top_k < vocab_size else 0,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": max(params.repetition_penalty, _MIN_PENALTY),
        "min_tokens": params.min_tokens,
        "seed_words": (seed >> 32, seed & 0xFFFFFFFF),
        "num_bias": len(bias),
        "num_bad_words": len(bad_word_ids),
        "has_allowed": params.allowed_token_ids is not None,
        "has_logprobs": params.logprobs is not None,
        "num_logprobs": params.logprobs or 0,
        "end_ids": end_ids + [NO_TOKEN] * (MAX_END_IDS - len(end_ids)),
        "bias_ids": list(bias) + [NO_TOKEN] * (max_logit_bias - len(bias)),
        "bias_values": list(bias.values()) + [0.0] * (max_logit_bias - len(bias)),
        "allowed_bits": _bits(params.allowed_token_ids or (), vocab_size),
        "bad_words": bad_words,
    }
    parts = []
    for name, dtype, shape in _layout(-(-vocab_size // 32), max_logit_bias):
        part = np.asarray(values[name], dtype=np.int32 if dtype is np.bool_ else dtype).reshape(-1)
        assert part.size == int(np.prod(shape)), name
        parts.append(part.view(np.int32))
    return np.concatenate(parts)


def _bits(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    flags = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


def _unpack(packed_AX: jax.Array, vocab_size: int, max_logit_bias: int) -> SlotParams:
    """The fields of packed rows, each with leading axis A; the inverse of `pack_row`."""
    out: dict[str, jax.Array] = {}
    start = 0
    for name, dtype, shape in _layout(-(-vocab_size // 32), max_logit_bias):
        size = int(np.prod(shape))
        part = packed_AX[:, start : start + size].reshape(packed_AX.shape[0], *shape)
        out[name] = part != 0 if dtype is np.bool_ else lax.bitcast_convert_type(part, dtype)
        start += size
    assert start == packed_AX.shape[1], f"a packed row has {start} words, not {packed_AX.shape[1]}"
    numbers = {name: out.pop(name) for name in RowParams._fields}
    return SlotParams(row=RowParams(**numbers), **out)


def write_rows(slot_params: SlotParams, slots_A: jax.Array, packed_AX: jax.Array) -> SlotParams:
    """Overwrites the slots named in `slots_A` (int32, distinct; an entry >= S is dropped) with packed rows.

    In place when the caller donates `slot_params`.
    """
    rows = _unpack(packed_AX, slot_params.vocab_words * 32, slot_params.bias_ids.shape[-1])
    return jax.tree.map(lambda old, new: old.at[slots_A].set(new, mode="drop"), slot_params, rows)


def write_row(slot_params: SlotParams, slot: jax.Array, packed_X: jax.Array) -> SlotParams:
    """`write_rows` for one slot, an int32 scalar; nothing is written when it is >= S."""
    return write_rows(slot_params, jnp.asarray(slot, jnp.int32)[None], packed_X[None])


def gather_rows(slot_params: SlotParams, slot_ids_B: jax.Array) -> RowParams:
    """The numbers of the step's rows, leading axis [B]. The lists stay where they are until some row needs them."""
    return jax.tree.map(lambda x: x.at[slot_ids_B].get(mode="clip"), slot_params.row)


def is_end(token_B: jax.Array, slot_params: SlotParams, slot_ids_B: jax.Array) -> jax.Array:
    """bool [B]: the token ends its sequence: an end-of-sequence id that is not ignored, or a stop id."""
    end_ids_BE = slot_params.end_ids.at[slot_ids_B].get(mode="clip")
    return jnp.any(end_ids_BE == token_B[:, None], axis=1)
