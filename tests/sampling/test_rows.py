"""argmax and top k of rows by blocks, against numpy; values are copies, so equality is exact."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import argmax_rows, top_k_rows

VOCABS = [1, 5, 127, 128, 129, 1000, 5121]


def rows_of(vocab, step, seed=0):
    x = np.random.default_rng(seed).normal(size=(6, vocab)) * 2
    x = np.round(x / step) * step if step else x
    return (x + 0.0).astype(np.float32)  # no -0.0: lax.top_k puts it behind 0.0


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_argmax_is_the_first_maximum(vocab, step):
    x = rows_of(vocab, step)
    x[0] = -np.inf
    x[1] = -np.inf
    x[1, -1] = -1e30
    np.testing.assert_array_equal(argmax_rows(jnp.asarray(x)), np.argmax(x, axis=1))


def test_argmax_of_a_row_with_nan_is_in_range():
    x = rows_of(1000, 0.0)
    x[0], x[1, 999] = np.nan, np.nan
    got = np.asarray(argmax_rows(jnp.asarray(x)))
    assert ((got >= 0) & (got < 1000)).all()
    np.testing.assert_array_equal(got[2:], np.argmax(x[2:], axis=1))


@pytest.mark.parametrize("vocab", [20, 129, 5121, 6000])
@pytest.mark.parametrize("step", [0.0, 0.25, 4.0])
def test_top_k_equals_a_stable_sort(vocab, step):
    x = rows_of(vocab, step)
    values, ids = jax.jit(top_k_rows, static_argnums=1)(jnp.asarray(x), 20)
    expected = np.argsort(-x, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis=1))


def test_mutant_blocks_in_order_of_their_maxima_break_ties_wrongly():
    """Why `top_k_rows` sorts the block ids: two blocks, the later one with the larger maximum, share a value."""
    x = np.full((1, 5120), -9.0, np.float32)
    x[0, [3, 700, 701]] = 1.0, 1.0, 2.0
    assert np.asarray(top_k_rows(jnp.asarray(x), 3)[1])[0].tolist() == [701, 3, 700]
