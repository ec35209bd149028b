"""Which tokens survive temperature, min_p, top_k and top_p, against full sorts in float64.

Both searches are covered: over the whole row (V = 200), and over the blocks with the largest maxima (V = 8320).
Kept sets must be equal; weights agree to 1e-5, the error of a float32 exp of a float32 difference.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sampling_cases import slots_of
from sampling_reference import Case, filtered, keep_top_k, keep_top_p

from jaxinfer.sampling import gather_rows, sampling_weights
from jaxinfer.sampling.filters import top_k_top_p_threshold

SMALL, LARGE = 200, 8320
weights_jit = jax.jit(sampling_weights)
INF = np.inf


def cases_of(params):
    return [Case({"temperature": 1.0, **p}) for p in params]


def weights_of(x_BV, params):
    """Weights per row, one parameter dict each."""
    cases = cases_of(params)
    slot_params, *_ = slots_of(cases, x_BV.shape[1], list(range(len(cases))))
    rows = gather_rows(slot_params, jnp.arange(len(cases), dtype=jnp.int32))
    return np.asarray(weights_jit(jnp.asarray(x_BV, jnp.float32), rows, jnp.ones((len(cases),), bool)))


def expected_of(x_BV, params):
    x_BV = np.asarray(x_BV, np.float32).astype(np.float64)
    return [filtered(x, case) for x, case in zip(x_BV, cases_of(params), strict=True)]


def check(x_BV, params):
    weight_BV, expected = weights_of(x_BV, params), expected_of(x_BV, params)
    for weight, prob, p in zip(weight_BV, expected, params, strict=True):
        np.testing.assert_array_equal(weight > 0, prob > 0, err_msg=str(p))
        np.testing.assert_allclose(weight / weight.sum(dtype=np.float64), prob, rtol=2e-5, atol=1e-7, err_msg=str(p))


def random_params(rng, vocab):
    p = {"temperature": float(rng.uniform(0.2, 2.0))}
    if rng.random() < 0.6:
        p["top_k"] = int(rng.choice([2, 3, 20, 50, 63, 64, 65, vocab // 2, vocab - 1]))
    if rng.random() < 0.6:
        p["top_p"] = float(rng.uniform(0.05, 0.995))
    if rng.random() < 0.3:
        p["min_p"] = float(rng.uniform(0, 0.5))
    return p


def some_rows(rng, num, vocab, step):
    """Normal logits of several scales, rounded to multiples of `step` (many ties), a third of some rows masked."""
    x = rng.normal(size=(num, vocab)) * rng.uniform(0.3, 5.0, size=(num, 1))
    x = np.round(x / step) * step if step else x
    is_masked = (rng.random((num, vocab)) < 0.33) & (rng.random((num, 1)) < 0.5)
    is_masked[np.arange(num), x.argmax(axis=1)] = False
    return np.where(is_masked, -INF, x).astype(np.float32)


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
@pytest.mark.parametrize("step", [0.0, 0.25])
@pytest.mark.parametrize("seed", range(3))
def test_random_rows_keep_what_a_full_sort_keeps(vocab, step, seed):
    rng = np.random.default_rng(seed)
    check(some_rows(rng, 16, vocab, step), [random_params(rng, vocab) for _ in range(16)])


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_edges(vocab):
    """R079: top_k of -1, 0, V and V + 1 are off; and p = 1, min_p = 1, huge and tiny temperatures, tiny top_p."""
    params = [
        *({"top_k": k} for k in (-1, 0, 1, 2, vocab - 1, vocab, vocab + 1, 2**31 - 1)),
        *({"top_p": p} for p in (1.0, 1e-300, 1e-9, 0.999)),
        *({"min_p": p} for p in (0.0, 1e-300, 0.999, 1.0)),
        *({"temperature": t, "top_k": 5, "top_p": 0.5} for t in (1e-4, 1e6)),
        {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.02},
    ]
    x = np.random.default_rng(5).normal(size=vocab)
    keep = [i for i, p in enumerate(params) if p.get("top_k") != 1]  # top_k = 1 is greedy: test_choose.py
    check(np.tile(x, (len(keep), 1)), [params[i] for i in keep])


@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_peculiar_rows(vocab):
    """All equal, all masked but one, a few left of many, largest floats, zeros of both signs, one huge."""
    rows = np.zeros((6, vocab))
    rows[1] = -INF
    rows[1, vocab - 1] = -7.0
    rows[2] = -INF
    rows[2, 5:25] = np.arange(20) / 4
    rows[3] = -3e38
    rows[3, 17] = 3e38
    rows[4] = np.where(np.arange(vocab) % 2, 0.0, -0.0)
    rows[5, 9] = 1e30
    for p in ({"top_k": 7}, {"top_p": 0.5}, {"top_k": 7, "top_p": 0.9, "min_p": 0.1}, {"temperature": 2.0}):
        check(rows, [p] * len(rows))


def test_entries_equal_to_the_threshold_are_all_kept():
    x = np.full((1, SMALL), -1.0)
    x[0, [3, 50, 51, 120, 199]] = 4.0, 2.0, 2.0, 2.0, 1.0
    weight = weights_of(x, [{"top_k": 2}])
    assert np.flatnonzero(weight[0]).tolist() == [3, 50, 51, 120]


@pytest.mark.parametrize(
    "mutant",
    [
        lambda prob, x, k, p: keep_top_k(x, k + 1) & keep_top_p(np.where(keep_top_k(x, k + 1), prob, 0), x, p),
        lambda prob, x, k, p: keep_top_k(x, k) & keep_top_p(prob, x, p),  # top_p of the unfiltered mass
        lambda prob, x, k, p: keep_top_k(x, k),
        lambda prob, x, k, p: keep_top_p(prob, x, p),
        lambda prob, x, k, p: keep_top_k(x, k) & keep_top_p(np.where(keep_top_k(x, k), prob, 0), x, p + 0.02),
        lambda prob, x, k, p: x > np.sort(x[keep_top_k(x, k)])[0],  # drops the threshold itself
    ],
)
@pytest.mark.parametrize("vocab", [SMALL, LARGE])
def test_wrong_filters_keep_other_sets(vocab, mutant):
    x = np.random.default_rng(9).normal(size=(8, vocab)).astype(np.float32)
    params = [{"top_k": 40, "top_p": 0.9}] * 8
    weight_BV, expected = weights_of(x, params), expected_of(x, params)
    wrong = [mutant(np.exp(row.astype(np.float64)), row, 40, 0.9) for row in x]
    assert all((w > 0).tolist() == (e > 0).tolist() for w, e in zip(weight_BV, expected, strict=True))
    assert any((w > 0).tolist() != m.tolist() for w, m in zip(weight_BV, wrong, strict=True))


def test_a_row_that_needs_the_whole_row_searched_leaves_its_neighbours_bit_identical():
    """The fallback is taken by the whole batch, its result by the rows that need it."""
    rng = np.random.default_rng(2)
    x = (rng.normal(size=(4, LARGE)) * 4).astype(np.float32)
    flat = x.copy()
    flat[3] = 0.0
    params = [{"top_p": 0.7}, {"top_k": 30, "top_p": 0.6}, {"top_k": 9}, {"top_p": 0.9}]
    np.testing.assert_array_equal(weights_of(x, params)[:3], weights_of(flat, params)[:3])


def test_rows_without_filters_have_no_threshold():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, LARGE)), jnp.float32)
    no, k, p = jnp.zeros((2,), bool), jnp.zeros((2,), jnp.int32), jnp.ones((2,), jnp.float32)
    assert np.asarray(top_k_top_p_threshold(x, jnp.exp(x), no, k, no, p)).tolist() == [-INF, -INF]
    mixed = top_k_top_p_threshold(x, jnp.exp(x), jnp.asarray([True, False]), k + 3, no, p)
    assert float(np.sort(np.asarray(x)[0])[-3]) >= float(mixed[0]) > float(np.sort(np.asarray(x)[0])[-4])
    assert float(mixed[1]) == -INF


def test_non_finite_rows_end_the_search_and_leave_neighbours_alone():
    x = np.random.default_rng(3).normal(size=(4, LARGE)).astype(np.float32)
    bad = x.copy()
    bad[0], bad[1, 5], bad[2, 7] = np.nan, np.nan, INF
    params = [{"top_k": 5, "top_p": 0.9}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 90, "top_p": 0.5}]
    np.testing.assert_array_equal(weights_of(x, params)[3], weights_of(bad, params)[3])
