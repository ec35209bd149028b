"""Every implementation against attention written out in numpy float64, from contiguous keys and values without pages.

`drawn.py` says how cases are drawn and padded; the slow test runs every case in its own exact shape, compiled as usual.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import (
    BY_NAME,
    ROWS,
    TOLERANCES,
    attender,
    draw,
    filled_pages,
    largest_error,
    sees_two,
    shortened,
    with_wrong_page,
    writer,
)
from drawn import run as run_op
from native_kernels import native_kernels

from pallas_kernels.ragged_paged_attention import AttentionNeeds, AttentionOp, RaggedBatch, get_attention
from pallas_kernels.ragged_paged_attention.cases import CASES, AttentionCase

NAMES = ("reference", "xla", "cpu")


def op_of(name: str, case: AttentionCase | None = None) -> AttentionOp:
    """By name, for this platform; skips the test where the native kernel does not run a case, and says why."""
    sizes = {} if case is None else {"head_dim": case.head_dim, "page_size": case.page_size}
    needs = AttentionNeeds(platform="cpu", native_folder=native_kernels() if name == "cpu" else None, **sizes)
    try:
        return get_attention(name, needs).op
    except NotImplementedError as why:
        pytest.skip(str(why))


def run(case: AttentionCase, name: str, **options) -> np.ndarray:
    """Outputs [T, K, G, H] as float32."""
    return run_op(case, op_of(name, case), **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_attention_over_contiguous_keys_and_values(case, name):
    out_TKGH = run(case, name)
    assert np.isfinite(out_TKGH).all(), "outputs of padding and of frozen rows must be finite too"
    assert largest_error(case, out_TKGH) <= TOLERANCES[case.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_attention_in_exact_shapes(case, name):
    if case.num_tokens == 0:
        pytest.skip("a step has at least one token")
    out_TKGH = run(case, name, is_exact=True)
    assert np.isfinite(out_TKGH).all()
    assert largest_error(case, out_TKGH, is_exact=True) <= TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", [c for c in CASES if c.is_decode], ids=lambda case: case.name)
def test_the_decode_path_and_the_general_path_agree(case):
    # Frozen rows are left out: what they give means nothing.
    works = np.flatnonzero(case.context_lens)
    one, general = run(case, "xla", max_query_len=1), run(case, "xla", max_query_len=ROWS)
    np.testing.assert_allclose(one[works], general[works], rtol=0, atol=TOLERANCES[case.dtype])


MUTABLE = [c for c in CASES if sees_two(c)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", MUTABLE, ids=lambda case: case.name)
def test_mutant_doubled_scale_is_seen(case, name):
    assert largest_error(case, run(case, name, q_scale=2)) > 10 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [c for c in MUTABLE if c.window is None], ids=lambda case: case.name)
def test_mutant_shifted_mask_is_seen(case, name):
    """A context one too short, in every row that has room for it."""
    mutant = shortened(case)
    if mutant is None:
        pytest.skip("every row computes its whole context: a shift leaves it no first position")
    assert largest_error(case, run(case, name, batch=mutant)) > 10 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [BY_NAME["window_decode"], BY_NAME["window_prefill"]], ids=lambda case: case.name)
def test_mutant_window_one_too_wide_is_seen(case, name):
    wider = dataclasses.replace(case, window=case.window + 1)
    assert largest_error(case, run(wider, name)) > 10 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [c for c in CASES if max(c.context_lens)], ids=lambda case: case.name)
def test_mutant_wrong_page_is_seen(case, name):
    """The last page of the longest row replaced by another: a stranger's, or one that nobody owns."""
    out_TKGH = run(case, name, batch=with_wrong_page(case))
    assert largest_error(case, out_TKGH) > 10 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", range(8, 65, 8))
def test_window_16_holds_for_every_length_in_prefill_and_decode(length, name):
    """R151."""
    prefill = AttentionCase(name=f"prefill{length}", context_lens=(length,), query_lens=(length,), window=16)
    decode = AttentionCase(name=f"decode{length}", context_lens=(length,), query_lens=(1,), window=16)
    for case in (prefill, decode):
        assert largest_error(case, run(case, name)) <= TOLERANCES["float32"]


