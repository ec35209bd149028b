"""What is the native kernel's alone: work divided over threads, its refusals, and pages kept in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn import BY_NAME, TOLERANCES, attender, draw, filled_pages, largest_error, run
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import native_kernels

from pallas_kernels.ragged_paged_attention import AttentionNeeds, AttentionOp, RaggedBatch, get_attention
from pallas_kernels.ragged_paged_attention.cases import AttentionCase


def native_op() -> AttentionOp:
    return get_attention("cpu", AttentionNeeds(platform="cpu", native_folder=native_kernels())).op


def softmax_attention(q_GH, k_SH, v_SH, scale):
    """float64 [G, H]."""
    s_GS = q_GH.astype(np.float64) @ k_SH.astype(np.float64).T * scale
    p_GS = np.exp(s_GS - s_GS.max(1, keepdims=True))
    return p_GS @ v_SH.astype(np.float64) / p_GS.sum(1, keepdims=True)


@functools.cache
def filled(num_pages: int, page_size: int, dtype: str):
    """(pages, k, v [P, Z, K, H]) with every position of every page written."""
    op, rng = native_op(), np.random.default_rng(3)
    num_kv, head_dim = 2, 32
    shapes = op.page_shapes(num_pages, num_kv, head_dim, page_size, jnp.dtype(dtype))
    k, v = (rng.standard_normal((num_pages * page_size, num_kv, head_dim)).astype(np.float32) for _ in range(2))
    page_T, offset_T = (x.astype(np.int32) for x in np.divmod(np.arange(num_pages * page_size), page_size))
    pages = jax.jit(op.write)(jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes), k, v, page_T, offset_T)
    return pages, *(x.reshape(num_pages, page_size, num_kv, head_dim) for x in (k, v))


@pytest.mark.parametrize("contexts", [(4000,), (4001, 3), (2500, 2500), (1040, 16, 700)], ids=str)
@pytest.mark.parametrize("window", [None, 1500])
def test_long_rows_are_divided_over_threads_and_put_together(contexts, window):
    """Contexts long enough that one row's keys become several items."""
    op, page_size, group = native_op(), 16, 3
    num_pages = sum(-(-c // page_size) for c in contexts) + 1
    pages, k_PZKH, v_PZKH = filled(num_pages, page_size, "float32")
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.arange(1, num_pages, dtype=np.int32))
    table_BM = np.zeros((len(contexts), max(contexts) // page_size + 2), np.int32)
    for row, context in enumerate(contexts):
        count = -(-context // page_size)
        table_BM[row, :count], ids = ids[:count], ids[count:]
    batch = RaggedBatch(table_BM, np.array(contexts, np.int32), np.arange(len(contexts) + 1, dtype=np.int32))
    q_TKGH = rng.standard_normal((len(contexts), 2, group, 32)).astype(np.float32)

    @jax.jit
    def attend(q_TKGH, pages, batch):
        work = op.prepare(batch, num_tokens=q_TKGH.shape[0], max_query_len=1, page_size=16, sliding_window=window)
        return op.attend(q_TKGH, pages, work, scale=0.3)

    out_TKGH = np.asarray(attend(q_TKGH, pages, batch))
    for row, context in enumerate(contexts):
        first = 0 if window is None else max(0, context - window)
        for kv_head in range(2):
            k_SH, v_SH = (x[table_BM[row]].reshape(-1, 2, 32)[first:context, kv_head] for x in (k_PZKH, v_PZKH))
            want = softmax_attention(q_TKGH[row, kv_head], k_SH, v_SH, 0.3)
            np.testing.assert_allclose(out_TKGH[row, kv_head], want, rtol=0, atol=TOLERANCES["float32"])


@st.composite
def ragged_cases(draw_value) -> AttentionCase:
    """Batches of up to 8 rows within the shared padded shapes of `drawn.py`, so that few programs are compiled."""
    contexts, queries = [], []
    for _ in range(draw_value(st.integers(1, 8))):
        context = draw_value(st.one_of(st.integers(0, 40), st.sampled_from((16, 17, 32, 48, 120))))
        contexts.append(context)
        queries.append(draw_value(st.integers(min(1, context), min(context, 24))))
    return AttentionCase(name="random", context_lens=tuple(contexts), query_lens=tuple(queries))


@settings(max_examples=60)
@given(case=ragged_cases())
def test_random_ragged_batches(case):
    draw.cache_clear()  # cases are told apart by their sizes, and there are many
    out_TKGH = run(case, native_op())
    assert np.isfinite(out_TKGH).all()
    assert largest_error(case, out_TKGH) <= TOLERANCES["float32"]


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("name", ["decode", "mixed", "head_dim_80", "page_size_64", "window_mixed", "soft_cap"])
def test_stored_numbers_of_every_dtype_mean_what_the_reference_reads(name, kv_dtype):
    """The same stored pages, brought into the reference's order."""
    case = BY_NAME[name]
    pages = filled_pages(case, native_op(), kv_dtype)
    keys_PZKH = np.moveaxis(pages[0], 4, 3).transpose(0, 2, 3, 1, 4).reshape(pages[1].transpose(0, 2, 1, 3).shape)
    turned = (keys_PZKH, *(np.moveaxis(a, 1, 2) for a in pages[1:]))
    drawn, op = draw(case), get_attention("reference", AttentionNeeds(platform="cpu")).op
    attend = attender(op, case.window, case.soft_cap, case.page_size, drawn.max_query_len, case.scale)
    want_TKGH = np.asarray(attend(drawn.q_TKGH, turned, drawn.batch))
    real = sum(case.query_lens)
    got_TKGH = run(case, native_op(), kv_dtype=kv_dtype)
    np.testing.assert_allclose(got_TKGH[:real], want_TKGH[:real], rtol=0, atol=TOLERANCES["float32"])


def test_pages_are_written_in_place():
    """No copy of the pool: donated pages come back at the same address, from a loop as from a single call."""
    op = native_op()
    shapes = op.page_shapes(200, 2, 32, 16, jnp.dtype("float32"))

    def rounds(pages, k_TKH, page_T, offset_T):
        def one(_, pages):
            return op.write(pages, k_TKH, k_TKH, page_T, offset_T)

        return jax.lax.fori_loop(0, 3, one, tuple(pages))

    pages = tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)
    arguments = (np.ones((4, 2, 32), np.float32), np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32))
    compiled = jax.jit(rounds, donate_argnums=0).lower(pages, *arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 100_000, "a copy of the pool takes 3 MB"
    before = [a.unsafe_buffer_pointer() for a in pages]
    assert [a.unsafe_buffer_pointer() for a in compiled(pages, *arguments)] == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "tpu"}, "written for CPUs"),
        ({"page_size": 8}, "page_size is 8; it must be a multiple of 16"),
        ({"head_dim": 24}, "head_dim is 24; it must be a multiple of 16"),
        ({"kv_dtype": "float16"}, "pages of float16"),
        ({"native_folder": None}, "no folder of native kernels"),
    ],
    ids=str,
)
def test_what_it_cannot_run_is_refused_with_the_reason(changes, reason):
    needs = AttentionNeeds(**{"platform": "cpu", "native_folder": native_kernels(), **changes})
    with pytest.raises(NotImplementedError, match=reason):
        get_attention("cpu", needs)


def test_where_it_is_not_built_the_choice_says_so_and_how_to_build_it(tmp_path):
    choice = get_attention("auto", AttentionNeeds(platform="cpu", native_folder=tmp_path))
    assert choice.op.name == "xla"
    assert "not cpu: it is not built for this machine; `python -m jaxinfer.native`" in choice.reason


def test_where_it_is_built_it_is_the_default():
    choice = get_attention("auto", AttentionNeeds(platform="cpu", native_folder=native_kernels()))
    assert (choice.op.name, choice.reason) == ("cpu", "first for cpu that runs")
