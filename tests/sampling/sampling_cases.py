"""Builds the arrays `choose` takes from reference cases, one slot per case, and the chi-square that compares draws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from sampling_reference import Case
from scipy import stats

from jaxinfer.request import SamplingParams
from jaxinfer.sampling import (
    SlotParams,
    choose,
    pack_row,
    row_from_history,
    tail_from_history,
    write_rows,
)

MAX_BIAS = 16  # keeps the arrays of thousands of slots small
choose_jit = jax.jit(choose)


def packed(case, vocab, seed):
    params = dict(case.params)
    if case.bad_words:
        params["bad_words"] = [str(word) for word in case.bad_words]
    return pack_row(
        SamplingParams(max_tokens=None, **params),
        seed=seed,
        vocab_size=vocab,
        eos_token_ids=case.eos,
        bad_word_ids=case.bad_words,
        max_logit_bias=MAX_BIAS,
    )


def slots_of(cases, vocab, seeds):
    """SlotParams, counts_SV, tail_SW, output_pos_S for one slot per case."""
    rows = np.stack([packed(case, vocab, seed) for case, seed in zip(cases, seeds, strict=True)])
    num_prompt = np.asarray([len(case.prompt) for case in cases], np.int32)
    num_tokens = num_prompt + np.asarray([len(case.output) for case in cases], np.int32)
    history = np.zeros((len(cases), 64), np.int32)
    for row, case in zip(history, cases, strict=True):
        row[: len(case.prompt) + len(case.output)] = [*case.prompt, *case.output]
    return _arrays(rows, history, num_prompt, num_tokens, vocab)


@partial(jax.jit, static_argnums=4)
def _arrays(rows, history, num_prompt, num_tokens, vocab):
    slot_params = SlotParams.zeros(len(rows), vocab, MAX_BIAS)
    slot_params = write_rows(slot_params, jnp.arange(len(rows), dtype=jnp.int32), rows)
    counts = jax.vmap(row_from_history, (0, 0, 0, None))(history, num_prompt, num_tokens, vocab)
    tails = jax.vmap(tail_from_history)(history, num_prompt, num_tokens)
    return slot_params, counts, tails, num_tokens - num_prompt


def choose_cases(logits, cases, seeds, slot_order=None, num_rows=8):
    """`choose` with row b in slot `slot_order[b]`; row b is case b. Rows that are not live fill up to `num_rows`."""
    num, spare = len(cases), num_rows - len(cases)
    cases, seeds = [*cases, *([Case({})] * spare)], [*seeds, *([0] * spare)]
    logits = np.concatenate([logits, np.zeros((spare, logits.shape[1]), np.float32)])
    order = np.arange(num_rows) if slot_order is None else np.asarray(slot_order)
    row_of_slot = np.argsort(order)
    slot_params, counts, tail, output_pos = slots_of(
        [cases[r] for r in row_of_slot], logits.shape[1], [seeds[r] for r in row_of_slot]
    )
    is_live = np.arange(num_rows) < num
    out = choose_jit(
        np.asarray(logits, np.float32),
        slot_params,
        order.astype(np.int32),
        counts,
        np.asarray(tail)[order],
        np.asarray(output_pos)[order],
        is_live,
    )
    return jax.tree.map(lambda x: np.asarray(x)[:num], out)


def draws(logits_V, case, num):
    """Tokens [num] drawn for one case with seeds 0 .. num - 1, in one batch."""
    vocab = len(logits_V)
    slot_params, counts, tail, output_pos = slots_of([case], vocab, [0])
    slot_params, counts, tail, output_pos = jax.tree.map(
        lambda x: jnp.broadcast_to(x, (num, *x.shape[1:])), (slot_params, counts, tail, output_pos)
    )
    seed_words = jnp.stack([jnp.zeros(num, jnp.uint32), jnp.arange(num, dtype=jnp.uint32)], axis=1)
    slot_params = slot_params._replace(row=slot_params.row._replace(seed_words=seed_words))
    logits = jnp.broadcast_to(jnp.asarray(logits_V, jnp.float32), (num, vocab))
    slot_ids = jnp.arange(num, dtype=jnp.int32)
    return np.asarray(
        choose_jit(logits, slot_params, slot_ids, counts, tail, output_pos, jnp.ones((num,), bool)).token_B
    )


def chi_square_p(tokens, prob):
    """p-value of the draws under `prob`; 0 if a token of probability 0 was drawn. Bins expecting < 5 are merged."""
    observed = np.bincount(tokens, minlength=len(prob)).astype(np.float64)
    expected = prob * len(tokens)
    if observed[prob == 0].any():
        return 0.0
    small = expected < 5
    observed = np.append(observed[~small], observed[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    if expected[-1] < 5 and len(expected) > 1:  # what is left over joins the largest bin
        largest = int(np.argmax(expected[:-1]))
        observed[largest] += observed[-1]
        expected[largest] += expected[-1]
        observed, expected = observed[:-1], expected[:-1]
    if len(expected) == 1:
        return 1.0
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)
