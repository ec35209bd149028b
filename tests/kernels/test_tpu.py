"""The TPU kernel, simulated on the CPU: memory spaces, copies and semaphores included.

Memory that nothing has written holds NaN, and an access out of range raises. Blocks are small, so that a few positions
make several blocks and tiles; what the kernel costs on a chip is `scripts/kernel_report.py`'s to say.
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
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # where the simulator leaves what it found
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.ragged_paged_attention import AttentionNeeds, tpu
from pallas_kernels.ragged_paged_attention.cases import CASES, AttentionCase
from pallas_kernels.ragged_paged_attention.tpu import BlockSizes, default_block_sizes, make_op

SMALL = BlockSizes(pages_per_block=2, queries_per_tile=16)
OP = make_op(interpret=pltpu.InterpretParams(), block_sizes=SMALL)
QUICK = (
    "decode",
    "frozen_rows_decode",
    "frozen_rows_mixed",
    "nothing_at_all",
    "mixed",
    "head_dim_80",
    "window_decode",
    "soft_cap_decode",
    "bfloat16_mixed",
)
QUANTIZED = ("int8", "float8_e4m3fn")
# bfloat16 keys and values often lie midway between two numbers of 8 bits, where the last bit of the scale decides which
# one is stored: a step of float8 is up to 1 / 8 of a value, and a few of the 20 weights or more are of such.
QUANTIZED_TOLERANCES = {"float32": TOLERANCES["float32"], "bfloat16": 4e-2}


def quick_or_slow(cases):
    return [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.slow) for c in cases]


@pytest.mark.parametrize("case", quick_or_slow(CASES))
def test_equals_attention_over_contiguous_keys_and_values(case):
    out_TKGH = run(case, OP)
    assert np.isfinite(out_TKGH).all(), "outputs of padding and of frozen rows must be finite too"
    assert largest_error(case, out_TKGH) <= TOLERANCES[case.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("case", [BY_NAME[n] for n in ("mixed", "decode_long_tail", "window_mixed")], ids=str)
def test_default_block_sizes_give_the_same(case):
    op = make_op(interpret=pltpu.InterpretParams())
    assert largest_error(case, run(case, op)) <= TOLERANCES[case.dtype]


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(BY_NAME[n], id=n, marks=() if n in ("decode", "mixed") else pytest.mark.slow)
        for n in ("decode", "mixed", "window_mixed", "soft_cap", "head_dim_128", "page_size_64", "bfloat16_mixed")
    ],
)
def test_quantized_pages_give_attention_of_the_rounded_keys_and_values(case, kv_dtype):
    out_TKGH = run(case, OP, kv_dtype=kv_dtype)
    assert np.isfinite(out_TKGH).all()
    assert largest_error(case, out_TKGH, kv_dtype=kv_dtype) <= QUANTIZED_TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", quick_or_slow(c for c in CASES if sees_two(c)))
def test_mutant_doubled_scale_is_seen(case):
    assert largest_error(case, run(case, OP, q_scale=2)) > 10 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", quick_or_slow(c for c in CASES if sees_two(c) and c.window is None))
def test_mutant_shifted_mask_is_seen(case):
    mutant = shortened(case)
    if mutant is None:
        pytest.skip("every row computes its whole context: a shift leaves it no first position")
    assert largest_error(case, run(case, OP, batch=mutant)) > 10 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("case", quick_or_slow(c for c in CASES if max(c.context_lens)))
def test_mutant_wrong_page_is_seen(case):
    assert largest_error(case, run(case, OP, batch=with_wrong_page(case))) > 10 * TOLERANCES[case.dtype]


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_mutant_doubled_value_scale_is_seen(kv_dtype):
    case = BY_NAME["decode"]
    rows, scales_PKW = filled_pages(case, OP, kv_dtype)
    scales_PKW = scales_PKW.copy()
    scales_PKW[:, :, case.page_size : 2 * case.page_size] *= 2
    program = attender(OP, None, None, case.page_size, 1, case.scale)
    out_TKGH = np.asarray(program(draw(case).q_TKGH, (rows, scales_PKW), draw(case).batch))
    assert largest_error(case, out_TKGH, kv_dtype=kv_dtype) > 10 * TOLERANCES["float32"]


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("case_name", ["decode", "mixed"])
def test_a_row_whose_own_pages_are_not_finite_spoils_no_other(case_name, kv_dtype):
    case = BY_NAME[case_name]
    drawn, row = draw(case), int(np.argmax(case.context_lens))
    poisoned = drawn.batch.page_table_BM[row, : case.num_pages(row)]

    def poison(array):
        array = array.copy()
        array[poisoned] = filled_with_nan(array.shape[1:], array.dtype)
        return array

    program = attender(OP, case.window, case.soft_cap, case.page_size, drawn.max_query_len, case.scale)
    pages = jax.tree.map(poison, filled_pages(case, OP, kv_dtype))
    out_TKGH, clean_TKGH = np.asarray(program(drawn.q_TKGH, pages, drawn.batch)), run(case, OP, kv_dtype=kv_dtype)
    start, end = drawn.batch.query_start_R[row : row + 2]
    assert np.isnan(out_TKGH[start:end]).all()
    others = [*range(start), *range(end, sum(case.query_lens))]
    assert np.array_equal(out_TKGH[others], clean_TKGH[others])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_written_values_come_back_and_nothing_else_changes(dtype):
    """Forty tokens over the end of page 3 into page 1, one of another row, three of padding that are not written."""
    page_T = np.array([3] * 20 + [1] * 20 + [2] + [0] * 3, np.int32)
    offset_T = np.array([*range(12, 32), *range(20), 17, 0, 1, 0], np.int32)
    rng = np.random.default_rng(0)
    dtype, activations = jnp.dtype(dtype), jnp.float32 if dtype == "float32" else jnp.bfloat16
    # Old values are in [1, 2) once stored, new ones negative: what changed differs.
    k_TKH, v_TKH = (-rng.uniform(1, 1.9, (44, 2, 64)).astype(activations) for _ in range(2))
    shapes = OP.page_shapes(5, 2, 64, 32, dtype)
    before = jax.tree.map(lambda s: rng.uniform(1, 1.9, s.shape).astype(s.dtype), shapes)
    after = writer(OP)(before, k_TKH, v_TKH, page_T, offset_T)
    written = np.zeros((5, 32), bool)
    written[page_T[:41], offset_T[:41]] = True
    changed_PKZC = before[0] != np.asarray(after[0])
    assert (changed_PKZC == written[:, None, :, None]).all()
    if len(before) == 2:
        changed_PKW = before[1] != np.asarray(after[1])
        assert (changed_PKW[:, :, :64] == np.concatenate([written, written], axis=1)[:, None]).all()
        assert not changed_PKW[:, :, 64:].any()
        stored = np.asarray(after[0])[3, :, 12, :64].astype(np.float32) * np.asarray(after[1])[3, :, 12, None]
        np.testing.assert_allclose(stored, k_TKH[0].astype(np.float32), rtol=0.07 if dtype.kind != "i" else 0.01)
    else:
        assert np.array_equal(np.asarray(after[0])[3, :, 12, :64], k_TKH[0])
        assert np.array_equal(np.asarray(after[0])[2, :, 17, 64:], v_TKH[40])


def test_padded_lanes_are_part_of_the_stated_shapes():
    def bytes_of(head_dim, dtype):
        return sum(np.prod(s.shape) * s.dtype.itemsize for s in OP.page_shapes(3, 2, head_dim, 64, jnp.dtype(dtype)))

    positions = 3 * 2 * 64
    assert bytes_of(64, "bfloat16") == positions * 128 * 2
    assert bytes_of(80, "bfloat16") == positions * 256 * 2
    assert bytes_of(256, "bfloat16") == positions * 512 * 2
    assert bytes_of(128, "int8") == positions * (256 + 2 * 4)


def races_of(case: AttentionCase, op, kv_dtype=None) -> bool:
    """Whether the simulator saw one in writing or attending."""
    found = []
    filled_pages(case, op, kv_dtype)
    found.append(interpret_pallas_call.races.races_found)
    assert largest_error(case, run(case, op, kv_dtype=kv_dtype), kv_dtype=kv_dtype) <= TOLERANCES[case.dtype]
    found.append(interpret_pallas_call.races.races_found)
    return any(found)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("case_name", ["decode", "mixed", "frozen_rows_mixed", "window_decode", "prefill_chunk"])
def test_no_races_between_copies_and_computation(case_name, kv_dtype):
    op = make_op(interpret=pltpu.InterpretParams(detect_races=True), block_sizes=SMALL)
    assert not races_of(BY_NAME[case_name], op, kv_dtype)


@pytest.mark.slow
def test_mutant_missing_wait_is_a_race(monkeypatch):
    """The simulator does see a block that is read while it is still being copied."""
    op = make_op(interpret=pltpu.InterpretParams(detect_races=True, dma_execution_mode="eager"), block_sizes=SMALL)
    copies = tpu._block_copies

    def without_waiting(refs, z, tile, block, slot, act):
        return copies(refs, z, tile, block, slot, (lambda copy: None) if act is tpu._wait else act)

    case = BY_NAME["decode_page_edge"]
    pages = filled_pages(case, op)
    monkeypatch.setattr(tpu, "_block_copies", without_waiting)
    program = attender(op, None, None, case.page_size, 1, case.scale)
    jax.block_until_ready(program(draw(case).q_TKGH, pages, draw(case).batch))
    assert interpret_pallas_call.races.races_found


ROW = st.integers(0, 70).flatmap(lambda c: st.tuples(st.just(c), st.integers(0, min(c, 40))))


@pytest.mark.slow
@settings(max_examples=12)
@given(
    rows=st.lists(ROW, min_size=1, max_size=5).filter(lambda rows: sum(q for _, q in rows) <= 64),
    window=st.sampled_from([None, 1, 7, 16, 40]),
    kv_dtype=st.sampled_from([None, "int8"]),
)
def test_random_ragged_batches(rows, window, kv_dtype):
    contexts, queries = (tuple(x) for x in zip(*rows, strict=True))
    case = AttentionCase(name="random", context_lens=contexts, query_lens=queries, window=window)
    out_TKGH = run(case, OP, kv_dtype=kv_dtype)
    assert np.isfinite(out_TKGH).all()
    assert largest_error(case, out_TKGH, kv_dtype=kv_dtype) <= TOLERANCES["float32"]


@pytest.mark.parametrize("case_name", [pytest.param("decode"), pytest.param("mixed", marks=pytest.mark.slow)])
def test_heads_divided_over_a_mesh_give_the_same(case_name):
    case = dataclasses.replace(BY_NAME[case_name], num_kv_heads=2)
    drawn, pages = draw(case), filled_pages(case, OP)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    heads = PartitionSpec(None, "model")

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(heads, heads, PartitionSpec()), out_specs=heads, check_vma=False
    )
    def attend(q_TKGH, pages, batch):
        work = OP.prepare(
            batch,
            num_tokens=q_TKGH.shape[0],
            max_query_len=drawn.max_query_len,
            page_size=case.page_size,
            sliding_window=None,
        )
        return OP.attend(q_TKGH, pages, work, scale=case.scale, soft_cap=None)

    assert OP.kv_head_axis == 1
    out_TKGH = np.asarray(attend(drawn.q_TKGH, pages, drawn.batch))
    assert largest_error(case, out_TKGH) <= TOLERANCES[case.dtype]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"platform": "cpu"}, "TPU compiler"),
        ({"head_dim": 512}, "head_dim is 512"),
        ({"page_size": 8, "kv_dtype": "bfloat16"}, "page_size is 8; set it to a power of two from 16 to 256"),
        ({"page_size": 48}, "page_size is 48"),
        ({"dtype": "float16"}, "float16"),
        ({"kv_dtype": "int4"}, "int4"),
    ],
)
def test_what_cannot_run_says_why(changes, why):
    assert tpu.why_not(AttentionNeeds(platform="tpu")) is None
    fits = {"platform": "tpu", "head_dim": 128, "group": 4, "page_size": 64, "dtype": "bfloat16", "kv_dtype": "int8"}
    assert tpu.why_not(AttentionNeeds(**fits)) is None
    assert why in tpu.why_not(AttentionNeeds(**(fits | changes)))


def test_default_blocks_are_whole_pages_within_bounds():
    for num_kv_heads in (1, 8, 32):
        for page_size in (16, 64, 256):
            sizes = default_block_sizes(num_kv_heads, 128, page_size, jnp.bfloat16)
            assert 128 <= sizes.pages_per_block * page_size <= 2048


def test_expected_values_depend_on_the_pages_dtype():
    """Guards the tests above: rounding to 8 bits is far outside the tolerance."""
    drawn = draw(BY_NAME["decode"])
    exact, rounded = (np.concatenate(expected(drawn, d)) for d in (None, "int8"))
    assert np.abs(exact - rounded).max() > 10 * TOLERANCES["float32"]
