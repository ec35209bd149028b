"""Log probabilities against float64 log_softmax: float32 sums over the vocabulary agree to 1e-5."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import token_logprobs, top_logprobs


def log_softmax(x):
    x = x.astype(np.float64)
    top = x.max(axis=1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(axis=1, keepdims=True))


@pytest.mark.parametrize("vocab", [64, 5200])
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_values_ranks_and_order(vocab, scale):
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(5, vocab)) * scale).astype(np.float32)
    token = rng.integers(0, vocab, 5).astype(np.int32)
    expected = log_softmax(x)
    logprob, rank = token_logprobs(jnp.asarray(x), jnp.asarray(token))
    np.testing.assert_allclose(logprob, expected[np.arange(5), token], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(rank, 1 + (x > x[np.arange(5), token][:, None]).sum(axis=1))
    ids, values = top_logprobs(jnp.asarray(x))
    order = np.argsort(-x, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(values, np.take_along_axis(expected, order, axis=1), rtol=1e-5, atol=1e-5)
    assert not np.allclose(logprob, log_softmax(x / 2)[np.arange(5), token], rtol=1e-5, atol=1e-5)  # mutant: tempered


def test_r086_equal_rows_give_bit_equal_values():
    """R086."""
    x = np.tile(np.random.default_rng(2).normal(size=(1, 5200)), (8, 1)).astype(np.float32)
    logprob, _ = token_logprobs(jnp.asarray(x), jnp.full((8,), 11, jnp.int32))
    assert len(set(np.asarray(logprob).tolist())) == 1
    assert len({row.tobytes() for row in np.asarray(top_logprobs(jnp.asarray(x))[1])}) == 1


def test_r084_an_impossible_token_has_minus_infinity_and_no_nan():
    """R084: the floor of -9999.0 is the host's; here -inf stays -inf, and never turns into NaN."""
    x = np.full((2, 64), -np.inf, np.float32)
    x[0, 3], x[1, :2] = 5.0, (3e38, -3e38)
    logprob, rank = token_logprobs(jnp.asarray(x), jnp.asarray([9, 1], jnp.int32))
    assert np.asarray(logprob).tolist() == [-np.inf, -np.inf]
    assert np.asarray(rank).tolist() == [2, 2]
    assert not np.isnan(np.asarray(top_logprobs(jnp.asarray(x))[1])).any()
