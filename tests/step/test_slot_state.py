"""What a slot remembers: admission, appending a token, and freezing at an end id, at its bound and at bad logits."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.request import SamplingParams
from jaxinfer.schedule.step_plan import Admission
from jaxinfer.step.batch import pack_admissions
from jaxinfer.step.slot_state import SlotState, admit, emit, read

SLOTS, LENGTH, VOCAB, EOS = 4, 12, 64, 2
ADMIT, EMIT = jax.jit(admit), jax.jit(emit)


def admitted(*entries: tuple[int, Sequence[int], int, dict], state: SlotState | None = None) -> SlotState:
    """Admits (slot, token ids, prompt length, parameters) with a bound of 10 tokens unless `bound` says otherwise."""
    admissions = tuple(
        Admission(
            slot=slot,
            seq_id=slot,
            token_ids=tuple(ids),
            num_prompt_tokens=num_prompt,
            max_total_tokens=params.pop("bound", 10),
            params=SamplingParams(**({"temperature": 0.0} | params)),
            seed=5,
        )
        for slot, ids, num_prompt, params in entries
    )
    packed = pack_admissions(
        admissions, 4, num_slots=SLOTS, max_model_len=LENGTH, vocab_size=VOCAB, eos_token_ids=(EOS,)
    )
    return ADMIT(state or SlotState.zeros(SLOTS, LENGTH, VOCAB), packed)


def likely(*tokens: int) -> np.ndarray:
    """Logits [B, V] whose largest entries are these tokens; the next largest is token 9."""
    logits_BV = np.zeros((len(tokens), VOCAB), np.float32)
    logits_BV[:, 9] = 1.0
    logits_BV[np.arange(len(tokens)), tokens] = 5.0
    return logits_BV


def emitted(state: SlotState, logits_BV: np.ndarray, slots: Sequence[int], emits: Sequence[bool] | None = None):
    """`emit`, padded to 3 rows so that it is compiled once; the padding is cut off again."""
    num_rows, padding = len(slots), 3 - len(slots)
    emits_B = np.array([*(emits if emits is not None else [True] * num_rows), *[False] * padding])
    logits_BV = np.concatenate([logits_BV, np.zeros((padding, VOCAB), np.float32)])
    after, choice, emitted_B = EMIT(state, logits_BV, np.array([*slots, *[SLOTS] * padding], np.int32), emits_B)
    return after, jax.tree.map(lambda a: a[:num_rows], choice), emitted_B[:num_rows]


def same(one: SlotState, other: SlotState, slots: Sequence[int]) -> bool:
    """Whether these slots are equal in every field."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a)[list(slots)], np.asarray(b)[list(slots)]) for a, b in pairs)


def test_admission_writes_its_slots_and_no_others():
    before = admitted((3, [1, 1], 2, {}))
    state = admitted((2, [7, 8, 9], 2, {}), (0, [5], 1, {"bound": 3}), state=before)
    assert state.history_SL[2].tolist() == [7, 8, 9, *[0] * 9]
    assert state.num_tokens_S.tolist() == [1, 0, 3, 2]
    assert state.num_prompt_tokens_S.tolist() == [1, 0, 2, 2]
    assert state.max_total_tokens_S.tolist() == [3, 0, 10, 10]
    assert state.is_live_S.tolist() == [True, False, True, True]
    assert same(before, state, [1, 3])


def test_a_slot_taken_over_keeps_nothing_of_its_last_sequence():
    ids = [7] * 11
    state = admitted(
        (1, ids, 5, {"logit_bias": {3: 1.0}, "stop_token_ids": [4], "repetition_penalty": 2.0, "bound": 12})
    )
    state, _, _ = emitted(state, likely(EOS), [1])
    assert not state.is_live_S[1]
    assert same(admitted((1, [5], 1, {}), state=state), admitted((1, [5], 1, {})), range(SLOTS))


def test_a_token_is_appended_to_the_rows_that_emit():
    state = admitted((2, [7, 8], 2, {}), (0, [5, 6, 7], 3, {}))
    after, choice, emitted_B = emitted(state, likely(20, 21, 22), [2, 0, SLOTS], [True, False, False])
    assert emitted_B.tolist() == [True, False, False]
    assert int(choice.token_B[0]) == 20
    assert after.history_SL[2].tolist() == [7, 8, 20, *[0] * 9]
    assert int(after.num_tokens_S[2]) == 3
    assert bool(after.is_live_S[2])
    assert same(state, after, [0, 1, 3]), "a row that does not emit, and a padding row, change nothing"


