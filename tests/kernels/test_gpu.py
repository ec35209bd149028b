"""The Triton kernels in Pallas's interpret mode, against attention written out in numpy float64.

Interpret mode runs the kernels as jax operations, one program of the grid after the other. It leaves out what only a
GPU does: the inline assembly of the exponential, the tensor cores' rounding of float32, and the pipelining of loads.
Most cases share a few compiled shapes; those that need one of their own are slow tests.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import (
    BY_NAME,
    NUM_PAGES,
    TOLERANCES,
    attender,
    draw,
    expected,
    filled_pages,
    filled_with_nan,
    largest_error,
    run,
    sees_two,
    shortened,
    with_wrong_page,
    writer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.ragged_paged_attention import AttentionNeeds, AttentionOp, RaggedBatch, xla
from pallas_kernels.ragged_paged_attention.cases import CASES, AttentionCase
from pallas_kernels.ragged_paged_attention.gpu import OP, BlockSizes, default_block_sizes, make_op
from pallas_kernels.ragged_paged_attention.gpu_work import ALIGN, list_tiles

INTERPRETED = make_op(interpret=True)
# The longest contexts of the cases are cut into many items, and drafts into two blocks of query rows.
CUT_FINELY = make_op(interpret=True, block_sizes=BlockSizes(split_keys=64, decode_rows=16, prefill_rows=16))
QUICK = {
    "one_token", "decode", "decode_page_edge", "frozen_rows_decode", "all_rows_frozen", "empty_slot", "prefill_chunk",
    "nothing_at_all", "frozen_rows_mixed", "mixed", "decode_long_tail", "verified_drafts", "soft_cap_decode",
    "prefill_beyond_a_tile", "bfloat16_mixed",
}  # fmt: skip
PARAMS = [pytest.param(c, id=c.name, marks=[] if c.name in QUICK else pytest.mark.slow) for c in CASES]
MUTABLE = [p for p in PARAMS if sees_two(p.values[0])]
KV_DTYPES = ("int8", "float8_e4m3fn")
# Three products of 19-bit numbers make a score of float32, and the exponential is the hardware's, to 2 units of 2**-23.
GPU_TOLERANCES = TOLERANCES | {"float32": 4 * TOLERANCES["float32"]}


@pytest.mark.parametrize("case", PARAMS)
def test_equals_attention_over_contiguous_keys_and_values(case):
    out_TKGH = run(case, INTERPRETED)
    assert np.isfinite(out_TKGH).all(), "outputs of padding and of frozen rows must be finite too"
    assert largest_error(case, out_TKGH) <= TOLERANCES[case.dtype]


@pytest.mark.parametrize("case_name", ["decode_long_tail", "verified_drafts"])
def test_finely_cut_rows_add_up(case_name):
    case = BY_NAME[case_name]
    bound = 8 if case_name == "verified_drafts" else None  # all rows are short: no tiles
    assert largest_error(case, run(case, CUT_FINELY, max_query_len=bound)) <= TOLERANCES["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("case_name", ["mixed_long_tail", "window_mixed", "prefill_beyond_a_tile", "bfloat16_mixed"])
def test_finely_cut_mixed_batches_add_up(case_name):
    case = BY_NAME[case_name]
    assert largest_error(case, run(case, CUT_FINELY)) <= TOLERANCES[case.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [96, 256])
def test_other_head_dims(head_dim):
    case = dataclasses.replace(BY_NAME["head_dim_80"], name=f"head_dim_{head_dim}", head_dim=head_dim)
    assert largest_error(case, run(case, INTERPRETED)) <= TOLERANCES["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [24, 128, 256])
def test_pages_that_a_block_of_keys_does_not_divide_and_longer_ones(page_size):
    case = dataclasses.replace(BY_NAME["prefill_chunk"], name=f"page_size_{page_size}", page_size=page_size)
    assert largest_error(case, run(case, INTERPRETED)) <= TOLERANCES["float32"]


@pytest.mark.parametrize("case", MUTABLE)
def test_mutant_doubled_scale_is_seen(case):
    assert largest_error(case, run(case, INTERPRETED, q_scale=2)) > 10 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", [p for p in MUTABLE if p.values[0].window is None])
def test_mutant_shifted_mask_is_seen(case):
    mutant = shortened(case)
    if mutant is None:
        pytest.skip("every row computes its whole context: a shift leaves it no first position")
    assert largest_error(case, run(case, INTERPRETED, batch=mutant)) > 10 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", [p for p in PARAMS if max(p.values[0].context_lens)])
def test_mutant_wrong_page_is_seen(case):
    out_TKGH = run(case, INTERPRETED, batch=with_wrong_page(case))
    assert largest_error(case, out_TKGH) > 10 * TOLERANCES[case.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("case_name", ["window_decode", "window_prefill", "soft_cap_decode"])
def test_mutant_window_one_too_wide_is_seen(case_name):
    case = BY_NAME[case_name]
    wider = dataclasses.replace(case, window=case.window + 1)
    assert largest_error(case, run(wider, INTERPRETED)) > 10 * TOLERANCES["float32"]


@pytest.mark.slow
def test_padding_behind_the_rows_of_a_decode_batch_is_finite():
    case = BY_NAME["decode"]
    drawn = draw(case)
    q_TKGH = np.concatenate([drawn.q_TKGH, drawn.q_TKGH[:5]])
    program = attender(INTERPRETED, None, None, case.page_size, 1, case.scale)
    out_TKGH = np.asarray(program(q_TKGH, filled_pages(case, INTERPRETED), drawn.batch))
    assert np.isfinite(out_TKGH).all()
    assert largest_error(case, out_TKGH) <= TOLERANCES["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("case_name", ["window_decode", "window_mixed"])
def test_pages_that_the_window_has_left_are_not_read(case_name):
    case = BY_NAME[case_name]
    drawn = draw(case)
    table_BM = drawn.batch.page_table_BM.copy()
    for row, (context, length) in enumerate(zip(case.context_lens, case.query_lens, strict=True)):
        table_BM[row, : max(0, context - length + 1 - case.window) // case.page_size] = 0  # the null page holds NaN
    assert (table_BM != drawn.batch.page_table_BM).any()
    out_TKGH = run(case, INTERPRETED, batch=drawn.batch._replace(page_table_BM=table_BM))
    assert largest_error(case, out_TKGH) <= TOLERANCES["float32"]


@pytest.mark.parametrize("case_name", ["decode", "mixed", "decode_long_tail"])
def test_a_row_whose_own_pages_are_not_finite_spoils_no_other(case_name):
    """Also where the row is cut, and only one of its items meets the NaN."""
    case = BY_NAME[case_name]
    drawn, row = draw(case), int(np.argmax(case.context_lens))
    pages = jax.tree.map(np.copy, filled_pages(case, INTERPRETED))
    for array in pages:
        array[drawn.batch.page_table_BM[row, case.num_pages(row) - 1]] = np.nan
    program = attender(INTERPRETED, case.window, case.soft_cap, case.page_size, drawn.max_query_len, case.scale)
    out_TKGH, clean_TKGH = np.asarray(program(drawn.q_TKGH, pages, drawn.batch)), run(case, INTERPRETED)
    start, end = drawn.batch.query_start_R[row : row + 2]
    assert np.isnan(out_TKGH[start:end]).all()
    others = [*range(start), *range(end, sum(case.query_lens))]
    assert np.array_equal(out_TKGH[others], clean_TKGH[others])


# ---------------------------------------------------------------------------------------------------------------------
# 8-bit pages


@functools.cache
def dequantized(case: AttentionCase, kv_dtype: str, op: AttentionOp) -> list[np.ndarray]:
    """float64 outputs over what the filled pages stand for."""
    drawn = draw(case)
    k_PKZH, v_PKZH, k_scale_PKZ, v_scale_PKZ = filled_pages(case, op, kv_dtype)
    sides = []
    for stored_PKZH, scale_PKZ in ((k_PKZH, k_scale_PKZ), (v_PKZH, v_scale_PKZ)):
        x_PZKH = (stored_PKZH.astype(np.float64) * scale_PKZ[..., None]).swapaxes(1, 2)
        tables = (drawn.batch.page_table_BM[b, : case.num_pages(b)] for b in range(len(case.context_lens)))
        sides.append(
            tuple(x_PZKH[t].reshape(-1, *x_PZKH.shape[2:])[:n] for t, n in zip(tables, case.context_lens, strict=True))
        )
    return expected(dataclasses.replace(drawn, k=sides[0], v=sides[1]))


def error_over(case: AttentionCase, kv_dtype: str, pages, op: AttentionOp = INTERPRETED) -> float:
    """The largest over the rows that mean something; infinite when an output is not finite."""
    drawn = draw(case)
    program = attender(op, case.window, case.soft_cap, case.page_size, drawn.max_query_len, case.scale)
    out_TKGH = np.asarray(program(drawn.q_TKGH, pages, drawn.batch)).astype(np.float64)
    rows = zip(drawn.batch.query_start_R, dequantized(case, kv_dtype, op), case.context_lens, strict=False)
    errors = [np.abs(out_TKGH[i : i + len(want)] - want).max() for i, want, n in rows if n and len(want)]
    return max(errors) if np.isfinite(errors).all() else np.inf


QUANTIZED = [
    pytest.param(BY_NAME[name], kv_dtype, id=f"{name}-{kv_dtype}", marks=[] if is_quick else pytest.mark.slow)
    for name, is_quick in (("decode", True), ("mixed", True), ("decode_long_tail", False), ("bfloat16_mixed", False))
    for kv_dtype in KV_DTYPES
]


@pytest.mark.parametrize(("case", "kv_dtype"), QUANTIZED)
def test_equals_attention_over_the_dequantized_keys_and_values(case, kv_dtype):
    assert error_over(case, kv_dtype, filled_pages(case, INTERPRETED, kv_dtype)) <= TOLERANCES[case.dtype]


@pytest.mark.parametrize(("case", "kv_dtype"), [p for p in QUANTIZED if p.values[0].dtype == "float32"])
def test_mutants_of_the_scales_are_seen(case, kv_dtype):
    k, v, k_scale, v_scale = filled_pages(case, INTERPRETED, kv_dtype)
    k_off, v_off = (np.roll(scale, 1, axis=2) for scale in (k_scale, v_scale))
    for scales in ((k_off, v_scale), (k_scale, v_off), (v_scale, k_scale), (2 * k_scale, v_scale)):
        assert error_over(case, kv_dtype, (k, v, *scales)) > 10 * TOLERANCES["float32"]


def test_a_nan_scale_spoils_its_own_row_and_no_other():
    case = BY_NAME["mixed"]
    drawn, row = draw(case), int(np.argmax(case.context_lens))
    pages = [a.copy() for a in filled_pages(case, INTERPRETED, "int8")]
    pages[3][drawn.batch.page_table_BM[row, 0]] = np.nan
    program = attender(INTERPRETED, None, None, case.page_size, drawn.max_query_len, case.scale)
    is_nan_T = np.isnan(np.asarray(program(drawn.q_TKGH, tuple(pages), drawn.batch))).all((1, 2, 3))
    start, end = drawn.batch.query_start_R[row : row + 2]
    assert is_nan_T[start:end].all()
    assert is_nan_T.sum() == end - start


# ---------------------------------------------------------------------------------------------------------------------
# The write


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", *KV_DTYPES])
def test_what_is_written_is_what_xla_writes_and_nothing_else_changes(kv_dtype):
    """12 tokens over two pages and two of padding, three KV heads of 24 numbers: neither is a power of 2."""
    rng = np.random.default_rng(5)
    k_TKH, v_TKH = (rng.standard_normal((14, 3, 24)).astype(np.float32) for _ in range(2))
    k_TKH[3, 1, 2] = np.nan
    page_T = np.array([4] * 5 + [2] * 7 + [0, 0], np.int32)
    offset_T = np.array([*range(11, 16), *range(7), 0, 0], np.int32)
    old = jax.tree.map(lambda s: np.full(s.shape, 5, s.dtype), OP.page_shapes(6, 3, 24, 16, jnp.dtype(kv_dtype)))
    new = writer(INTERPRETED)(old, k_TKH, v_TKH, page_T, offset_T)
    theirs = writer(xla.OP)((old[0].swapaxes(2, 3), *old[1:]), k_TKH, v_TKH, page_T, offset_T)
    theirs = (theirs[0].swapaxes(2, 3), *theirs[1:])
    for ours, wanted in zip(new, theirs, strict=True):
        ours, wanted = (np.asarray(a).astype(np.float32) for a in (ours, wanted))
        assert np.array_equal(ours[1:], wanted[1:], equal_nan=True)
        assert (ours[[1, 3, 5]] == 5).all()


def test_8_bit_pages_whose_offsets_would_wrap_are_refused():
    def write(num_pages, kv_dtype):
        tokens, ids = jax.ShapeDtypeStruct((2, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
        jax.eval_shape(OP.write, OP.page_shapes(num_pages, 8, 128, 64, kv_dtype), tokens, tokens, ids, ids)

    write(2**15, jnp.int8)  # 2 GiB
    write(2**16 + 1, jnp.int8)  # more than 4 GiB: 64-bit offsets
    write(2**15 + 1, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="use at most 32768 pages"):
        write(2**15 + 1, jnp.int8)


def test_8_bit_rounding_is_to_the_nearest_and_ties_go_to_even():
    x_H = np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5] + [0.0] * 8, np.float32)
    pages = jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), OP.page_shapes(2, 1, 16, 16, jnp.int8))
    token = x_H[None, None]
    k, _, scale, _ = writer(INTERPRETED)(pages, token, token, np.ones(1, np.int32), np.zeros(1, np.int32))
    assert scale[1, 0, 0] == 1.0
    assert k[1, 0, 0, :8].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


# ---------------------------------------------------------------------------------------------------------------------
# Work lists

ROWS, WIDTH, Z = 8, 64, 16


@functools.cache
def preparer(max_query_len: int, window: int | None):
    """`prepare`, and the tiles of 5 tokens that `attend` makes of it, compiled for 128 tokens."""

    @jax.jit
    def prepare(batch):
        work = INTERPRETED.prepare(
            batch, num_tokens=128, max_query_len=max_query_len, page_size=Z, sliding_window=window
        )
        return work, list_tiles(batch, max_short=work.max_short, num_tokens=128, tile=5)

    return prepare


def batch_of(lens: list[tuple[int, int]]) -> RaggedBatch:
    """Of (context, query) lengths; an odd page number for every entry."""
    queries = [q for _, q in lens] + [0] * (ROWS - len(lens))
    contexts = [c for c, _ in lens] + [0] * (ROWS - len(lens))
    return RaggedBatch(
        np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH) * 2 + 1,
        np.array(contexts, np.int32),
        np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
    )


def lengths(most_queries: int):
    """Up to 8 rows of (context, query) lengths, 128 tokens at most; (0, 1) is a frozen row."""
    row = st.integers(0, most_queries).flatmap(
        lambda q: st.tuples(st.sampled_from([0, q, q + 1, 200, 700, WIDTH * Z]).map(lambda c: max(c, q)), st.just(q))
    )
    return st.lists(row | st.just((0, 1)), min_size=1, max_size=ROWS).filter(lambda r: sum(q for _, q in r) <= 128)


@settings(max_examples=60)
@given(lens=lengths(100), max_query_len=st.sampled_from([8, 128]), window=st.sampled_from([None, 300]))
def test_items_and_tiles_cover_every_position_and_token_once(lens, max_query_len, window):
    lens = [(c, min(q, max_query_len)) for c, q in lens]
    batch = batch_of(lens)
    work, tiles = jax.tree.map(np.asarray, preparer(max_query_len, window)(batch))
    items, num_items, num_tiles = work.items, int(work.items.num_items_1[0]), int(tiles.num_tiles_1[0])
    assert work.max_short == (8 if max_query_len == 8 else 4)
    assert num_items <= len(items.row_W)
    assert num_tiles <= len(tiles.row_N)
    for row, (context, length) in enumerate(lens):
        mine = [i for i in range(num_items) if items.row_W[i] == row]
        tokens = [
            tiles.token_N[i] + j for i in range(num_tiles) if tiles.row_N[i] == row for j in range(tiles.queries_N[i])
        ]
        start = int(batch.query_start_R[row])
        if 0 < length <= work.max_short:
            assert mine == list(range(items.first_item_B[row], items.first_item_B[row] + items.items_B[row]))
            assert len(mine) >= 1
            first = 0 if window is None else max(0, context - length + 1 - window)
            positions = [p for i in mine for p in range(items.first_W[i], items.end_W[i])]
            assert positions == list(range(first // ALIGN * ALIGN, context))
            assert not tokens
        else:
            assert not mine
            assert items.items_B[row] == 0
            assert tokens == list(range(start, start + length))
    for i in range(num_tiles):
        row = tiles.row_N[i]
        assert tiles.position_N[i] - tiles.token_N[i] == lens[row][0] - int(batch.query_start_R[row + 1])


def test_one_long_row_and_many_short_ones_make_as_many_items():
    sizes = BlockSizes()
    most = sizes.num_splits * sizes.split_keys

    def items_of(context_lens, width):
        rows = len(context_lens)
        batch = RaggedBatch(
            np.zeros((rows, width), np.int32), np.array(context_lens, np.int32), np.arange(rows + 1, dtype=np.int32)
        )
        prepare = functools.partial(
            INTERPRETED.prepare, num_tokens=rows, max_query_len=1, page_size=64, sliding_window=None
        )
        return int(jax.jit(prepare)(batch).items.num_items_1[0])

    assert items_of([most], most // 64) == sizes.num_splits
    assert items_of([4 * most], 4 * most // 64) == sizes.num_splits
    assert items_of([most // 8] * 8, most // 64) == sizes.num_splits
    assert items_of([100] * 8, most // 64) == 8


# ---------------------------------------------------------------------------------------------------------------------
# Everything together


@pytest.mark.slow
@settings(max_examples=12)
@given(lens=lengths(60), window=st.sampled_from([None, 40]))
def test_random_ragged_batches(lens, window):
    """Against `xla`, over pages in an order of their own; the others hold NaN."""
    batch = batch_of(lens)
    pages = ROWS * WIDTH * 2
    rng = np.random.default_rng(len(lens))
    k_PKZH, v_PKZH = (filled_with_nan((pages, 2, Z, 64), np.float32) for _ in range(2))
    q_TKGH = rng.standard_normal((128, 2, 3, 64)).astype(np.float32)
    table_BM = np.zeros((ROWS, WIDTH), np.int32)
    for row, (context, _) in enumerate(lens):
        own = batch.page_table_BM[row, : -(-context // Z)]
        table_BM[row, : len(own)] = own
        k_PKZH[own], v_PKZH[own] = rng.standard_normal((2, len(own), 2, Z, 64))
    batch = batch._replace(page_table_BM=table_BM)
    ours = attender(INTERPRETED, window, None, Z, 128, 0.125)(q_TKGH, (k_PKZH, v_PKZH), batch)
    theirs = attender(xla.OP, window, None, Z, 128, 0.125)(q_TKGH, (k_PKZH.swapaxes(2, 3), v_PKZH), batch)
    assert np.isfinite(ours).all()
    for row, (context, length) in enumerate(lens):
        start = int(batch.query_start_R[row])
        if context:
            np.testing.assert_allclose(
                ours[start : start + length], theirs[start : start + length], rtol=0, atol=2 * TOLERANCES["float32"]
            )


@pytest.mark.slow
def test_heads_divide_over_devices_inside_a_loop_that_carries_the_pages():
    """Two rounds of write and attend under shard_map, pages donated: as on one device."""
    case = BY_NAME["decode"]
    drawn = draw(case)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    heads, by_head = PartitionSpec(None, "model"), PartitionSpec()

    def rounds(q_TKGH, pages, batch):
        work = INTERPRETED.prepare(
            batch, num_tokens=q_TKGH.shape[0], max_query_len=1, page_size=case.page_size, sliding_window=None
        )
        offset_T = (batch.context_len_B - 1) % case.page_size
        page_T = batch.page_table_BM[jnp.arange(8), (batch.context_len_B - 1) // case.page_size]

        def body(carry):
            i, q_TKGH, pages = carry
            pages = INTERPRETED.write(pages, q_TKGH[:, :, 0], q_TKGH[:, :, 1], page_T, offset_T)
            return i + 1, INTERPRETED.attend(q_TKGH, pages, work, scale=case.scale), pages

        return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, q_TKGH, pages))[1:]

    alone_TKGH, alone_pages = jax.jit(rounds)(drawn.q_TKGH, filled_pages(case, INTERPRETED), drawn.batch)
    spread = jax.shard_map(
        rounds, mesh=mesh, in_specs=(heads, heads, by_head), out_specs=(heads, heads), check_vma=False
    )
    out_TKGH, pages = jax.jit(spread, donate_argnums=1)(
        drawn.q_TKGH, jax.tree.map(jnp.asarray, filled_pages(case, INTERPRETED)), drawn.batch
    )
    assert np.array_equal(out_TKGH, alone_TKGH)
    for ours, theirs in zip(pages, alone_pages, strict=True):
        assert np.array_equal(ours, theirs, equal_nan=True)
    assert not np.array_equal(alone_TKGH, run(case, INTERPRETED)), "the rounds did change something"


@pytest.mark.parametrize("group", [1, 5, 64])
@pytest.mark.parametrize(("head_dim", "dtype", "kv_dtype"), [(256, "float32", "int8"), (128, "bfloat16", "bfloat16")])
def test_every_group_has_tiles(group, head_dim, dtype, kv_dtype):
    """Traced only: tiles hold at least one token, and a decode tile's blocks of rows all of them."""

    def step(q_TKGH, pages, batch):
        work = OP.prepare(batch, num_tokens=40, max_query_len=40, page_size=64, sliding_window=None)
        return OP.attend(q_TKGH, pages, work, scale=1.0)

    q_TKGH = jax.ShapeDtypeStruct((40, 2, group, head_dim), dtype)
    batch = RaggedBatch(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 8), (3,), (4,))))
    jaxpr = jax.make_jaxpr(step)(q_TKGH, OP.page_shapes(9, 2, head_dim, 64, jnp.dtype(kv_dtype)), batch)
    grids = {
        eqn.params["name"].removeprefix("ragged_paged_attention_gpu_"): eqn.params["grid_mapping"].grid
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "pallas_call"
    }
    rows = default_block_sizes(head_dim=head_dim, dtype=dtype).decode_rows
    assert sorted(grids) == ["combine", "decode", "prefill"]
    assert grids["decode"][0] == 2 * max(1, -(-4 * group // rows))
    assert grids["combine"] == (2, 4, 3)


def needs(**values) -> AttentionNeeds:
    return AttentionNeeds(**{"platform": "gpu", **values})


def test_it_says_why_it_cannot_run():
    for runs in ({}, {"head_dim": 256, "page_size": 16, "dtype": "bfloat16", "kv_dtype": "int8"}, {"platform": "cuda"}):
        assert OP.why_not(needs(**runs)) is None
    assert "for NVIDIA GPUs" in OP.why_not(needs(platform="cpu"))
    assert "head_dim is 512" in OP.why_not(needs(head_dim=512))
    assert "100 query heads" in OP.why_not(needs(group=100))
    assert "page_size is 20" in OP.why_not(needs(page_size=20))
    assert "float16" in OP.why_not(needs(dtype="float16"))
    assert "pages of float8_e5m2" in OP.why_not(needs(kv_dtype="float8_e5m2"))
    assert INTERPRETED.why_not(needs(platform="cpu")) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_default_blocks_are_powers_of_2_that_divide_the_default_page(head_dim, dtype):
    sizes = default_block_sizes(head_dim=head_dim, dtype=dtype)
    for size in (sizes.decode_rows, sizes.decode_keys, sizes.prefill_rows, sizes.prefill_keys):
        assert size >= 16
        assert size & (size - 1) == 0
    assert OP.default_page_size % sizes.decode_keys == 0
    # Lists are made before head_dim is known.
    shared = ("split_keys", "num_splits", "short_queries")
    assert all(getattr(sizes, name) == getattr(BlockSizes(), name) for name in shared)


@pytest.fixture
def gpu():
    """Run these with JAX_PLATFORMS=cuda,cpu."""
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU here")


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_compiled_for_a_gpu_it_equals_attention_over_contiguous_keys_and_values(case, gpu):
    out_TKGH = run(case, OP)
    assert np.isfinite(out_TKGH).all()
    assert largest_error(case, out_TKGH) <= GPU_TOLERANCES[case.dtype]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("case", "kv_dtype"), QUANTIZED)
def test_compiled_for_a_gpu_it_equals_attention_over_the_dequantized_keys_and_values(case, kv_dtype, gpu):
    assert error_over(case, kv_dtype, filled_pages(case, OP, kv_dtype), OP) <= GPU_TOLERANCES[case.dtype]


def test_pools_are_larger_than_any_case():
    assert max(len(draw(case).owned) for case in CASES) < NUM_PAGES
