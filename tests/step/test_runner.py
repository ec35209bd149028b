"""Plans made by hand through a real runner of model T, against the oracle."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle
from tiny import shared_engine, tiny_architecture, tiny_mesh, tiny_params

from jaxinfer.request import SamplingParams
from jaxinfer.schedule.step_plan import Admission, PlannedRow, StepPlan, SwapIn, SwapOut
from jaxinfer.step import Runner
from jaxinfer.step.slot_state import SlotState

PAGE_SIZE = 16
WIDTH = 16
PROMPT = tuple(range(100, 120))


@functools.cache
def oracle_text(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    arch = tiny_architecture()
    text = Oracle.of(tiny_params(arch, tiny_mesh()), arch).greedy(prompt, count)
    assert text.smallest_gap > 1e-3
    return text.token_ids


@pytest.fixture
def runner() -> Runner:
    """A runner of its own, with empty pages and slots, around the shared engine's compiled programs and weights."""
    loaded = shared_engine()
    shared = loaded.engine.runner
    return Runner(
        loaded.programs,
        shared._leaves,
        jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype, device=a.sharding), shared._pages),
        jax.device_put(
            SlotState.zeros(4, loaded.memory.max_model_len, loaded.arch.vocab_size), loaded.rules.replicated
        ),
        vocab_size=loaded.arch.vocab_size,
        eos_token_ids=loaded.tokenizer.eos_token_ids,
    )


def table(*rows: Sequence[int]) -> np.ndarray:
    out = np.zeros((len(rows), WIDTH), np.int32)
    for row, pages in zip(out, rows, strict=True):
        row[: len(pages)] = pages
    return out


def admission(slot: int, ids: Sequence[int], max_tokens: int = 50, **params) -> Admission:
    sampling = SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | params))
    return Admission(slot, slot, tuple(ids), len(ids), len(ids) + max_tokens, sampling, seed=1)


def chunk(slot: int, start: int, count: int, *, samples: bool, **fields) -> PlannedRow:
    return PlannedRow(seq_id=slot, slot=slot, start=start, num_tokens=count, samples=samples, **fields)


def decode_row(slot: int) -> PlannedRow:
    return PlannedRow(seq_id=slot, slot=slot, start=None, num_tokens=1, samples=True)


def mixed(rows, pages: np.ndarray, **fields) -> StepPlan:
    return StepPlan(step_id=0, kind="mixed", rows=tuple(rows), page_table=pages, **fields)


def decode(rows, pages: np.ndarray, rounds: int = 4, **fields) -> StepPlan:
    return StepPlan(step_id=0, kind="decode", rows=tuple(rows), page_table=pages, num_rounds=rounds, **fields)


def run(runner: Runner, plan: StepPlan):
    return runner.collect(runner.submit(plan)).rows


def test_prefill_and_decode_write_the_oracles_text(runner):
    pages = table([5, 9])
    (first,) = run(runner, mixed([chunk(1, 0, 20, samples=True)], pages, admissions=(admission(1, PROMPT),)))
    (more,) = run(runner, decode([decode_row(1)], pages))
    (last,) = run(runner, decode([decode_row(1)], pages, rounds=2))
    assert first.token_ids + more.token_ids + last.token_ids == oracle_text(PROMPT, 7)


def test_chunks_and_mixed_steps_write_the_oracles_text(runner):
    other = (7, 8, 9)
    one = table([3, 4])
    (none,) = run(runner, mixed([chunk(0, 0, 11, samples=False)], one, admissions=(admission(0, PROMPT),)))
    assert none.token_ids == ()
    both = table([3, 4], [6])
    rows = [chunk(0, 11, 9, samples=True), chunk(2, 0, 3, samples=True)]
    first, second = run(runner, mixed(rows, both, admissions=(admission(2, other),)))
    again = run(runner, mixed([decode_row(0), decode_row(2)], both))
    assert first.token_ids + again[0].token_ids == oracle_text(PROMPT, 2)
    assert second.token_ids + again[1].token_ids == oracle_text(other, 2)


