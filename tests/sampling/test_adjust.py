"""Bias, masks and penalties against the float64 reference; float32 sums and products agree to 1e-5 relative."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import slots_of
from sampling_reference import Case, adjusted

from jaxinfer.sampling import NO_TOKEN, TAIL_TOKENS, adjust_logits, push_tail, tail_from_history

VOCAB = 70
adjust_jit = jax.jit(adjust_logits)


def adjust_cases(logits_BV, cases, is_live=None, draft=None):
    num = len(cases)
    slot_params, counts, tail, output_pos = slots_of(cases, logits_BV.shape[1], [0] * num)
    live = jnp.ones((num,), bool) if is_live is None else jnp.asarray(is_live)
    slot_ids = jnp.arange(num, dtype=jnp.int32)
    args = jnp.asarray(logits_BV), slot_params, slot_ids, counts, tail, output_pos, live
    return np.asarray(adjust_jit(*args, *(draft or ())))


def logits_of(num, seed=0, vocab=VOCAB):
    return (np.random.default_rng(seed).normal(size=(num, vocab)) * 3).astype(np.float32)


def check(logits_BV, cases):
    got = adjust_cases(logits_BV, cases)
    expected = np.stack([adjusted(x, case) for x, case in zip(logits_BV, cases, strict=True)])
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


CASES = [
    Case({"temperature": 0.0}),
    Case({"logit_bias": {0: 1.5, VOCAB - 1: -100.0, 33: 100.0}}),
    Case({"allowed_token_ids": [0, 31, 32, 33, 63, 64, VOCAB - 1]}),
    Case({"allowed_token_ids": [40]}),
    Case({"min_tokens": 3, "stop_token_ids": [9]}, output=(1, 2), eos=(4, 5)),
    Case({"min_tokens": 2, "stop_token_ids": [9]}, output=(1, 2), eos=(4, 5)),
    Case({"min_tokens": 3, "stop_token_ids": [9], "ignore_eos": True}, eos=(4, 5)),
    Case({"repetition_penalty": 1.7}, prompt=(3, 3, 60), output=(8, 3)),
    Case({"presence_penalty": 0.7, "frequency_penalty": 0.4}, prompt=(3, 3, 60), output=(8, 8, 8, 3)),
    Case({"presence_penalty": -2.0, "frequency_penalty": -1.0, "repetition_penalty": 0.5}, (1,), (8, 8, 2)),
    Case({}, output=(5, 6), bad_words=((7,), (6, 8), (5, 6, 9), (6, 5, 10), (1, 5, 6, 11))),
    Case({}, prompt=(5, 6), bad_words=((6, 8), (7, 7))),
    Case({}, output=tuple(range(20, 32)), bad_words=(tuple(range(25, 33)), (*range(25, 31), 34))),
    Case({"logit_bias": {8: 3.0}, "repetition_penalty": 1.4, "frequency_penalty": 0.3}, (2,), (8, 9)),
]


def test_every_kind_matches_the_reference_beside_all_the_others():
    check(logits_of(len(CASES)), CASES)


@pytest.mark.parametrize("i", range(len(CASES)))
def test_every_kind_matches_the_reference_alone(i):
    check(logits_of(1, seed=i), [CASES[i]])


def test_random_combinations_match_the_reference():
    rng = np.random.default_rng(1)
    cases = []
    for _ in range(40):
        a, b = (CASES[i] for i in rng.choice(len(CASES), 2, replace=False))
        cases.append(Case({**a.params, **b.params}, a.prompt, b.output, (4, 5), a.bad_words + b.bad_words))
    check(logits_of(40, seed=2), cases)


def test_rows_that_use_nothing_come_back_bit_for_bit():
    logits = logits_of(len(CASES))
    logits[0, :3] = 3.4028235e38, -3.4028235e38, -0.0
    assert adjust_cases(logits, CASES)[0].tobytes() == logits[0].tobytes()


def test_rows_that_are_not_live_switch_nothing_on():
    logits = logits_of(2)
    got = adjust_cases(logits, [CASES[1], CASES[0]], is_live=[False, True])
    np.testing.assert_array_equal(got, logits)


def test_r075_each_penalty_counts_its_own_tokens():
    """R075: at step 1 repetition changes the prompt's token, presence and frequency do not; once generated they do."""
    logits, paris = np.ones((6, VOCAB), np.float32), 12
    names = "repetition_penalty", "presence_penalty", "frequency_penalty"
    cases = [Case({n: 2.0}, (paris,) * 3, out) for out in ((), (paris, paris)) for n in names]
    got = adjust_cases(logits, cases)
    assert got[:, paris].tolist() == [0.5, 1.0, 1.0, 0.5, -1.0, -3.0]
    assert (np.delete(got, paris, axis=1) == 1.0).all()


def test_a_tiny_repetition_penalty_stays_finite():
    got = adjust_cases(logits_of(1), [Case({"repetition_penalty": 1e-300}, tuple(range(60)))])
    assert np.isfinite(got).all()


@pytest.mark.parametrize(
    "case",
    [
        Case({"allowed_token_ids": [5]}, bad_words=((5,),)),
        Case({"allowed_token_ids": [5, 6], "min_tokens": 4}, eos=(5, 6)),
        Case({"allowed_token_ids": [5, 6], "min_tokens": 4}, eos=(5,), bad_words=((6,),)),
    ],
)
def test_bans_give_way_when_they_leave_nothing_and_the_allowed_list_never_does(case):
    got = adjust_cases(logits_of(1), [case])
    assert np.flatnonzero(np.isfinite(got[0])).tolist() == case.params["allowed_token_ids"]


def test_drafted_tokens_count_as_output():
    logits, output, draft = logits_of(1), (8, 8), (8, 9, 30)
    params = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    for num in range(4):
        arrays = jnp.asarray([draft], jnp.int32), jnp.asarray([num], jnp.int32)
        got = adjust_cases(logits, [Case(params, (1,), output)], draft=arrays)
        expected = adjusted(logits[0], Case(params, (1,), output + draft[:num]))
        np.testing.assert_allclose(got[0], expected, rtol=1e-5, atol=1e-5)


def test_the_tail_of_a_history_equals_the_tail_pushed_token_by_token():
    history = np.arange(100, 130, dtype=np.int32)
    for num_output in (0, 1, TAIL_TOKENS, TAIL_TOKENS + 4):
        whole = tail_from_history(jnp.asarray(history), jnp.int32(3), jnp.int32(3 + num_output))
        tail = jnp.full((2, TAIL_TOKENS), NO_TOKEN, jnp.int32)
        for token in history[3 : 3 + num_output]:
            tail = push_tail(tail, jnp.full((2,), token, jnp.int32), jnp.asarray([True, False]))
        np.testing.assert_array_equal(tail[0], whole)
        assert (np.asarray(tail[1]) == NO_TOKEN).all()


def test_mutants_of_the_reference_disagree():
    """The comparison notices a shifted bias, an unbanned end id, and a bad word matched on its prompt."""
    logits = logits_of(1)
    for right, wrong in (
        (CASES[1], Case({"logit_bias": {1: 1.5, VOCAB - 1: -100.0, 33: 100.0}})),
        (CASES[4], Case(CASES[4].params, output=(1, 2, 3), eos=(4, 5))),
        (CASES[11], Case({}, output=(5, 6), bad_words=CASES[11].bad_words)),
    ):
        assert not np.allclose(adjust_cases(logits, [right])[0], adjusted(logits[0], wrong), rtol=1e-5, atol=1e-5)
