"""Root-mean-square normalisation against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.model.norms import RMSNorm

# Relative to the largest output: float32 sums of 48 squares; bfloat16 rounds the result to 8 bits.
TOLERANCES = {"float32": 1e-6, "bfloat16": 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_equals_float64_and_keeps_the_dtype(dtype):
    rng = np.random.default_rng(0)
    norm = RMSNorm(48, 1e-5, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))
    weight = rng.standard_normal(48).astype(jnp.dtype(dtype))
    norm.weight.set_value(jnp.asarray(weight))
    x = (100 * rng.standard_normal((7, 48))).astype(jnp.dtype(dtype))
    got = norm(jnp.asarray(x))
    assert got.dtype == jnp.dtype(dtype)
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt((x64**2).mean(1, keepdims=True) + 1e-5) * weight.astype(np.float64)
    assert np.abs(np.asarray(got).astype(np.float64) - want).max() <= TOLERANCES[dtype] * np.abs(want).max()
    no_eps = x64 / np.abs(x64).mean(1, keepdims=True) * weight.astype(np.float64)
    assert np.abs(no_eps - want).max() > 10 * TOLERANCES[dtype] * np.abs(want).max(), "the mutant is let through"


def test_the_epsilon_decides_for_tiny_inputs():
    norm = RMSNorm(4, 1e-5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    x = jnp.full((1, 4), 1e-3, jnp.float32)
    np.testing.assert_allclose(norm(x), 1e-3 / np.sqrt(1e-6 + 1e-5), rtol=1e-5)
    assert np.array_equal(norm(jnp.zeros((1, 4))), np.zeros((1, 4)))


def test_large_bfloat16_inputs_do_not_overflow():
    """Squares are taken in float32: 1e15 squared is far from its limit."""
    norm = RMSNorm(4, 1e-5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert np.array_equal(norm(jnp.full((1, 4), 1e15, jnp.bfloat16)), np.ones((1, 4)))


def test_the_last_axis_is_normalised_whatever_stands_before_it():
    rng = np.random.default_rng(0)
    norm = RMSNorm(16, 1e-5, dtype=jnp.float32, rngs=nnx.Rngs(0))
    norm.weight.set_value(jnp.asarray(rng.standard_normal(16), jnp.float32))
    x = jnp.asarray(rng.standard_normal((5, 3, 2, 16)), jnp.float32)
    np.testing.assert_allclose(norm(x), norm(x.reshape(30, 16)).reshape(x.shape), rtol=1e-6)


def test_one_is_added_in_float32():
    """In bfloat16 1 + 2 ** -9 is 1."""
    norm = RMSNorm(4, 0.0, dtype=jnp.bfloat16, rngs=nnx.Rngs(0), adds_one=True)
    x = jnp.full((1, 4), 3.0, jnp.float32)
    assert np.array_equal(norm(x), np.ones((1, 4))), "weights are zero at first"
    norm.weight.set_value(jnp.full(4, 2**-9, jnp.bfloat16))
    assert np.array_equal(norm(x), np.full((1, 4), 1 + 2**-9, np.float32))