def test_a_plan_overwritten_right_after_submit_changes_nothing(runner):
    """R040: the host's arrays are copied before the device reads them, five times out of five."""
    for _ in range(5):
        pages, later = table([5, 9]), table([5, 9])
        plan = mixed([chunk(1, 0, 20, samples=True)], pages, admissions=(admission(1, PROMPT),))
        first = runner.submit(plan)
        pages[:] = 2
        second = runner.submit(decode([decode_row(1)], later))
        later[:] = 2
        tokens = runner.collect(first).rows[0].token_ids + runner.collect(second).rows[0].token_ids
        assert tokens == oracle_text(PROMPT, 5)


def test_a_sequence_stops_at_its_bound_and_a_frozen_row_brings_nothing(runner):
    pages = table([5, 9])
    run(runner, mixed([chunk(1, 0, 20, samples=True)], pages, admissions=(admission(1, PROMPT, max_tokens=3),)))
    (more,) = run(runner, decode([decode_row(1)], pages))
    assert more.token_ids == oracle_text(PROMPT, 3)[1:]
    (nothing,) = run(runner, decode([decode_row(1)], pages))
    (mixed_nothing,) = run(runner, mixed([decode_row(1)], pages))
    assert nothing.token_ids == mixed_nothing.token_ids == ()


def test_an_end_id_ends_the_dispatch_early_for_its_row_alone(runner):
    text, other = oracle_text(PROMPT, 5), oracle_text((7, 8, 9), 5)
    assert text.index(text[2]) == 2
    pages = table([5, 9], [6])
    rows = [chunk(1, 0, 20, samples=True), chunk(2, 0, 3, samples=True)]
    admissions = (admission(1, PROMPT, stop_token_ids=[text[2]]), admission(2, (7, 8, 9)))
    run(runner, mixed(rows, pages, admissions=admissions))
    first, second = run(runner, decode([decode_row(1), decode_row(2)], pages))
    assert first.token_ids == text[1:3]
    assert second.token_ids == other[1:]


def test_poisoned_pages_are_reported_and_scrubbed_ones_are_clean(runner):
    pages = table([5, 9])
    plan = mixed([chunk(1, 0, 20, samples=True)], pages, admissions=(admission(1, PROMPT),))
    run(runner, plan)
    runner.poison_pages((5,), float("nan"))
    (bad,) = run(runner, decode([decode_row(1)], pages))
    assert bad.is_bad
    assert bad.token_ids == ()
    clean = mixed(plan.rows, pages, admissions=plan.admissions, scrub_page_ids=(5, 9))
    (again,) = run(runner, clean)
    assert not again.is_bad
    assert again.token_ids == oracle_text(PROMPT, 1)


def test_poison_in_one_row_leaves_its_neighbour_alone(runner):
    pages = table([5, 9], [6])
    rows = [chunk(1, 0, 20, samples=True), chunk(2, 0, 3, samples=True)]
    run(runner, mixed(rows, pages, admissions=(admission(1, PROMPT), admission(2, (7, 8, 9)))))
    runner.poison_pages((5,), float("nan"))
    bad, good = run(runner, decode([decode_row(1), decode_row(2)], pages))
    assert (bad.is_bad, good.is_bad) == (True, False)
    assert good.token_ids == oracle_text((7, 8, 9), 5)[1:]


def test_scrubbing_touches_the_named_pages_only(runner):
    pages = list(range(1, 20))
    runner.poison_pages(tuple(pages), 3.0)
    run(runner, StepPlan(step_id=0, kind="decode", rows=(), page_table=table(), scrub_page_ids=tuple(pages[:17])))
    for array in jax.tree.leaves(runner._pages):
        values = np.asarray(array)
        assert not values[1:18].any(), "17 pages take two calls"
        assert (values[18:20] == 3.0).all()
        assert not values[40:].any()


