"""The TPU kernel's pages: their layout, and the kernel that writes new keys and values into them.

A page of one KV head is Z rows of C lanes. A key and its value share a row, so that one copy fetches both:

    2 H <= 128    [ key | value | 0 .. ]                C = 128: nothing is padded at H = 64
    else          [ key, 0 .. | value, 0 .. ]           C = 2 * (H up to a multiple of 128)

Quantized pages have a second leaf [P, K, W] of float32 scales, the Z keys' and then the Z values', W = 2 Z up to a
multiple of 128.

The chip moves whole tiles: a write reads the tiles that hold a run of positions (the step's consecutive tokens in one
page), changes those positions in VMEM and writes the tiles back. Runs never share a page, so that no order between them
matters; several are in flight at a time. Padding tokens, which name page 0, are not written at all.

    HBM ── tiles of run i + L ──┐            ┌── tiles of run i ──> HBM
    HBM ── its tokens ──────────┴─> slot ────┘
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.ragged_paged_attention.kv_quant import is_quantized, quantize_heads

LANES = 128
SLOT_BYTES = 8 << 20  # of VMEM for the runs in flight


def round_up(x: int, unit: int) -> int:
    """The least multiple of `unit` that is at least x."""
    return -(-x // unit) * unit


def key_lanes(head_dim: int) -> int:
    """Lanes of the part of a row that the scores are made from."""
    return LANES if 2 * head_dim <= LANES else round_up(head_dim, LANES)


def value_lane(head_dim: int) -> int:
    """Where the value begins in a row."""
    return head_dim if 2 * head_dim <= LANES else round_up(head_dim, LANES)


def row_lanes(head_dim: int) -> int:
    """C."""
    return LANES if 2 * head_dim <= LANES else 2 * round_up(head_dim, LANES)


def page_shapes(num_pages, num_kv_heads, head_dim, page_size, dtype):
    """Rows [P, K, Z, C], and scales [P, K, W] where quantized; with all padding."""
    rows = jax.ShapeDtypeStruct((num_pages, num_kv_heads, page_size, row_lanes(head_dim)), dtype)
    if not is_quantized(dtype):
        return (rows,)
    width = round_up(2 * page_size, LANES)
    return rows, jax.ShapeDtypeStruct((num_pages, num_kv_heads, width), jnp.float32)


def _as_words(k_TKH, v_TKH, dtype):
    """int32 [T, K, C]: the bits of each row's numbers in `dtype`, low bits first."""
    head_dim = k_TKH.shape[-1]
    start, width = value_lane(head_dim), row_lanes(head_dim)
    k_TKS = jnp.pad(k_TKH.astype(dtype), ((0, 0), (0, 0), (0, start - head_dim)))
    v_TKS = jnp.pad(v_TKH.astype(dtype), ((0, 0), (0, 0), (0, width - start - head_dim)))
    bits = jnp.dtype(dtype).itemsize * 8
    words = lax.bitcast_convert_type(jnp.concatenate([k_TKS, v_TKS], axis=-1), jnp.dtype(f"uint{bits}"))
    return words.astype(jnp.uint32) if bits == 32 else words.astype(jnp.int32).astype(jnp.uint32)


def _list_runs(page_T, offset_T):
    """(first token, tokens) of each run of consecutive positions in one page other than the null page, and how many."""
    num_tokens = page_T.shape[0]
    continues_T = jnp.concatenate(
        [jnp.zeros(1, bool), (page_T[1:] == page_T[:-1]) & (offset_T[1:] == offset_T[:-1] + 1)]
    )
    is_first_T = ~continues_T & (page_T != 0)
    num_runs = is_first_T.sum(dtype=jnp.int32)
    token_T = jnp.arange(num_tokens, dtype=jnp.int32)
    first_X = jnp.nonzero(is_first_T, size=num_tokens, fill_value=0)[0].astype(jnp.int32)
    # A run ends where the next token does not continue it.
    break_T = jnp.concatenate([~continues_T[1:], jnp.ones(1, bool)])
    end_T = lax.cummin(jnp.where(break_T, token_T + 1, num_tokens), reverse=True)
    return first_X, end_T[first_X] - first_X, num_runs.reshape(1)


def for_pieces(count, largest: int, do):
    """Calls do(start, size) for sizes that are powers of two and add up to `count` <= `largest`: copies are static."""
    bit = 1 << (largest.bit_length() - 1)
    while bit:
        start = count & ~(2 * bit - 1)
        pl.when((count & bit) != 0)(functools.partial(do, start, bit))
        bit //= 2


