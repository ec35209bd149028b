"""Keys and values in 8 bits: the rounding itself, and the op over rounded pages against float64 over what they mean."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import BY_NAME, ROWS, TOLERANCES, attender, draw, expected, filled_pages, run, writer

from pallas_kernels.ragged_paged_attention import AttentionNeeds, AttentionOp, get_attention
from pallas_kernels.ragged_paged_attention.cases import CASES, AttentionCase
from pallas_kernels.ragged_paged_attention.kv_quant import LARGEST, quantize_heads

NAMES = ("reference", "xla")
KV_DTYPES = tuple(LARGEST)
POSITION_AXIS = {"reference": 1, "xla": 2}  # of the scales
# Each is compiled for each dtype: what int8 shows in every case, fp8 and the mutants show in these, and in all if slow.
CORE = ("decode", "mixed", "window_mixed", "soft_cap", "head_dim_80", "page_size_64", "bfloat16_mixed")


def slow_but_core(cases: Iterable[AttentionCase]) -> list[Any]:
    """Parameters: cases that are not in CORE are marked slow."""
    return [pytest.param(case, id=case.name, marks=() if case.name in CORE else pytest.mark.slow) for case in cases]


# The output of bfloat16 queries is rounded too coarsely for ten times that to be less than what a wrong scale does.
MUTABLE = slow_but_core(case for case in CASES if max(case.context_lens) and case.dtype == "float32")


def op_of(name: str, kv_dtype: str | None = None) -> AttentionOp:
    return get_attention(name, AttentionNeeds(platform="cpu", kv_dtype=kv_dtype)).op


def heads(spread: float, dtype: str = "float32") -> np.ndarray:
    """[500, 2, 64] normal draws; the heads' own sizes spread over that many powers of ten."""
    rng = np.random.default_rng(3)
    size_TK1 = 10.0 ** rng.uniform(-spread, spread, (500, 2, 1))
    return (size_TK1 * rng.standard_normal((500, 2, 64))).astype(jnp.dtype(dtype))


