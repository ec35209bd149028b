"""The guard finds one non-finite entry anywhere in a row, and only there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sampling import is_bad_rows

guard_jit = jax.jit(is_bad_rows)


@pytest.mark.parametrize("vocab", [40, 128, 1000, 4096])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_one_entry_anywhere_flags_its_row_alone(vocab, value):
    clean = np.random.default_rng(0).normal(size=(3, vocab)).astype(np.float32)
    clean[0, 0], clean[2, 1] = 3.4028235e38, -3.4028235e38
    assert not np.asarray(guard_jit(jnp.asarray(clean))).any()
    for at in {0, 1, 31, 32, vocab // 2, vocab - 2, vocab - 1}:
        x = clean.copy()
        x[1, at] = value
        assert np.asarray(guard_jit(jnp.asarray(x))).tolist() == [False, True, False]


def test_a_row_of_nothing_else_is_flagged():
    x = np.stack([np.full(300, v, np.float32) for v in (np.nan, np.inf, -np.inf, 0.0)])
    assert np.asarray(guard_jit(jnp.asarray(x))).tolist() == [True, True, True, False]
