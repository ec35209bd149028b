"""Every implementation against attention written out in numpy float64, from contiguous keys and values without pages.

Pages that no row owns, the null page among them, hold NaN: one read of them shows. Owned pages hold stale finite values
where nothing has been written, as recycled pages do.

Compiling costs a hundred times what running does, so cases are padded to a few shared shapes, as the engine pads its
steps (empty rows, unused table entries, padding tokens), and compiled at LLVM's lowest level; the slow test runs every
case in its own exact shape, compiled as usual.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ragged_paged_attention import AttentionNeeds, RaggedBatch, get_attention
from pallas_kernels.ragged_paged_attention.cases import CASES, AttentionCase

NAMES = ("reference", "xla")
# Largest difference of an output, whose values are averages of normal draws. A mutant must exceed ten times as much.
TOLERANCES = {
    "float32": 5e-6,  # sums of at most 400 products of size 1 in another order: measured 1e-6
    "bfloat16": 1.6e-2,  # the output is rounded to 8 bits: half a unit in the last place of values up to 8 is 1.6e-2
}
BY_NAME = {case.name: case for case in CASES}
NUM_PAGES = 64  # more than any case owns
ROWS = 8
TOKENS = (64, 256)
WIDTHS = (8, 32)
WRITTEN = 512  # positions of all contexts together, padded


@dataclass(frozen=True)
class Drawn:
    """A case's arrays.

    Attributes:
      q_TKGH, k, v: normal draws in the case's dtype; k and v are [S, K, H] per row of the case.
      batch: numpy arrays, with page ids shuffled over the pool.
      owned: ids of the pages that some row owns.
      max_query_len: a bound, as `prepare` takes it.
    """

    case: AttentionCase
    q_TKGH: np.ndarray
    k: tuple[np.ndarray, ...]
    v: tuple[np.ndarray, ...]
    batch: RaggedBatch
    owned: np.ndarray
    max_query_len: int


@functools.cache
def draw(case: AttentionCase, is_exact: bool = False) -> Drawn:
    """Draws a case; padded to a shared shape unless `is_exact`."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))

    def normal(*shape):
        return rng.standard_normal(shape).astype(jnp.dtype(case.dtype))

    num_rows = len(case.context_lens)
    rows, width, tokens = num_rows, case.table_width, case.num_tokens
    if not is_exact:
        rows = ROWS
        width = next(w for w in WIDTHS if w >= width)
        tokens = ROWS if case.is_decode else next(t for t in TOKENS if t >= tokens)
    free = rng.permutation(np.arange(1, NUM_PAGES, dtype=np.int32))
    table_BM = np.zeros((rows, width), np.int32)
    for row in range(num_rows):
        count = case.num_pages(row)
        table_BM[row, :count], free = free[:count], free[count:]
    # Rows added for padding are frozen ones in a decode batch, as in the engine's, and empty ones elsewhere.
    query_lens = [*case.query_lens, *[int(case.is_decode)] * (rows - num_rows)]
    kv_shape = (case.num_kv_heads, case.head_dim)
    k, v = (tuple(normal(n, *kv_shape) for n in case.context_lens) for _ in range(2))
    return Drawn(
        case=case,
        q_TKGH=normal(tokens, case.num_kv_heads, case.group, case.head_dim),  # last: its size alone depends on padding
        k=k,
        v=v,
        batch=RaggedBatch(
            page_table_BM=table_BM,
            context_len_B=np.array([*case.context_lens, *[0] * (rows - num_rows)], np.int32),
            query_start_R=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        ),
        owned=table_BM[table_BM > 0],
        max_query_len=1 if case.is_decode else tokens,
    )


def expected(drawn: Drawn) -> list[np.ndarray]:
    """float64 [query_len, K, G, H] per row."""
    case, window, out = drawn.case, drawn.case.window, []
    for row, (context, length) in enumerate(zip(case.context_lens, case.query_lens, strict=True)):
        start = int(drawn.batch.query_start_R[row])
        q = drawn.q_TKGH[start : start + length].astype(np.float64)
        k, v = drawn.k[row].astype(np.float64), drawn.v[row].astype(np.float64)
        values = np.zeros(q.shape)
        for i in range(length if context else 0):
            position = context - length + i
            first = 0 if window is None else max(0, position - window + 1)
            for kv_head in range(case.num_kv_heads):
                for g in range(case.group):
                    scores = k[first : position + 1, kv_head] @ q[i, kv_head, g] * case.scale
                    if case.soft_cap is not None:
                        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                    weights = np.exp(scores - scores.max())
                    values[i, kv_head, g] = weights @ v[first : position + 1, kv_head] / weights.sum()
        out.append(values)
    return out