def quantized(x_TKH: np.ndarray, kv_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """As float64, and the scales."""
    stored_TKH, scale_TK = quantize_heads(jnp.asarray(x_TKH), kv_dtype)
    assert (stored_TKH.dtype, scale_TK.dtype) == (jnp.dtype(kv_dtype), jnp.float32)
    return np.asarray(stored_TKH).astype(np.float64), np.array(scale_TK)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_head_fills_the_range_of_its_dtype(kv_dtype, dtype):
    x_TKH = heads(3, dtype)
    stored_TKH, scale_TK = quantized(x_TKH, kv_dtype)
    peak_TK = np.abs(x_TKH.astype(np.float64)).max(-1)
    np.testing.assert_allclose(scale_TK, peak_TK / LARGEST[kv_dtype], rtol=1e-6)
    assert (np.abs(stored_TKH).max(-1) == LARGEST[kv_dtype]).all(), "a larger number would be NaN, or wrap"


def test_int8_is_at_most_half_a_step_off():
    x_TKH = heads(3)
    stored_TKH, scale_TK = quantized(x_TKH, "int8")
    off_TKH = np.abs(stored_TKH * scale_TK[..., None] - x_TKH) / scale_TK[..., None]
    assert off_TKH.max() <= 0.5 + 1e-5  # the quotient of up to 127 is itself rounded to 24 bits
    assert off_TKH.max() > 0.49


def test_fp8_is_at_most_one_part_in_sixteen_off():
    """Three bits behind the leading one; below 2**-6 the step is 2**-9."""
    x_TKH = heads(3)
    stored_TKH, scale_TK = quantized(x_TKH, "float8_e4m3fn")
    quotient_TKH = x_TKH / scale_TK[..., None].astype(np.float64)
    off_TKH, size_TKH = np.abs(stored_TKH - quotient_TKH), np.abs(quotient_TKH)
    is_normal_TKH = size_TKH >= 2.0**-6
    relative = off_TKH[is_normal_TKH] / size_TKH[is_normal_TKH]
    assert relative.max() <= 2.0**-4
    assert relative.max() > 2.0**-4.2
    assert off_TKH[~is_normal_TKH].max() <= 2.0**-10


def test_int8_ties_go_to_even():
    x_H = np.array([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5], np.float32)
    stored_TKH, scale_TK = quantized(x_H[None, None], "int8")
    assert scale_TK[0, 0] == 1.0
    assert stored_TKH[0, 0].tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_head_of_zeros_has_scale_one(kv_dtype):
    stored_TKH, scale_TK = quantized(np.zeros((1, 2, 8), np.float32), kv_dtype)
    assert (stored_TKH == 0).all()
    assert (scale_TK == 1).all()


@pytest.mark.parametrize("size", [1e-45, 1e-38, 3e38])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_extreme_sizes_stay_finite(kv_dtype, size):
    x_TKH = np.full((1, 1, 8), size, np.float32) * np.linspace(-1, 1, 8, dtype=np.float32)
    stored_TKH, scale_TK = quantized(x_TKH, kv_dtype)
    assert np.isfinite(stored_TKH).all()
    assert np.abs(stored_TKH * scale_TK[..., None] - x_TKH).max() <= max(2.0**-4 * size, 1e-37)


@pytest.mark.parametrize("fault", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_head_that_is_not_finite_has_a_nan_scale_and_no_other_head(kv_dtype, fault):
    x_TKH = heads(0)
    clean_TKH, clean_scale_TK = quantized(x_TKH, kv_dtype)
    x_TKH[7, 1, 5] = fault
    stored_TKH, scale_TK = quantized(x_TKH, kv_dtype)
    assert np.isfinite(stored_TKH).all()
    assert np.argwhere(np.isnan(scale_TK)).tolist() == [[7, 1]]
    clean_TKH[7, 1], clean_scale_TK[7, 1] = stored_TKH[7, 1], np.nan
    assert np.array_equal(stored_TKH, clean_TKH)
    assert np.array_equal(scale_TK, clean_scale_TK, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_every_array_of_pages_has_the_kv_heads_on_the_same_axis(name, kv_dtype):
    op = op_of(name, kv_dtype)
    leaves = jax.tree.leaves(op.page_shapes(11, 3, 64, 16, jnp.dtype(kv_dtype)))
    assert [leaf.shape[op.kv_head_axis] for leaf in leaves] == [3] * 4
    assert [leaf.shape[0] for leaf in leaves] == [11] * 4
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == 11 * 2 * 16 * 3 * (64 + 4)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_both_implementations_write_the_same_numbers(kv_dtype):
    """The reference quantizes by code of its own. What was not written keeps its old value, in all four arrays."""
    x_TKH = heads(2)[:20]
    page_T, offset_T = np.repeat(np.array([3, 1], np.int32), 10), np.arange(20, dtype=np.int32) % 10
    found = {}
    for name in NAMES:
        shapes = op_of(name).page_shapes(5, 2, 64, 16, jnp.dtype(kv_dtype))
        pages = jax.tree.map(lambda s: np.full(s.shape, 5, s.dtype), shapes)
        found[name] = [np.asarray(a) for a in writer(op_of(name))(pages, x_TKH, 2 * x_TKH, page_T, offset_T)]
    turned = as_reference(found["xla"])
    for ours, theirs in zip(turned, found["reference"], strict=True):
        assert np.array_equal(ours, theirs)
        assert (ours[[0, 2, 4]].astype(np.float32) == 5).all()
        assert (ours[[1, 3], 10:].astype(np.float32) == 5).all()
    stored_TKH, scale_TK = quantized(2 * x_TKH, kv_dtype)
    assert np.array_equal(turned[1][page_T, offset_T].astype(np.float64), stored_TKH)
    assert np.array_equal(turned[3][page_T, offset_T], scale_TK)


@functools.cache
def meant(case: AttentionCase, name: str, kv_dtype: str) -> list[list[np.ndarray]]:
    """float64 keys and values that the filled pages stand for, [S, K, H] per row: stored times scale.

    Read back from the pages, for a quotient that lies on a tie may fall either way.
    """
    op, drawn = op_of(name), draw(case)
    pages = filled_pages(case, op, kv_dtype)
    k_PZKH, v_PZKH, k_scale_PZK, v_scale_PZK = pages if name == "reference" else as_reference(pages)
    rows = []
    for stored_PZKH, scale_PZK in ((k_PZKH, k_scale_PZK), (v_PZKH, v_scale_PZK)):
        x_PZKH = stored_PZKH.astype(np.float64) * scale_PZK[..., None].astype(np.float64)
        rows.append([])
        for row, length in enumerate(case.context_lens):
            own_M = drawn.batch.page_table_BM[row, : case.num_pages(row)]
            rows[-1].append(x_PZKH[own_M].reshape(-1, *x_PZKH.shape[2:])[:length])
    return rows


def as_reference(pages) -> tuple[np.ndarray, ...]:
    """Pages of `xla` in the order of axes of `reference`."""
    k_PKHZ, v_PKZH, k_scale_PKZ, v_scale_PKZ = (np.asarray(a) for a in pages)
    return k_PKHZ.transpose(0, 3, 1, 2), v_PKZH.swapaxes(1, 2), k_scale_PKZ.swapaxes(1, 2), v_scale_PKZ.swapaxes(1, 2)


@functools.cache
def wanted(case: AttentionCase, name: str, kv_dtype: str) -> list[np.ndarray]:
    """float64 outputs over what is meant."""
    k, v = meant(case, name, kv_dtype)
    return expected(dataclasses.replace(draw(case), k=tuple(k), v=tuple(v)))


def error_of(case: AttentionCase, name: str, kv_dtype: str, out_TKGH: np.ndarray) -> float:
    """The largest, over the rows that mean something; infinite when an output is not finite."""
    starts = draw(case).batch.query_start_R
    rows = zip(starts, wanted(case, name, kv_dtype), case.context_lens, strict=False)
    errors = [np.abs(out_TKGH[i : i + len(want)] - want).max() for i, want, n in rows if n and len(want)]
    return float(max(errors, default=0.0)) if np.isfinite(errors).all() else np.inf


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", [BY_NAME["decode"], BY_NAME["mixed"]], ids=lambda case: case.name)
def test_pages_mean_what_was_written_within_the_rounding(case, name, kv_dtype):
    step = 0.5 / 127 if kv_dtype == "int8" else 2.0**-4  # of the head's peak; of the number itself
    drawn = draw(case)
    for written, found in zip((drawn.k, drawn.v), meant(case, name, kv_dtype), strict=True):
        for x_SKH, y_SKH in zip(written, found, strict=True):
            size_SKH = np.abs(x_SKH.astype(np.float64))
            peak_SK1 = size_SKH.max(-1, keepdims=True)
            allowed_SKH = step * peak_SK1 if kv_dtype == "int8" else np.maximum(step * size_SKH, 3e-6 * peak_SK1)
            assert (np.abs(y_SKH - x_SKH) <= allowed_SKH * (1 + 1e-4)).all()


def assert_equals_attention_over_what_is_meant(case: AttentionCase, name: str, kv_dtype: str) -> None:
    out_TKGH = run(case, op_of(name, kv_dtype), kv_dtype=kv_dtype)
    assert np.isfinite(out_TKGH).all(), "outputs of padding and of frozen rows must be finite too"
    assert error_of(case, name, kv_dtype, out_TKGH) <= TOLERANCES[case.dtype]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_int8_equals_attention_over_the_dequantized_keys_and_values(case, name):
    assert_equals_attention_over_what_is_meant(case, name, "int8")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", slow_but_core(CASES))
def test_fp8_equals_attention_over_the_dequantized_keys_and_values(case, name):
    assert_equals_attention_over_what_is_meant(case, name, "float8_e4m3fn")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("case", slow_but_core(c for c in CASES if c.is_decode))
def test_the_decode_path_and_the_general_path_agree(case, kv_dtype):
    works = np.flatnonzero(case.context_lens)
    one, general = (run(case, op_of("xla"), max_query_len=n, kv_dtype=kv_dtype) for n in (1, ROWS))
    np.testing.assert_allclose(one[works], general[works], rtol=0, atol=TOLERANCES[case.dtype])


def error_over(case: AttentionCase, name: str, kv_dtype: str, pages) -> float:
    """`error_of` the outputs with other pages."""
    drawn = draw(case)
    program = attender(op_of(name), case.window, case.soft_cap, case.page_size, drawn.max_query_len, case.scale, 0)
    return error_of(case, name, kv_dtype, np.asarray(program(drawn.q_TKGH, pages, drawn.batch)))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", MUTABLE)
def test_mutant_scales_of_the_neighbour_position_are_seen(case, name, kv_dtype):
    k, v, *scales = filled_pages(case, op_of(name), kv_dtype)
    shifted = [np.roll(scale, 1, POSITION_AXIS[name]) for scale in scales]
    assert error_over(case, name, kv_dtype, (k, v, scales[0], shifted[1])) > 10 * TOLERANCES["float32"]
    if case.window != 1 and max(case.context_lens) > 1:  # where one key alone is seen its score does not matter
        assert error_over(case, name, kv_dtype, (k, v, shifted[0], scales[1])) > 10 * TOLERANCES["float32"]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", MUTABLE)
def test_mutant_swapped_scales_are_seen(case, name, kv_dtype):
    k, v, k_scale, v_scale = filled_pages(case, op_of(name), kv_dtype)
    assert error_over(case, name, kv_dtype, (k, v, v_scale, k_scale)) > 10 * TOLERANCES["float32"]


@pytest.mark.parametrize("leaf", [2, 3])
@pytest.mark.parametrize("case_name", ["decode", "mixed"])
@pytest.mark.parametrize("name", NAMES)
def test_a_nan_scale_spoils_its_own_row_and_no_other(name, case_name, leaf):
    case = BY_NAME[case_name]
    drawn, row = draw(case), int(np.argmax(case.context_lens))
    pages = [a.copy() for a in filled_pages(case, op_of(name), "int8")]
    pages[leaf][drawn.batch.page_table_BM[row, 0]] = np.nan
    program = attender(op_of(name), None, None, case.page_size, drawn.max_query_len, case.scale, 0)
    out_TKGH = np.asarray(program(drawn.q_TKGH, tuple(pages), drawn.batch))
    clean_TKGH = run(case, op_of(name), kv_dtype="int8")
    start, end = drawn.batch.query_start_R[row : row + 2]
    assert np.isnan(out_TKGH[start:end]).all()
    others = [*range(start), *range(end, sum(case.query_lens))]
    assert np.array_equal(out_TKGH[others], clean_TKGH[others])


@pytest.mark.parametrize("name", NAMES)
def test_pages_of_another_dtype_are_refused_with_those_that_are_known(name):
    with pytest.raises(NotImplementedError, match=r"pages of float8_e5m2; .*bfloat16.*int8.*float8_e4m3fn"):
        op_of(name, "float8_e5m2")
    for kv_dtype in ("float32", "bfloat16", *KV_DTYPES):
        assert op_of(name, kv_dtype).name == name
