"""The whole choice: greedy, mixed batches, seeds, guard, log probabilities, and no recompile."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import MAX_BIAS, choose_cases, choose_jit, slots_of
from sampling_reference import Case, adjusted

from jaxinfer.sampling import SlotParams, choose, count_tokens

VOCAB = 300
GREEDY = Case({"temperature": 0.0})
WARM = Case({"temperature": 0.8})
MIX = [
    GREEDY,
    WARM,
    Case({"temperature": 1.0, "top_k": 20, "top_p": 0.9}),
    Case({"temperature": 0.0, "logit_bias": {7: -100.0}, "repetition_penalty": 1.3}, (7, 8), (9,)),
    Case({"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.5}, (7,), (9, 9)),
    Case({"temperature": 0.0, "logprobs": 5}),
    Case({"temperature": 1.2, "allowed_token_ids": list(range(10, 40)), "logprobs": 0}),
]


def logits_of(num, seed=0, vocab=VOCAB):
    return (np.random.default_rng(seed).normal(size=(num, vocab)) * 3).astype(np.float32)


def tokens_of(logits, cases, seeds, slot_order=None, num_rows=8):
    return choose_cases(logits, cases, seeds, slot_order, num_rows).token_B.tolist()


def test_greedy_rows_take_the_argmax_of_the_adjusted_logits_in_any_mix():
    logits = logits_of(len(MIX))
    tokens = tokens_of(logits, MIX, range(len(MIX)))
    for i, case in enumerate(MIX):
        if case.params["temperature"] == 0.0:
            assert tokens[i] == int(np.argmax(adjusted(logits[i], case)))


def test_equal_maxima_give_the_lowest_id():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[1, [130, 140, 299]] = 2.0
    assert tokens_of(logits, [GREEDY, GREEDY], [1, 2]) == [0, 130]


def test_r067_masked_greedy_rows_beside_sampled_rows():
    """R067: greedy with -100 biases and -inf masks next to temperature-1 rows: right token, nothing out of range."""
    logits = logits_of(3)
    best = np.argsort(logits, axis=1)[:, ::-1]
    cases = [
        Case({"temperature": 0.0, "logit_bias": {int(t): -100.0 for t in best[0, :3]}}),
        Case({"temperature": 0.0, "allowed_token_ids": [int(best[1, 50]), int(best[1, 60])]}),
        Case({"temperature": 1.0, "allowed_token_ids": [3, 4, 5], "logprobs": 1}),
    ]
    out = choose_cases(logits, cases, [0, 1, 2])
    assert np.asarray(out.token_B)[:2].tolist() == [best[0, 3], best[1, 50]]
    assert int(out.token_B[2]) in {3, 4, 5}
    assert np.isfinite(np.asarray(out.logprob_B)).all()
    assert np.isfinite(np.asarray(out.top_logprobs_BK)).all()


@pytest.mark.parametrize("params", [{"top_k": 1}, {"temperature": 1e-6}, {"temperature": 5.0, "top_k": 1}])
def test_r079_top_k_1_and_vanishing_temperatures_are_greedy(params):
    logits = logits_of(4)
    assert tokens_of(logits, [Case(params)] * 4, range(4)) == logits.argmax(axis=1).tolist()


def test_r079_top_k_off_values_draw_the_same_token():
    """R079: -1, 0, V, V + 1 and 2**31 - 1 are all off."""
    cases = [Case({"temperature": 1.0, "top_k": k}) for k in (-1, 0, VOCAB, VOCAB + 1, 2**31 - 1)]
    assert len(set(tokens_of(np.tile(logits_of(1), (5, 1)), cases, [3] * 5))) == 1


def test_r069_r073_a_seeded_draw_does_not_depend_on_batch_slot_or_neighbours():
    """R069: alone or beside others. R073: equal seeds and prompts give equal tokens, whatever the slots."""
    row = logits_of(1, seed=9)
    for case in (WARM, MIX[2], MIX[4], MIX[6]):
        for seed in (7, 42, 2**40 + 5):
            alone = tokens_of(row, [case], [seed], num_rows=1)
            noise = logits_of(6, seed=seed % 1000)
            batch = np.concatenate([noise[:3], row, noise[3:], row])
            cases = [MIX[0], MIX[2], MIX[1], case, MIX[3], MIX[5], MIX[6], case]
            seeds = [1, 2, 3, seed, 4, 5, 6, seed]
            for order in (range(8), (7, 3, 1, 0, 2, 4, 6, 5)):
                tokens = tokens_of(batch, cases, seeds, order)
                assert [tokens[3]] == alone
                assert tokens[7] == tokens[3]


def test_different_seeds_and_positions_differ():
    """300 near-equal tokens, 20 draws: all equal with probability below 1e-40."""
    flat = np.tile(logits_of(1) * np.float32(0.01), (20, 1))
    assert len(set(tokens_of(flat, [WARM] * 20, range(20), num_rows=20))) > 10
    at = [Case({"temperature": 1.0}, output=(1,) * n) for n in range(20)]
    assert len(set(tokens_of(flat, at, [5] * 20, num_rows=20))) > 10


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_logits_flag_that_row_and_leave_neighbours_bit_identical(value):
    """F13, for logits."""
    logits = logits_of(len(MIX))
    clean = choose_cases(logits, MIX, range(len(MIX)))
    for bad in range(len(MIX)):
        for at in (0, 127, 128, VOCAB - 1):
            dirty = logits.copy()
            dirty[bad, at] = value
            out = choose_cases(dirty, MIX, range(len(MIX)))
            assert np.flatnonzero(np.asarray(out.is_bad_B)).tolist() == [bad]
            assert 0 <= int(out.token_B[bad]) < VOCAB
            # A bad row switches nothing on, so the others' shared log probabilities may be skipped when it alone asked.
            np.testing.assert_array_equal(np.delete(out.token_B, bad), np.delete(clean.token_B, bad))
            for i in (5, 6):
                if i != bad:
                    assert float(out.logprob_B[i]) == float(clean.logprob_B[i])
    assert not np.asarray(clean.is_bad_B).any()


def test_logprobs_are_zero_when_nobody_asks_and_raw_when_somebody_does():
    """R082: log_softmax of the raw logits under every temperature, top_k and bias."""
    logits = np.tile(logits_of(1), (4, 1))
    quiet = choose_cases(logits, [GREEDY, WARM, GREEDY, WARM], range(4))
    assert not np.asarray(quiet.logprob_B).any()
    assert not np.asarray(quiet.top_ids_BK).any()
    params = [{"temperature": t, "top_k": k, "logprobs": 3} for t, k in ((0.5, 0), (1.0, 1), (2.0, 1), (2.0, 40))]
    params[0]["logit_bias"] = {4: 30.0}
    out = choose_cases(logits, [Case(p) for p in params], range(4))
    x = logits[0].astype(np.float64)
    expected = x - np.log(np.exp(x - x.max()).sum()) - x.max()
    order = np.argsort(-x, kind="stable")
    for i, token in enumerate(np.asarray(out.token_B)):
        assert float(out.logprob_B[i]) == pytest.approx(expected[token], rel=1e-5)
        assert int(out.rank_B[i]) == 1 + int((x > x[token]).sum())
        assert np.asarray(out.top_ids_BK)[i].tolist() == order[:20].tolist()
        np.testing.assert_allclose(out.top_logprobs_BK[i], expected[order[:20]], rtol=1e-5)


def test_logprobs_0_reports_the_chosen_token_alone():
    out = choose_cases(logits_of(1), [Case({"temperature": 0.0, "logprobs": 0})], [0])
    assert float(out.logprob_B[0]) < 0
    assert int(out.rank_B[0]) == 1
    assert not np.asarray(out.top_ids_BK).any()


def test_rows_that_are_not_live_switch_nothing_on():
    slot_params, counts, tail, pos = slots_of([WARM, Case({"logprobs": 2})], VOCAB, [0, 1])
    logits = jnp.asarray(logits_of(2))
    out = choose_jit(logits, slot_params, jnp.arange(2, dtype=jnp.int32), counts, tail, pos, jnp.zeros((2,), bool))
    np.testing.assert_array_equal(out.token_B, np.argmax(logits, axis=1))
    assert not np.asarray(out.logprob_B).any()


def test_nothing_is_traced_again_whatever_the_parameters():
    """F15, for sampling."""
    fresh = jax.jit(lambda *args: choose(*args))
    logits, ids = jnp.asarray(logits_of(2)), jnp.arange(2, dtype=jnp.int32)
    for case in MIX:
        slot_params, counts, tail, pos = slots_of([case, GREEDY], VOCAB, [1, 2])
        fresh(logits, slot_params, ids, counts, tail, pos, jnp.ones((2,), bool))
    assert fresh._cache_size() == 1


def test_penalties_act_inside_a_while_loop_that_counts():
    """With a frequency penalty of 1 and logits 2, 1.5, 1 the greedy answers rotate as a plain loop says."""
    row = np.full(VOCAB, -50.0, np.float32)
    row[[10, 20, 30]] = 2.0, 1.5, 1.0
    slot_params, counts, tail, _ = slots_of([Case({"temperature": 0.0, "frequency_penalty": 1.0})], VOCAB, [0])
    live, ids = jnp.ones((1,), bool), jnp.zeros((1,), jnp.int32)

    def body(state):
        step, counts, out = state
        choice = choose(jnp.asarray(row)[None, :], slot_params, ids, counts, tail, step[None], live)
        return step + 1, count_tokens(counts, ids, choice.token_B, live), out.at[step].set(choice.token_B[0])

    run = jax.jit(lambda c: jax.lax.while_loop(lambda s: s[0] < 9, body, (jnp.int32(0), c, jnp.zeros(9, jnp.int32))))
    got = np.asarray(run(counts)[2]).tolist()
    x, expected = row.astype(np.float64), []
    for _ in range(9):
        expected.append(int(np.argmax(x)))
        x[expected[-1]] -= 1
    assert got == expected
    assert len(set(got)) == 3


def test_a_fresh_slot_is_greedy_and_never_ends():
    slot_params = SlotParams.zeros(2, VOCAB, MAX_BIAS)
    _, counts, tail, pos = slots_of([GREEDY, GREEDY], VOCAB, [0, 0])
    logits = jnp.asarray(logits_of(2))
    out = choose_jit(logits, slot_params, jnp.arange(2, dtype=jnp.int32), counts, tail, pos, jnp.ones((2,), bool))
    np.testing.assert_array_equal(out.token_B, np.argmax(logits, axis=1))
