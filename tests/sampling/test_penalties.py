"""Token counts: admission from a history equals counting one token at a time."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sampling import IN_PROMPT, count_tokens, row_from_history

VOCAB = 30


def test_counts_of_a_history():
    history = jnp.asarray([3, 3, 5, 7, 3, 7, 7, 29, 29], jnp.int32)
    row = np.asarray(row_from_history(history, jnp.int32(3), jnp.int32(7), VOCAB))
    expected = np.zeros(VOCAB, np.int64)
    expected[[3, 5]] = IN_PROMPT
    expected[3] += 1
    expected[7] += 3
    np.testing.assert_array_equal(row, expected)


def test_counting_step_by_step_equals_the_history_as_after_a_preemption():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, 40).astype(np.int32)
    counts = jnp.zeros((3, VOCAB), jnp.int32)
    counts = counts.at[1].set(row_from_history(jnp.asarray(tokens), jnp.int32(10), jnp.int32(10), VOCAB))
    step = jax.jit(count_tokens)
    for token in tokens[10:]:
        counts = step(
            counts, jnp.asarray([1, 2], jnp.int32), jnp.asarray([token, 4], jnp.int32), jnp.asarray([True, False])
        )
    whole = row_from_history(jnp.asarray(tokens), jnp.int32(10), jnp.int32(40), VOCAB)
    np.testing.assert_array_equal(counts[1], whole)
    assert not np.asarray(counts)[[0, 2]].any()


def test_rows_that_are_not_new_write_nowhere_not_even_the_last_slot():
    counts = count_tokens(
        jnp.zeros((4, VOCAB), jnp.int32),
        jnp.asarray([0, 3], jnp.int32),
        jnp.asarray([1, 1], jnp.int32),
        jnp.zeros(2, bool),
    )
    assert not np.asarray(counts).any()