@pytest.mark.parametrize("num_pages", [2, 18])
def test_pages_come_back_from_host_memory_into_other_pages(runner, num_pages):
    """Out, overwritten, and in again elsewhere: the text goes on as if nothing had happened."""
    old = tuple(range(20, 20 + num_pages))
    new = tuple(range(60, 60 - num_pages, -1))
    run(runner, mixed([chunk(1, 0, 20, samples=True)], table(old[:2]), admissions=(admission(1, PROMPT),)))
    out = StepPlan(step_id=0, kind="decode", rows=(), page_table=table(), swap_outs=(SwapOut(1, old),))
    run(runner, out)
    assert runner.num_swapped == 1
    runner.poison_pages(old, float("nan"))
    (more,) = run(runner, decode([decode_row(1)], table(new[:2]), swap_ins=(SwapIn(1, new),)))
    assert more.token_ids == oracle_text(PROMPT, 5)[1:]
    assert runner.num_swapped == 0


def test_swap_out_and_in_of_one_plan_happen_in_that_order(runner):
    """A page that is copied out, scrubbed and filled from elsewhere within one plan."""
    run(runner, mixed([chunk(1, 0, 20, samples=True)], table([5, 9]), admissions=(admission(1, PROMPT),)))
    rows, pages = [decode_row(1)], table([9, 5])
    plan = decode(rows, pages, swap_outs=(SwapOut(1, (5, 9)),), swap_ins=(SwapIn(1, (9, 5)),), scrub_page_ids=(5, 9))
    (more,) = run(runner, plan)
    assert more.token_ids == oracle_text(PROMPT, 5)[1:]


def test_more_admissions_than_one_call_takes(runner):
    """The state is right after several for one slot, too: the last one counts."""
    admissions = tuple(admission(i % 4, (7, 8, 9 + i)) for i in range(12))
    rows = [chunk(slot, 0, 3, samples=True) for slot in range(4)]
    out = run(runner, mixed(rows, table([1], [2], [3], [4]), admissions=admissions))
    for slot, row in enumerate(out):
        assert row.token_ids == oracle_text((7, 8, 9 + 8 + slot), 1)


def test_logprobs_and_prompt_logprobs_are_the_oracles(runner):
    arch = tiny_architecture()
    oracle = Oracle.of(tiny_params(arch, tiny_mesh()), arch)
    pages = table([5, 9])
    params = {"logprobs": 3, "prompt_logprobs": 2}
    rows = [chunk(1, 0, 12, samples=False, prompt_logprobs=True)]
    (a,) = run(runner, mixed(rows, pages, admissions=(admission(1, PROMPT, **params),)))
    (b,) = run(runner, mixed([chunk(1, 12, 8, samples=True, prompt_logprobs=True)], pages))
    (c,) = run(runner, decode([decode_row(1)], pages))
    ids = [*PROMPT, *b.token_ids, *c.token_ids]
    want_TV = oracle.logprobs(ids)
    prompt = a.prompt_logprobs + b.prompt_logprobs
    assert len(prompt) == len(PROMPT) - 1
    for entries, start, num_top in ((prompt, 0, 2), (b.logprobs + c.logprobs, len(PROMPT) - 1, 3)):
        for position, got in enumerate(entries, start):
            want_V, token = want_TV[position], ids[position + 1]
            best = np.argsort(-want_V)[:num_top]
            np.testing.assert_allclose(got.logprob, want_V[token], atol=2e-5)
            assert got.rank == 1 + (want_V > want_V[token]).sum()
            assert got.top_ids == tuple(best)
            np.testing.assert_allclose(got.top_logprobs, want_V[best], atol=2e-5)


def test_swapped_pages_of_ended_sequences_are_dropped(runner):
    run(runner, StepPlan(step_id=0, kind="decode", rows=(), page_table=table(), swap_outs=(SwapOut(77, (1, 2)),)))
    assert runner.num_swapped == 1
    runner.forget_swapped(lambda seq_id: seq_id != 77)
    assert runner.num_swapped == 0
