"""Packing, writing and reading back the parameters of slots."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.request import MAX_BAD_WORD_TOKENS, SamplingParams
from jaxinfer.sampling import (
    NO_TOKEN,
    SlotParams,
    gather_rows,
    is_end,
    pack_row,
    packed_row_size,
    write_row,
    write_rows,
)

VOCAB = 70


def pack(seed=0, eos=(2,), bad_words=(), **params):
    row = pack_row(
        SamplingParams(max_tokens=None, **params),
        seed=seed,
        vocab_size=VOCAB,
        eos_token_ids=eos,
        bad_word_ids=bad_words,
    )
    assert row.shape == (packed_row_size(VOCAB),)
    assert row.dtype == np.int32
    return row


def slot_with(row, slot=1, num_slots=3):
    return write_row(SlotParams.zeros(num_slots, VOCAB), jnp.int32(slot), jnp.asarray(row))


FIELDS = {
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.25,
    "presence_penalty": -1.5,
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.25,
    "min_tokens": 9,
}


def test_every_field_arrives_in_its_slot_and_no_other():
    params = dict(
        FIELDS, logit_bias={3: 1.5, 69: -100.0}, allowed_token_ids=[0, 31, 32, 69], stop_token_ids=[8, 2], logprobs=4
    )
    slots = slot_with(pack(seed=(5 << 32) | 7, eos=(2, 4), bad_words=((9,), (1, 2, 3)), **params))
    row = jax.tree.map(lambda x: np.asarray(x[1]), slots.row)
    for name, value in FIELDS.items():
        assert getattr(row, name) == np.asarray(value, getattr(row, name).dtype)
    assert row.seed_words.tolist() == [5, 7]
    assert (row.num_bias, row.num_bad_words, row.has_allowed, row.has_logprobs, row.num_logprobs) == (
        2,
        2,
        True,
        True,
        4,
    )
    assert np.asarray(slots.end_ids)[1, :4].tolist() == [2, 4, 8, NO_TOKEN]
    assert np.asarray(slots.bias_ids)[1, :3].tolist() == [3, 69, NO_TOKEN]
    assert np.asarray(slots.bias_values)[1, :3].tolist() == [1.5, -100.0, 0.0]
    assert [int(b) for b in np.asarray(slots.allowed_bits)[1]] == [1 | 1 << 31, 1, 1 << 5]
    pad = [NO_TOKEN] * MAX_BAD_WORD_TOKENS
    assert np.asarray(slots.bad_words)[1, :3].tolist() == [[*pad[1:], 9], [*pad[3:], 1, 2, 3], pad]
    fresh = SlotParams.zeros(3, VOCAB)
    for new, old in zip(jax.tree.leaves(slots), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(new[jnp.asarray([0, 2])], old[jnp.asarray([0, 2])])
        assert new.dtype == old.dtype


@pytest.mark.parametrize(
    ("top_k", "stored"), [(-1, 0), (0, 0), (2, 2), (VOCAB - 1, VOCAB - 1), (VOCAB, 0), (2**31 - 1, 0)]
)
def test_r079_top_k_is_off_outside_2_to_v(top_k, stored):
    """R079. 1 is stored as greedy."""
    row = slot_with(pack(top_k=top_k)).row
    assert (int(row.top_k[1]), float(row.temperature[1])) == (stored, 1.0)
    assert float(slot_with(pack(top_k=1)).row.temperature[1]) == 0.0


def test_a_slot_past_the_end_is_dropped_and_rows_are_overwritten_whole():
    row = pack(logit_bias=dict.fromkeys(range(60), 1.0), bad_words=((1, 2),), allowed_token_ids=[1])
    fresh = SlotParams.zeros(3, VOCAB)
    for got in (
        slot_with(row, slot=3),
        write_row(slot_with(row), jnp.int32(1), jnp.asarray(pack(temperature=0.0, eos=()))),
    ):
        for new, old in zip(jax.tree.leaves(got), jax.tree.leaves(fresh), strict=True):
            np.testing.assert_array_equal(new, old)
    both = write_rows(fresh, jnp.asarray([2, 0], jnp.int32), jnp.asarray(np.stack([pack(top_k=4), pack(top_k=6)])))
    assert np.asarray(gather_rows(both, jnp.asarray([2, 1, 0, 0], jnp.int32)).top_k).tolist() == [4, 0, 6, 6]


def test_ends_are_the_eos_unless_ignored_and_the_stop_ids():
    slots = SlotParams.zeros(2, VOCAB)
    rows = np.stack([pack(eos=(2, 3), stop_token_ids=[9]), pack(eos=(2, 3), stop_token_ids=[9], ignore_eos=True)])
    slots = write_rows(slots, jnp.arange(2, dtype=jnp.int32), jnp.asarray(rows))
    ids = jnp.asarray([0] * 4 + [1] * 4, jnp.int32)
    got = is_end(jnp.asarray([2, 3, 9, 5] * 2, jnp.int32), slots, ids)
    assert np.asarray(got).tolist() == [True, True, True, False, False, False, True, False]


def test_writing_is_in_place_when_donated():
    slots = SlotParams.zeros(4, VOCAB)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(slots)]
    write = jax.jit(write_row, donate_argnums=0)
    after = write(slots, jnp.int32(2), jnp.asarray(pack(**FIELDS)))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == before


def test_extremes_survive_float32():
    row = slot_with(pack(temperature=1e-300, top_p=1e-300, repetition_penalty=1e-300)).row
    assert float(row.temperature[1]) == 0.0
    assert float(row.repetition_penalty[1]) > 0.0
    assert slot_with(pack(seed=2**63 - 1)).row.seed_words[1].tolist() == [2**31 - 1, 2**32 - 1]
