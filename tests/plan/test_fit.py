"""The account of memory, against numbers worked out by hand."""

from __future__ import annotations

import jax
import pytest

from jaxinfer.engine.layout import shard_bytes
from jaxinfer.plan.compile import ProgramReport
from jaxinfer.plan.fit import fit_of, rooms, sequences_that_fit

PAGE = 2 * 2 * 16 * 2 * 16 * 2  # layers, keys and values, positions, KV heads, head_dim, bfloat16


@pytest.mark.parametrize(
    ("num_pages", "length", "want"), [(11, 16, 10), (11, 17, 5), (11, 160, 1), (11, 161, 0), (1, 1, 0), (33, 64, 8)]
)
def test_whole_sequences_fit_beside_the_null_page(num_pages, length, want):
    assert sequences_that_fit(num_pages, 16, length) == want


def test_rooms_go_up_to_the_longest_sequence_and_no_further_than_the_slots(make_layout):
    layout = make_layout(num_pages=41)
    found = rooms(layout, (64, 128, 4096))
    assert [(r.length, r.by_pages, r.num_sequences) for r in found] == [(64, 10, 4), (128, 5, 4), (256, 2, 2)]


def test_without_programs_the_engines_own_reserve_counts(make_layout):
    layout = make_layout(num_pages=41)
    fit = fit_of(layout, 1 << 30, 0.5, [])
    slots = sum(shard_bytes(a) for a in jax.tree.leaves(layout.state))
    assert (fit.page_bytes, fit.num_pages, fit.pool_bytes) == (PAGE, 41, 41 * PAGE)
    assert fit.weight_bytes == sum(shard_bytes(a) for a in layout.leaves)
    assert fit.hungriest is None
    assert fit.slot_bytes + fit.temporary_bytes == fit.reserved_bytes == layout.memory.temporary_bytes
    assert fit.slot_bytes == slots
    assert fit.num_pages_that_fit == ((1 << 29) - fit.weight_bytes - fit.reserved_bytes) // PAGE
    assert fit.is_enough


def test_what_the_compiler_says_replaces_what_was_worked_out(make_layout):
    """A pool padded to twice its size, slots of 300 bytes, weights of 5000."""
    layout = make_layout(num_pages=10)
    pool = 20 * PAGE
    reports = [
        ProgramReport(name="admit", argument_bytes=310, alias_bytes=300, output_bytes=300, temporary_bytes=7),
        ProgramReport(name="scrub", argument_bytes=pool, alias_bytes=pool, output_bytes=pool),
        ProgramReport(
            name="decode:4",
            argument_bytes=pool + 300 + 5000,
            alias_bytes=pool + 300,
            output_bytes=pool + 300 + 40,
            temporary_bytes=1000,
            code_bytes=60,
        ),
        ProgramReport(name="mixed:16", reason="too large", temporary_bytes=10**9),
    ]
    fit = fit_of(layout, pool + 6400, 1.0, reports)
    assert (fit.weight_bytes, fit.pool_bytes, fit.slot_bytes) == (5000, pool, 300)
    assert (fit.temporary_bytes, fit.hungriest) == (1000 + 40 + 60, "decode:4")
    assert fit.total_bytes == pool + 6400
    assert fit.is_enough
    assert (fit.page_bytes, fit.num_pages_that_fit) == (2 * PAGE, 10)
    short = fit_of(layout, pool + 6399, 1.0, reports)
    assert not short.is_enough
    assert short.num_pages_that_fit == 9