@functools.cache
def filled_pages(case: AttentionCase, name: str):
    """The pool with every context written, in one call that is padded with writes to the null page."""
    drawn, op = draw(case), get_attention(name, AttentionNeeds(platform="cpu")).op
    page_T, offset_T = np.zeros(WRITTEN, np.int32), np.zeros(WRITTEN, np.int32)
    k_TKH, v_TKH = (np.zeros((WRITTEN, *drawn.q_TKGH.shape[1::2]), drawn.q_TKGH.dtype) for _ in range(2))
    end = 0
    for row, context in enumerate(case.context_lens):
        position = np.arange(context, dtype=np.int32)
        start, end = end, end + context
        page_T[start:end] = drawn.batch.page_table_BM[row, position // case.page_size]
        offset_T[start:end] = position % case.page_size
        k_TKH[start:end], v_TKH[start:end] = drawn.k[row], drawn.v[row]
    rng = np.random.default_rng(7)

    def stale(struct):
        array = np.full(struct.shape, np.nan, struct.dtype)
        array[drawn.owned] = (3 * rng.standard_normal((len(drawn.owned), *struct.shape[1:]))).astype(struct.dtype)
        return array

    shapes = op.page_shapes(NUM_PAGES, case.num_kv_heads, case.head_dim, case.page_size, jnp.dtype(case.dtype))
    pages = _writer(name)(jax.tree.map(stale, shapes), k_TKH, v_TKH, page_T, offset_T)
    return jax.tree.map(_with_null_page_nan, pages)


@functools.cache
def _writer(name: str):
    return jax.jit(
        get_attention(name, AttentionNeeds(platform="cpu")).op.write,
        compiler_options={"xla_backend_optimization_level": 0},
    )


def _with_null_page_nan(array):
    array = np.array(array)
    array[0] = np.nan
    return array


@functools.cache
def _compiled(
    name: str,
    window: int | None,
    soft_cap: float | None,
    page_size: int,
    max_query_len: int,
    scale: float,
    llvm_level: int = 0,
):
    op = get_attention(name, AttentionNeeds(platform="cpu")).op

    def run(q_TKGH, pages, batch):
        work = op.prepare(
            batch,
            num_tokens=q_TKGH.shape[0],
            max_query_len=max_query_len,
            page_size=page_size,
            sliding_window=window,
        )
        return op.attend(q_TKGH, pages, work, scale=scale, soft_cap=soft_cap)

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": llvm_level})


def run(
    case: AttentionCase,
    name: str,
    *,
    batch: RaggedBatch | None = None,
    q_scale: int = 1,
    max_query_len: int | None = None,
    is_exact: bool = False,
) -> np.ndarray:
    """Outputs [T, K, G, H] as float32."""
    drawn = draw(case, is_exact)
    bound = max_query_len or drawn.max_query_len
    program = _compiled(name, case.window, case.soft_cap, case.page_size, bound, case.scale, 3 if is_exact else 0)
    q_TKGH = drawn.q_TKGH * np.asarray(q_scale, drawn.q_TKGH.dtype)
    out_TKGH = np.asarray(program(q_TKGH, filled_pages(case, name), batch or drawn.batch))
    assert out_TKGH.dtype == jnp.dtype(case.dtype)
    return out_TKGH.astype(np.float32)


def largest_error(case: AttentionCase, out_TKGH: np.ndarray, is_exact: bool = False) -> float:
    """Over the rows that mean something; infinite when an output is not finite."""
    drawn = draw(case, is_exact)
    errors = [0.0]
    for row, want in enumerate(expected(drawn)):
        start = int(drawn.batch.query_start_R[row])
        if case.context_lens[row] and len(want):
            errors.append(float(np.abs(out_TKGH[start : start + len(want)] - want).max()))
    return max(errors) if np.isfinite(errors).all() else np.inf


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


def _sees_two(case: AttentionCase) -> bool:
    """Whether a query of the case sees more than one position, so that weights matter."""
    return case.window != 1 and max(case.context_lens) > 1


MUTABLE = [c for c in CASES if _sees_two(c)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", MUTABLE, ids=lambda case: case.name)
def test_mutant_doubled_scale_is_seen(case, name):
    assert largest_error(case, run(case, name, q_scale=2)) > 10 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [c for c in MUTABLE if c.window is None], ids=lambda case: case.name)
def test_mutant_shifted_mask_is_seen(case, name):
    """A context one too short, in every row that has room for it."""
    batch = draw(case).batch
    room_B = batch.context_len_B > np.diff(batch.query_start_R)
    shorter_B = (batch.context_len_B - room_B).astype(np.int32)
    if not room_B.any():
        pytest.skip("every row computes its whole context: a shift leaves it no first position")
    mutant = batch._replace(context_len_B=shorter_B)
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
    drawn = draw(case)
    row = int(np.argmax(case.context_lens))
    table_BM = drawn.batch.page_table_BM.copy()
    last = case.num_pages(row) - 1
    table_BM[row, last] = next(p for p in range(1, NUM_PAGES) if p != table_BM[row, last])
    assert largest_error(case, run(case, name, batch=drawn.batch._replace(page_table_BM=table_BM))) > (
        10 * TOLERANCES[case.dtype]
    )


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

    program = _compiled(name, case.window, case.soft_cap, case.page_size, drawn.max_query_len, case.scale)
    pages = jax.tree.map(poison, filled_pages(case, name))
    out_TKGH, clean_TKGH = np.asarray(program(drawn.q_TKGH, pages, drawn.batch)), run(case, name)
    start, end = drawn.batch.query_start_R[row : row + 2]
    assert np.isnan(out_TKGH[start:end]).all()
    others = [*range(start), *range(end, sum(case.query_lens))]
    assert np.array_equal(out_TKGH[others], clean_TKGH[others])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_written_values_come_back_and_nothing_else_changes(name, dtype):
    """Seven tokens into page 3, three of padding into the null page; a window of 1 reads each value back as it is."""
    op, dtype = get_attention(name, AttentionNeeds(platform="cpu")).op, jnp.dtype(dtype)
    page_T = np.array([3] * 7 + [0] * 3, np.int32)
    offset_T = np.array([*range(7), 0, 1, 0], np.int32)
    rng = np.random.default_rng(0)
    # Old values are in [1, 2), new ones in [-2, -1): a value that changed differs.
    k_TKH, v_TKH = (-rng.uniform(1, 1.9, (10, 2, 64)).astype(dtype) for _ in range(2))
    shapes = op.page_shapes(5, 2, 64, 8, dtype)
    before = jax.tree.map(lambda s: rng.uniform(1, 1.9, s.shape).astype(s.dtype), shapes)
    after = _writer(name)(before, k_TKH, v_TKH, page_T, offset_T)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        changed = old != np.asarray(new)
        assert not changed[[1, 2, 4]].any()
        assert changed[0].sum() == changed[0].size * 2 // 8, "padding goes to two positions of the null page"
        assert changed[3].sum() == changed[3].size * 7 // 8, "the eighth position of page 3 is not written"
    batch = RaggedBatch(np.array([[3, 0]], np.int32), np.array([7], np.int32), np.array([0, 7], np.int32))
    q_TKGH = rng.standard_normal((10, 2, 3, 64)).astype(dtype)
    out_TKGH = np.asarray(_compiled(name, 1, None, 8, 10, 0.125)(q_TKGH, after, batch))
    for g in range(3):
        assert np.array_equal(out_TKGH[:7, :, g], v_TKH[:7])


@pytest.mark.parametrize("name", NAMES)
def test_keys_and_values_of_another_dtype_are_cast_when_written(name):
    """Pages may be bfloat16 under float32 activations."""
    pages = jax.tree.map(
        lambda s: np.zeros(s.shape, s.dtype),
        get_attention(name, AttentionNeeds(platform="cpu")).op.page_shapes(2, 1, 8, 8, jnp.bfloat16),
    )
    k_TKH = np.linspace(0, 1, 8, dtype=np.float32).reshape(1, 1, 8)
    pages = _writer(name)(pages, k_TKH, 2 * k_TKH, np.ones(1, np.int32), np.zeros(1, np.int32))
    assert all(a.dtype == jnp.bfloat16 for a in jax.tree.leaves(pages))
    batch = RaggedBatch(np.ones((1, 1), np.int32), np.ones(1, np.int32), np.array([0, 1], np.int32))
    out_TKGH = np.asarray(_compiled(name, None, None, 8, 1, 1.0)(np.ones((1, 1, 1, 8), np.float32), pages, batch))
    assert np.array_equal(out_TKGH[0, 0, 0], (2 * k_TKH[0, 0]).astype(jnp.bfloat16).astype(np.float32))


def test_an_unknown_implementation_says_so_and_never_falls_back():
    with pytest.raises(NotImplementedError, match=r"'flash' does not exist; there are: auto, reference, xla"):
        get_attention("flash", AttentionNeeds(platform="cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_an_implementation_asked_for_by_name_is_that_one(name):
    assert get_attention(name, AttentionNeeds(platform="cpu")).op.name == name


def test_case_names_are_unique():
    assert len(BY_NAME) == len(CASES)