def _put_token(token_buf, buffers, slot, start, rows: int, i, _):
    """Puts a run's token i, at offset start + i, into the run's page: whole words are changed, whatever the dtype."""
    page_buf = buffers[0]
    _, num_kv, page_size, width = page_buf.shape
    per_word = 4 // page_buf.dtype.itemsize
    bits = 32 // per_word
    offset = start + i
    span = pl.ds(pl.multiple_of(offset // rows * rows, rows), rows)
    in_span = offset % rows
    shift = (in_span % per_word * bits).astype(jnp.uint32)
    kept = ~(jnp.uint32((1 << bits) - 1) << shift)
    is_row = lax.broadcasted_iota(jnp.int32, (rows // per_word, width), 0) == in_span // per_word
    for k in range(num_kv):
        old = pltpu.bitcast(page_buf[slot, k, span], jnp.uint32)
        value = jnp.broadcast_to(token_buf[slot, i, k : k + 1, :width], old.shape)
        changed = (old & kept) | (value << shift)
        page_buf[slot, k, span] = pltpu.bitcast(jnp.where(is_row, changed, old), page_buf.dtype)
    if len(buffers) == 2:
        scales = buffers[1][slot]
        lane = lax.broadcasted_iota(jnp.int32, scales.shape, 1)
        for part in range(2):
            scale = lax.bitcast_convert_type(token_buf[slot, i, :, width + part : width + part + 1], jnp.float32)
            scales = jnp.where(lane == offset + part * page_size, jnp.broadcast_to(scale, scales.shape), scales)
        buffers[1][slot] = scales
    return 0


def _write_kernel(
    first_X, count_X, num_runs_1, page_T, offset_T, words_hbm, *refs, is_scaled: bool, num_slots: int, rows: int
):
    """Reads, changes and writes back run after run, `num_slots // 2` ahead."""
    num_arrays = 1 + is_scaled
    arrays_hbm = refs[num_arrays : 2 * num_arrays]  # the outputs, which are the inputs
    buffers, token_buf, sem_in, sem_out = refs[2 * num_arrays : 3 * num_arrays], *refs[3 * num_arrays :]
    page_buf, page_size = buffers[0], buffers[0].shape[2]
    ahead, num_runs = num_slots // 2, num_runs_1[0]

    def copies(run, slot, is_read, act):
        first, count = first_X[run], count_X[run]
        page, start = page_T[first], offset_T[first]
        sem = (sem_in if is_read else sem_out).at[slot]

        def move(hbm, vmem):
            act(pltpu.make_async_copy(*((hbm, vmem) if is_read else (vmem, hbm)), sem))

        def move_rows(group, _):
            span = pl.ds(pl.multiple_of(group * rows, rows), rows)
            move(arrays_hbm[0].at[page, :, span], page_buf.at[slot, :, span])
            return 0

        lax.fori_loop(start // rows, (start + count - 1) // rows + 1, move_rows, 0)
        if is_scaled:
            move(arrays_hbm[1].at[page], buffers[1].at[slot])
        if is_read:
            for_pieces(
                count,
                page_size,
                lambda at, size: move(words_hbm.at[pl.ds(first + at, size)], token_buf.at[slot, pl.ds(at, size)]),
            )

    def read(run, _):
        copies(run, run % num_slots, True, lambda copy: copy.start())
        return 0

    def finish(run, _):
        copies(run, run % num_slots, False, lambda copy: copy.wait())
        return 0

    def step(run, _):
        @pl.when(run + ahead < num_runs)
        def _():
            @pl.when(run >= ahead)
            def _():
                finish(run - ahead, 0)

            read(run + ahead, 0)

        slot = run % num_slots
        copies(run, slot, True, lambda copy: copy.wait())
        first = first_X[run]
        put = functools.partial(_put_token, token_buf, buffers, slot, offset_T[first], rows)
        lax.fori_loop(0, count_X[run], put, 0)
        copies(run, slot, False, lambda copy: copy.start())
        return 0

    lax.fori_loop(0, jnp.minimum(num_runs, ahead), read, 0)
    lax.fori_loop(0, num_runs, step, 0)
    lax.fori_loop(jnp.maximum(num_runs - num_slots, 0), num_runs, finish, 0)


def write(pages, k_TKH, v_TKH, page_T, offset_T, *, interpret=False):
    """Writes each token's key and value at (page, offset), in place; tokens of the null page are left out."""
    rows_PKZC = pages[0]
    _, num_kv, page_size, width = rows_PKZC.shape
    dtype = rows_PKZC.dtype
    if is_quantized(dtype):
        (k_TKH, k_scale_TK), (v_TKH, v_scale_TK) = quantize_heads(k_TKH, dtype), quantize_heads(v_TKH, dtype)
        scales_TKS = jnp.pad(jnp.stack([k_scale_TK, v_scale_TK], axis=-1), ((0, 0), (0, 0), (0, LANES - 2)))
        words_TKC = jnp.concatenate(
            [_as_words(k_TKH, v_TKH, dtype), lax.bitcast_convert_type(scales_TKS, jnp.uint32)], axis=-1
        )
    else:
        words_TKC = _as_words(k_TKH, v_TKH, dtype)
    words_width = words_TKC.shape[-1]
    slot_bytes = num_kv * page_size * (width * dtype.itemsize + words_width * 4)
    num_slots = max(2, min(32, SLOT_BYTES // slot_bytes // 2 * 2))
    first_X, count_X, num_runs_1 = _list_runs(page_T, offset_T)
    any_spec = pl.BlockSpec(memory_space=pl.ANY)
    scalars = (first_X, count_X, num_runs_1, page_T, offset_T)
    return tuple(
        pl.pallas_call(
            functools.partial(
                _write_kernel,
                is_scaled=len(pages) == 2,
                num_slots=num_slots,
                rows=min(page_size, 32 // dtype.itemsize),
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(scalars),
                in_specs=[any_spec] * (1 + len(pages)),
                out_specs=[any_spec] * len(pages),
                grid=(1,),
                scratch_shapes=[
                    *(pltpu.VMEM((num_slots, *x.shape[1:]), x.dtype) for x in pages),
                    pltpu.VMEM((num_slots, page_size, num_kv, words_width), jnp.uint32),
                    pltpu.SemaphoreType.DMA((num_slots,)),
                    pltpu.SemaphoreType.DMA((num_slots,)),
                ],
            ),
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages],
            input_output_aliases={len(scalars) + 1 + i: i for i in range(len(pages))},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",), vmem_limit_bytes=2 * max(SLOT_BYTES, num_slots * slot_bytes)
            ),
            interpret=interpret,
            name="ragged_paged_attention_tpu_write",
        )(*scalars, words_TKC, *pages)
    )