@pytest.mark.parametrize(
    ("token", "params", "lives"),
    [
        (20, {}, True),
        (EOS, {}, False),
        (EOS, {"ignore_eos": True}, True),
        (30, {"stop_token_ids": [30]}, False),
        (31, {"stop_token_ids": [30]}, True),
        (EOS, {"ignore_eos": True, "stop_token_ids": [EOS]}, False),
    ],
    ids=["ordinary", "eos", "eos ignored", "stop id", "no stop id", "eos ignored yet a stop id"],
)
def test_an_end_id_freezes_its_slot_and_is_kept(token, params, lives):
    after, _, emitted_B = emitted(admitted((1, [5, 6], 2, params)), likely(token), [1])
    assert emitted_B.tolist() == [True]
    assert after.history_SL[1, 2] == token
    assert bool(after.is_live_S[1]) == lives


@pytest.mark.parametrize(("bound", "lives"), [(4, True), (3, False)])
def test_a_slot_freezes_at_its_bound(bound, lives):
    after, _, _ = emitted(admitted((1, [5, 6], 2, {"bound": bound})), likely(20), [1])
    assert int(after.num_tokens_S[1]) == 3
    assert bool(after.is_live_S[1]) == lives


def test_the_last_position_of_the_history_is_written():
    state = admitted((1, [5] * (LENGTH - 1), 5, {"bound": LENGTH}))
    after, _, _ = emitted(state, likely(20), [1])
    assert after.history_SL[1].tolist() == [5] * (LENGTH - 1) + [20]
    assert not after.is_live_S[1]


def test_an_end_id_is_banned_before_min_tokens():
    state = admitted((1, [5, 6], 2, {"min_tokens": 2}))
    tokens = []
    for _ in range(3):
        state, choice, _ = emitted(state, likely(EOS), [1])
        tokens.append(int(choice.token_B[0]))
    assert tokens == [9, 9, EOS]
    assert not state.is_live_S[1]


def test_min_tokens_counts_outputs_across_a_readmission():
    """A preempted sequence comes back with its outputs: two of three are there."""
    state = admitted((1, [5, 6, 9, 9], 2, {"min_tokens": 3}))
    state, choice, _ = emitted(state, likely(EOS), [1])
    assert int(choice.token_B[0]) == 9
    state, choice, _ = emitted(state, likely(EOS), [1])
    assert int(choice.token_B[0]) == EOS


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_bad_logits_freeze_that_slot_alone_and_append_nothing(value):
    state = admitted((0, [5, 6], 2, {}), (1, [5, 6], 2, {}))
    logits_BV = likely(20, 21)
    logits_BV[0, 3] = value
    after, choice, emitted_B = emitted(state, logits_BV, [0, 1])
    assert emitted_B.tolist() == [False, True]
    assert choice.is_bad_B.tolist() == [True, False]
    assert after.is_live_S.tolist() == [False, True, False, False]
    assert int(after.num_tokens_S[0]) == 2
    assert np.array_equal(after.history_SL[0], state.history_SL[0])
    assert np.array_equal(after.counts_SV[0], state.counts_SV[0])


def test_bad_logits_of_a_row_that_does_not_emit_mean_nothing():
    state = admitted((0, [5, 6], 2, {}))
    after, _, _ = emitted(state, np.full((2, VOCAB), np.nan, np.float32), [0, SLOTS], [False, False])
    assert same(state, after, range(SLOTS))


def test_counts_are_those_of_the_history():
    """Appending one at a time equals admitting the whole: a readmitted sequence is penalised alike."""
    params = {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    state = admitted((1, [5, 6, 5], 3, dict(params)))
    for token in (20, 21, 20):
        # Far ahead, so that penalties do not change the choice.
        state, choice, _ = emitted(state, likely(token) * 100, [1])
        assert int(choice.token_B[0]) == token
    assert same(state, admitted((1, [5, 6, 5, 20, 21, 20], 3, dict(params))), [1])


def test_zeros_share_no_buffer_so_that_all_can_be_donated():
    leaves = jax.tree.leaves(SlotState.zeros(SLOTS, LENGTH, VOCAB))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_reading_clips_padding_rows():
    got = read(jnp.arange(SLOTS, dtype=jnp.int32), jnp.array([1, SLOTS], jnp.int32))
    assert got.tolist() == [1, SLOTS - 1]