@pytest.mark.parametrize("name", NAMES)
def test_without_a_window_the_first_position_still_counts(name):
    """R153: full attention when no window is given, at a length where one of 16 would show."""
    case = dataclasses.replace(BY_NAME["window_mixed"], window=None)
    out_TKGH = run(case, name)
    assert largest_error(case, out_TKGH) <= TOLERANCES["float32"]
    assert largest_error(BY_NAME["window_mixed"], out_TKGH) > 10 * TOLERANCES["float32"]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_does_not_depend_on_its_neighbours(name):
    """R155: rows of 3, 17 and 40 positions together equal each alone, in prefill and in decode."""
    lens = (3, 17, 40)
    for queries in (lens, (1, 1, 1)):
        together = AttentionCase(name="together", context_lens=lens, query_lens=queries)
        assert largest_error(together, run(together, name)) <= TOLERANCES["float32"]
        for row in range(3):
            alone = AttentionCase(name="together", context_lens=lens[row : row + 1], query_lens=queries[row : row + 1])
            assert largest_error(alone, run(alone, name)) <= TOLERANCES["float32"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case_name", ["decode", "mixed"])
def test_a_row_whose_own_pages_are_not_finite_spoils_no_other(case_name, name):
    """The engine ends such a request alone, so its neighbours must not notice."""
    case = BY_NAME[case_name]
    drawn, row = draw(case), int(np.argmax(case.context_lens))
    poisoned = drawn.batch.page_table_BM[row, : case.num_pages(row)]

    def poison(array):
        array = array.copy()
        array[poisoned] = np.nan
        return array

    program = attender(op_of(name), case.window, case.soft_cap, case.page_size, drawn.max_query_len, case.scale)
    pages = jax.tree.map(poison, filled_pages(case, op_of(name)))
    out_TKGH, clean_TKGH = np.asarray(program(drawn.q_TKGH, pages, drawn.batch)), run(case, name)
    start, end = drawn.batch.query_start_R[row : row + 2]
    assert np.isnan(out_TKGH[start:end]).all()
    others = [*range(start), *range(end, sum(case.query_lens))]
    assert np.array_equal(out_TKGH[others], clean_TKGH[others])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_written_values_come_back_and_nothing_else_changes(name, dtype):
    """Seven tokens into page 3, three of padding into the null page; a window of 1 reads each value back as it is."""
    op, dtype = op_of(name), jnp.dtype(dtype)
    page_T = np.array([3] * 7 + [0] * 3, np.int32)
    offset_T = np.array([*range(7), 0, 1, 0], np.int32)
    rng = np.random.default_rng(0)
    # Old values are in [1, 2), new ones in [-2, -1): a value that changed differs.
    k_TKH, v_TKH = (-rng.uniform(1, 1.9, (10, 2, 64)).astype(dtype) for _ in range(2))
    shapes = op.page_shapes(5, 2, 64, 16, dtype)
    before = jax.tree.map(lambda s: rng.uniform(1, 1.9, s.shape).astype(s.dtype), shapes)
    after = writer(op_of(name))(before, k_TKH, v_TKH, page_T, offset_T)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        changed = old != np.asarray(new)
        assert not changed[[1, 2, 4]].any()
        assert changed[0].sum() == changed[0].size * 2 // 16, "padding goes to two positions of the null page"
        assert changed[3].sum() == changed[3].size * 7 // 16, "positions 7 to 15 of page 3 are not written"
    batch = RaggedBatch(np.array([[3, 0]], np.int32), np.array([7], np.int32), np.array([0, 7], np.int32))
    q_TKGH = rng.standard_normal((10, 2, 3, 64)).astype(dtype)
    out_TKGH = np.asarray(attender(op_of(name), 1, None, 16, 10, 0.125)(q_TKGH, after, batch))
    for g in range(3):
        assert np.array_equal(out_TKGH[:7, :, g], v_TKH[:7])


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_of_another_dtype_are_cast_when_written(name):
    """Pages may be bfloat16 under float32 activations."""
    pages = jax.tree.map(
        lambda s: np.zeros(s.shape, s.dtype),
        op_of(name).page_shapes(2, 1, 16, 16, jnp.bfloat16),
    )
    k_TKH = np.linspace(0, 1, 16, dtype=np.float32).reshape(1, 1, 16)
    pages = writer(op_of(name))(pages, k_TKH, 2 * k_TKH, np.ones(1, np.int32), np.zeros(1, np.int32))
    assert all(a.dtype == jnp.bfloat16 for a in jax.tree.leaves(pages))
    batch = RaggedBatch(np.ones((1, 1), np.int32), np.ones(1, np.int32), np.array([0, 1], np.int32))
    out_TKGH = np.asarray(
        attender(op_of(name), None, None, 16, 1, 1.0)(np.ones((1, 1, 1, 16), np.float32), pages, batch)
    )
    assert np.array_equal(out_TKGH[0, 0, 0], (2 * k_TKH[0, 0]).astype(jnp.bfloat16).astype(np.float32))


def test_an_unknown_implementation_says_so_and_never_falls_back():
    with pytest.raises(NotImplementedError, match=r"'flash' does not exist; there are: auto, reference, xla, cpu"):
        get_attention("flash", AttentionNeeds(platform="cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_an_implementation_asked_for_by_name_is_that_one(name):
    assert op_of(name).name == name


def test_case_names_are_unique():
    assert len(BY_NAME) == len(CASES)
