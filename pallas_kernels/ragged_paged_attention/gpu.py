"""The op on NVIDIA GPUs: Pallas kernels through Triton.

Three kernels attend, each into the outputs of the one before it:

  rows with few query tokens     contexts are cut into items of about the same number of positions, so that one long
  (decode, verified drafts)      sequence fills the chip as well as many short ones:

      context   |--------- row 0 ---------|- row 1 -|  (row 2: frozen)
      item      0       1       2          3         4
                 partial sums, in memory    outputs

      grid (K x blocks of query rows, items); the query rows are the row's tokens times the group: one tile of 16 to 64

  rows with more (prefill)       grid (K, tiles of query tokens of one row, times the group: 128 rows); the row's keys
                                 that every query of the tile sees, without a mask, then the causal edge. Tiles count
                                 from the last, for the last of a row has the most keys to see.

  rows that were cut             grid (K, query tokens, rows): adds the partial sums

Grids are static; programs beyond the step's items or tiles end at once. In a program: queries into registers (decode)
or shared memory (prefill); then, 64 or 128 keys at a time, the page's number, its keys and its values, copied to
shared memory one or two steps ahead (cp.async); scores and sums in registers, on tensor cores (mma; wgmma from 64
rows). Per program at head_dim 128 and bfloat16: 72 registers a thread and 70 KiB of shared memory (decode), 238 and
161 KiB (prefill).

What a row does not see is never loaded: other positions, pages and the null page may hold NaN. One program serves one
row, so a row's NaN stays in it.

Online softmax in float32 (Milakov & Gimelshein 2018, arXiv:1805.02867), in powers of 2, tiled as in FlashAttention-2
(Dao 2023, arXiv:2307.08691) and cut along the context as in Flash-Decoding (Dao et al. 2023). Letters beside the
project's: X query tokens and group of a tile together, S the keys of one step, H the head dimension rounded up to a
power of 2, I items.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.block_sizes import BlockSizeTable, shape_bucket, work_bucket
from pallas_kernels.ragged_paged_attention.contract import AttentionNeeds, AttentionOp, RaggedBatch
from pallas_kernels.ragged_paged_attention.gpu_work import GpuWork, cdiv, list_items, list_tiles
from pallas_kernels.ragged_paged_attention.gpu_write import page_shapes, pow2, write
from pallas_kernels.ragged_paged_attention.kv_quant import why_not_dtype

LOWEST = -1e30  # a finite stand-in for -inf: LOWEST - LOWEST must not be NaN
LOG2_E = math.log2(math.e)
MIN_ROWS = 16  # of a tensor-core tile
MAX_GROUP = 64
MAX_DRAFT = 8  # query tokens; where no row can have more there is no prefill
COMBINED_NUMBERS = 8192  # partial sums that a program of the last kernel has in registers


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """What may be tuned. The first three shape the work list, which is made before heads are known.

    Attributes:
      split_keys: positions of a context that are worth an item of their own.
      num_splits: items that fill the chip; longer items where there would be more.
      short_queries: most query tokens of a row for the decode kernel, in a step that also has longer rows.
      decode_rows: most query tokens times group of a decode tile, a power of 2; what has more reads its keys again.
      decode_keys, prefill_keys: keys of one inner step, powers of 2; cheapest where they divide the page.
      prefill_rows: query tokens times group of a tile, a power of 2.
      decode_warps, decode_stages, prefill_warps, prefill_stages: of the Triton compiler.
    """

    split_keys: int = 256
    num_splits: int = 264
    short_queries: int = 4
    decode_rows: int = 64
    decode_keys: int = 64
    decode_warps: int = 4
    decode_stages: int = 5
    prefill_rows: int = 128
    prefill_keys: int = 64
    prefill_warps: int = 8
    prefill_stages: int = 5


def default_block_sizes(*, head_dim: int, dtype, kv_dtype=None) -> BlockSizes:
    """Sizes for Hopper, from compiled kernels: no spilled registers, and wgmma instructions that do not wait in line.

    A load of keys waits for its page's number, so 5 stages fetch 2 blocks ahead and 3 one. With 128 keys a step of
    prefill takes a quarter fewer instructions a key than with 64, but all registers there are at head_dim 128.

    Args:
      dtype: of queries.
      kv_dtype: of pages; None for the same.
    """
    if jnp.dtype(dtype) == jnp.float32:
        if head_dim > 128:
            return BlockSizes(decode_rows=16, decode_keys=16, decode_warps=8, prefill_rows=16, prefill_keys=16)
        return BlockSizes(decode_rows=16, decode_keys=32, prefill_rows=32, prefill_keys=32)
    if head_dim > 128:
        return BlockSizes(decode_keys=32, prefill_keys=32)
    if head_dim > 64 and jnp.dtype(kv_dtype or dtype).itemsize == 2:
        return BlockSizes(prefill_keys=128, prefill_stages=3)
    return BlockSizes()


TUNED = BlockSizeTable.load(Path(__file__).parent, "NVIDIA", BlockSizes)


def tuned_block_sizes(q_TKGH, pages, work: GpuWork) -> BlockSizes:
    """Those that `tuned.json` has for the device and the shape, else the default ones."""
    _, num_kv, group, head_dim = q_TKGH.shape
    name = shape_bucket(
        "mixed" if work.has_tiles else "decode",
        num_kv_heads=num_kv,
        group=group,
        head_dim=head_dim,
        page_size=pages[0].shape[2],
        kv_dtype=pages[0].dtype,
    )
    return TUNED.choose(name, default_block_sizes(head_dim=head_dim, dtype=q_TKGH.dtype, kv_dtype=pages[0].dtype))


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is static in a kernel.

    Attributes:
      group, head_dim, page_size: G, H, Z.
      rows: X of a tile.
      keys: S.
      scale, soft_cap: of the scores.
      interpret: the kernel runs as jax operations, without inline assembly.
    """

    group: int
    head_dim: int
    page_size: int
    rows: int
    keys: int
    scale: float
    soft_cap: float | None
    interpret: bool

    @property
    def lanes(self) -> int:
        return pow2(max(self.head_dim, 16))

    @property
    def unit(self) -> float:
        """What a score of `_scores` is worth as a power of 2."""
        return LOG2_E * (self.scale if self.soft_cap is None else self.soft_cap)


class PageRefs(NamedTuple):
    """Page arrays of one layer; scales are None where there are none."""

    k: Any
    v: Any
    k_scale: Any = None
    v_scale: Any = None


class Seen(NamedTuple):
    """Which positions a block of keys may load, and which of them a query sees.

    Attributes:
      first, end: positions to load.
      position_X: of the queries; None where every query sees all of them.
      window: positions a query sees, or None.
    """

    first: Any
    end: Any
    position_X: Any
    window: Any


def _load_lanes(ref, index, lane_H, mask_S, shape: Shape):
    """Vectors [S, H] of rows `index`, zeros where masked."""
    mask = None if mask_S is None else mask_S[:, None]
    if shape.lanes != shape.head_dim:
        inside_1H = (lane_H < shape.head_dim)[None, :]
        mask = inside_1H if mask is None else mask & inside_1H
    at = ref.at[(*(i[:, None] if getattr(i, "ndim", 0) else i for i in index), lane_H[None, :])]
    if mask is None:
        return plgpu.load(at)
    return plgpu.load(
        at, mask=jnp.broadcast_to(mask, (index[-1].shape[0], shape.lanes)), other=jnp.zeros((), ref.dtype)
    )


def _dot(a, b, contract_b: int, shape: Shape):
    precision = None
    if a.dtype == jnp.float32:
        # Three products of 19-bit numbers, in the tensor cores: as good as float32, and without spilled registers.
        precision = lax.Precision.HIGHEST if shape.interpret else lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return lax.dot_general(a, b, (((1,), (contract_b,)), ((), ())), precision, preferred_element_type=jnp.float32)


def _exp2(factor: float, x, minus, shape: Shape):
    """2 ** (factor * x - minus), one multiply-add and one exponential.

    Triton's own takes five instructions more, for results below 2**-126 (here 0) and for want of a multiply-add.
    """
    if shape.interpret:
        return jnp.exp2(x * factor - minus)
    factor_bits = np.float32(factor).view(np.uint32)
    return plgpu.elementwise_inline_asm(
        f"{{ .reg .f32 t; fma.rn.ftz.f32 t, $1, 0f{factor_bits:08X}, $2; ex2.approx.ftz.f32 $0, t; }}",
        args=[x, jnp.broadcast_to(-minus, x.shape)],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, jnp.float32)],
    )[0]


def _scores(q_XH, k_SH, k_scale_S, shape: Shape):
    """Scores, in units of 1 / scale or of the soft cap."""
    s_XS = _dot(q_XH, k_SH, 1, shape)
    if k_scale_S is not None:
        s_XS = s_XS * k_scale_S[None, :]
    if shape.soft_cap is None:
        return s_XS
    # tanh x = 1 - 2 / (1 + exp 2x): exact to 1e-7, where the hardware's own tanh is to 5e-4.
    power_XS = _exp2(2.0 * shape.scale / shape.soft_cap * LOG2_E, s_XS, jnp.zeros((1, 1), jnp.float32), shape)
    return 1.0 - 2.0 / (1.0 + power_XS)


def _sees(seen: Seen, mask_S, position_S):
    """Which query sees which key, [X, S]."""
    sees_XS = mask_S[None, :] & (position_S[None, :] <= seen.position_X[:, None])
    if seen.window is not None:
        sees_XS &= position_S[None, :] > seen.position_X[:, None] - seen.window
    return sees_XS


def _add_block(block, carry, q_XH, table_ref, row, head, pages: PageRefs, seen: Seen, shape: Shape):
    """One step of the online softmax: the keys from `block * S`."""
    peak_X, total_X, acc_XH = carry
    start = block * shape.keys
    key_S = jnp.arange(shape.keys, dtype=jnp.int32)
    position_S = start + key_S
    mask_S = None if seen.position_X is None else (position_S >= seen.first) & (position_S < seen.end)
    if shape.page_size % shape.keys == 0:
        page = table_ref[row, lax.div(start, shape.page_size)]
        index = (page, head, lax.rem(start, shape.page_size) + key_S)
    else:
        at = table_ref.at[row, lax.div(position_S, shape.page_size)]
        page_S = plgpu.load(at) if mask_S is None else plgpu.load(at, mask=mask_S, other=0)
        index = (page_S, head, lax.rem(position_S, shape.page_size))
    lane_H = jnp.arange(shape.lanes, dtype=jnp.int32)
    k_SH, v_SH = (_load_lanes(ref, index, lane_H, mask_S, shape) for ref in pages[:2])
    if k_SH.dtype == jnp.float8_e4m3fn:  # by way of float32: the direct conversion is 4 times slower
        k_SH, v_SH = k_SH.astype(jnp.float32), v_SH.astype(jnp.float32)
    k_SH, v_SH = k_SH.astype(q_XH.dtype), v_SH.astype(q_XH.dtype)
    k_scale_S, v_scale_S = (
        None if ref is None else plgpu.load(ref.at[index], mask=mask_S, other=None if mask_S is None else 0.0)
        for ref in pages[2:]
    )
    s_XS = _scores(q_XH, k_SH, k_scale_S, shape)
    if mask_S is not None:
        s_XS = jnp.where(_sees(seen, mask_S, position_S), s_XS, -jnp.inf)
    new_peak_X = jnp.maximum(peak_X, s_XS.max(1) * shape.unit)
    p_XS = _exp2(shape.unit, s_XS, new_peak_X[:, None], shape)
    keep_X = _exp2(1.0, peak_X, new_peak_X, shape)
    total_X = total_X * keep_X + p_XS.sum(1)
    if v_scale_S is not None:
        p_XS = p_XS * v_scale_S[None, :]
    return new_peak_X, total_X, acc_XH * keep_X[:, None] + _dot(p_XS.astype(q_XH.dtype), v_SH, 0, shape)


def _empty(shape: Shape):
    """Sums over no keys."""
    return (
        jnp.full((shape.rows,), LOWEST, jnp.float32),
        jnp.zeros((shape.rows,), jnp.float32),
        jnp.zeros((shape.rows, shape.lanes), jnp.float32),
    )


def _normalised(total_X, acc_XH):
    return acc_XH / jnp.where(total_X == 0.0, 1.0, total_X)[:, None]


def _query_index(first_token, head, first_row, shape: Shape):
    """Index of a tile's queries in [T, K, G, H], the token's number in its row, and lanes."""
    row_X = first_row + jnp.arange(shape.rows, dtype=jnp.int32)
    query_X = lax.div(row_X, shape.group)
    lane_H = jnp.arange(shape.lanes, dtype=jnp.int32)
    index = ((first_token + query_X)[:, None], head, lax.rem(row_X, shape.group)[:, None], lane_H[None, :])
    return index, query_X, lane_H


def _in_tile(is_own_X, lane_H, shape: Shape):
    return is_own_X[:, None] & (lane_H < shape.head_dim)[None, :]


def _decode_kernel(
    table_ref, context_ref, start_ref, num_items_ref, row_ref, first_ref, end_ref, items_ref, *refs,
    num_pages_refs: int, has_window: bool, head_blocks: int, shape: Shape,
):  # fmt: skip
    """One item, one KV head, one block of query rows. Whole rows write outputs, cut rows partial sums."""
    column, item = pl.program_id(0), pl.program_id(1)  # out here: interpret mode knows them nowhere else
    window_ref, refs = (refs[0], refs[1:]) if has_window else (None, refs)
    q_ref, pages, (out_ref, peak_ref, total_ref, acc_ref) = refs[0], refs[1 : num_pages_refs + 1], refs[-4:]

    @pl.when(item < num_items_ref[0])
    def _():
        head, first_row = lax.div(column, head_blocks), lax.rem(column, head_blocks) * shape.rows
        row, first, end = row_ref[item], first_ref[item], end_ref[item]
        token = start_ref[row]
        num_queries = start_ref[row + 1] - token
        index, query_X, lane_H = _query_index(token, head, first_row, shape)
        is_own_X = query_X < num_queries
        mask_XH = _in_tile(is_own_X, lane_H, shape)
        q_XH = plgpu.load(q_ref.at[index], mask=mask_XH, other=jnp.zeros((), q_ref.dtype))
        position = context_ref[row] - num_queries
        window = None if window_ref is None else window_ref[0]
        if window is not None:
            first = jnp.maximum(first, position - window + 1)
        seen = Seen(first, end, position + query_X, window)

        def body(block, carry):
            return _add_block(block, carry, q_XH, table_ref, row, head, PageRefs(*pages), seen, shape)

        peak_X, total_X, acc_XH = lax.fori_loop(
            lax.div(first, shape.keys), lax.div(end + shape.keys - 1, shape.keys), body, _empty(shape)
        )
        is_whole = items_ref[row] == 1
        out_XH = _normalised(total_X, acc_XH).astype(out_ref.dtype)
        plgpu.store(out_ref.at[index], out_XH, mask=mask_XH & is_whole)
        row_X = first_row + jnp.arange(shape.rows, dtype=jnp.int32)
        plgpu.store(peak_ref.at[item, head, row_X], peak_X, mask=is_own_X & ~is_whole)
        plgpu.store(total_ref.at[item, head, row_X], total_X, mask=is_own_X & ~is_whole)
        plgpu.store(acc_ref.at[item, head, row_X[:, None], lane_H[None, :]], acc_XH, mask=mask_XH & ~is_whole)


def _combine_kernel(start_ref, first_item_ref, items_ref, peak_ref, total_ref, acc_ref, _, out_ref, *, items, shape):
    """One query token of a cut row, one KV head: the partial sums of its group, `items` at a time."""
    head, query, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    num_items, token = items_ref[row], start_ref[row]

    @pl.when((num_items > 1) & (query < start_ref[row + 1] - token))
    def _():
        g_G = jnp.arange(pow2(shape.group), dtype=jnp.int32)
        lane_H = jnp.arange(shape.lanes, dtype=jnp.int32)
        mask_GH = (g_G < shape.group)[:, None] & (lane_H < shape.head_dim)[None, :]
        x_G = query * shape.group + g_G

        def body(i, carry):
            peak_G, total_G, acc_GH = carry
            item_I = i * items + jnp.arange(items, dtype=jnp.int32)
            is_own_I = item_I < num_items
            item_I = first_item_ref[row] + item_I
            at = (item_I[:, None], head, x_G[None, :])
            mask_IG = is_own_I[:, None] & (g_G < shape.group)[None, :]
            part_IG = plgpu.load(peak_ref.at[at], mask=mask_IG, other=LOWEST)
            total_IG = plgpu.load(total_ref.at[at], mask=mask_IG, other=0.0)
            acc_IGH = plgpu.load(
                acc_ref.at[item_I[:, None, None], head, x_G[None, :, None], lane_H[None, None, :]],
                mask=is_own_I[:, None, None] & mask_GH[None],
                other=0.0,
            )
            new_peak_G = jnp.maximum(peak_G, part_IG.max(0))
            keep_IG, keep_G = jnp.exp2(part_IG - new_peak_G[None]), jnp.exp2(peak_G - new_peak_G)
            total_G = total_G * keep_G + (total_IG * keep_IG).sum(0)
            return new_peak_G, total_G, acc_GH * keep_G[:, None] + (acc_IGH * keep_IG[:, :, None]).sum(0)

        empty = jnp.zeros(g_G.shape, jnp.float32)
        carry = (empty + LOWEST, empty, jnp.zeros(mask_GH.shape, jnp.float32))
        _, total_G, acc_GH = lax.fori_loop(0, lax.div(num_items + items - 1, items), body, carry)
        at = out_ref.at[token + query, head, g_G[:, None], lane_H[None, :]]
        plgpu.store(at, _normalised(total_G, acc_GH).astype(out_ref.dtype), mask=mask_GH)


def _prefill_kernel(
    table_ref, num_tiles_ref, row_ref, token_ref, position_ref, queries_ref, *refs,
    num_pages_refs: int, has_window: bool, shape: Shape,
):  # fmt: skip
    """One tile, one KV head."""
    head, tile = pl.program_id(0), num_tiles_ref[0] - 1 - pl.program_id(1)
    window_ref, refs = (refs[0], refs[1:]) if has_window else (None, refs)
    q_ref, pages, out_ref = refs[0], PageRefs(*refs[1 : num_pages_refs + 1]), refs[-1]

    @pl.when(tile >= 0)
    def _():
        row, position = row_ref[tile], position_ref[tile]
        index, query_X, lane_H = _query_index(token_ref[tile], head, 0, shape)
        num_queries = queries_ref[tile]
        mask_XH = _in_tile(query_X < num_queries, lane_H, shape)
        q_XH = plgpu.load(q_ref.at[index], mask=mask_XH, other=jnp.zeros((), q_ref.dtype))
        end = position + num_queries
        window = None if window_ref is None else window_ref[0]
        first = 0 if window is None else jnp.maximum(position - window + 1, 0)
        # With a window no key is seen by every query but those of a few blocks: all take the mask.
        first_edge = lax.div(position + 1 if window is None else first, shape.keys)
        edge, every = Seen(first, end, position + query_X, window), Seen(0, end, None, None)

        def edge_block(i, carry):
            return _add_block(first_edge + i, carry, q_XH, table_ref, row, head, pages, edge, shape)

        def whole_block(block, carry):
            return _add_block(block, carry, q_XH, table_ref, row, head, pages, every, shape)

        # The edge first, and at least once, as the compiler can see: sums set to zero where a loop is left out would
        # make ptxas serialize the wgmma.
        num_edge = jnp.maximum(lax.div(end + shape.keys - 1, shape.keys) - first_edge, 1)
        carry = lax.fori_loop(0, num_edge, edge_block, _empty(shape))
        if window is None:
            carry = lax.fori_loop(0, first_edge, whole_block, carry)
        _, total_X, acc_XH = carry
        plgpu.store(out_ref.at[index], _normalised(total_X, acc_XH).astype(out_ref.dtype), mask=mask_XH)


def _decode(q_TKGH, pages, out_TKGH, work: GpuWork, sizes: BlockSizes, scale, soft_cap, interpret):
    """Outputs of the items' rows into `out_TKGH`; None where they write every token."""
    _, num_kv, group, head_dim = q_TKGH.shape
    rows = min(pow2(max(MIN_ROWS, work.max_short * group)), sizes.decode_rows)
    head_blocks = cdiv(work.max_short * group, rows)
    shape = Shape(
        group=group, head_dim=head_dim, page_size=pages[0].shape[2], rows=rows, keys=sizes.decode_keys,
        scale=scale, soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    batch, items = work.batch, work.items
    windows = () if work.window_1 is None else (work.window_1,)
    before = () if out_TKGH is None else (out_TKGH,)
    num_items = items.row_W.shape[0]
    partial = (num_items, num_kv, work.max_short * group)
    arrays = (
        batch.page_table_BM, batch.context_len_B, batch.query_start_R,
        items.num_items_1, items.row_W, items.first_W, items.end_W, items.items_B, *windows, q_TKGH, *pages, *before,
    )  # fmt: skip
    out_TKGH, *partials = pl.pallas_call(
        functools.partial(
            _decode_kernel,
            num_pages_refs=len(pages),
            has_window=bool(windows),
            head_blocks=head_blocks,
            shape=shape,
        ),
        grid=(num_kv * head_blocks, num_items),
        out_shape=[
            jax.ShapeDtypeStruct(q_TKGH.shape, q_TKGH.dtype),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
            jax.ShapeDtypeStruct((*partial, head_dim), jnp.float32),
        ],
        input_output_aliases={len(arrays) - 1: 0} if before else {},
        compiler_params=plgpu.CompilerParams(num_warps=sizes.decode_warps, num_stages=sizes.decode_stages),
        interpret=interpret,
        name="ragged_paged_attention_gpu_decode",
    )(*arrays)
    return pl.pallas_call(
        functools.partial(_combine_kernel, items=max(1, COMBINED_NUMBERS // (pow2(group) * shape.lanes)), shape=shape),
        grid=(num_kv, work.max_short, batch.context_len_B.shape[0]),
        out_shape=jax.ShapeDtypeStruct(q_TKGH.shape, q_TKGH.dtype),
        input_output_aliases={6: 0},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="ragged_paged_attention_gpu_combine",
    )(batch.query_start_R, items.first_item_B, items.items_B, *partials, out_TKGH)


def _prefill(q_TKGH, pages, out_TKGH, work: GpuWork, sizes: BlockSizes, scale, soft_cap, interpret):
    """Outputs of the tiles into `out_TKGH`."""
    num_tokens, num_kv, group, head_dim = q_TKGH.shape
    shape = Shape(
        group=group, head_dim=head_dim, page_size=pages[0].shape[2], rows=max(sizes.prefill_rows, pow2(group)),
        keys=sizes.prefill_keys, scale=scale, soft_cap=soft_cap, interpret=interpret,
    )  # fmt: skip
    # The same in every layer: XLA keeps one.
    tiles = list_tiles(work.batch, max_short=work.max_short, num_tokens=num_tokens, tile=shape.rows // group)
    windows = () if work.window_1 is None else (work.window_1,)
    arrays = (work.batch.page_table_BM, *tiles, *windows, q_TKGH, *pages, out_TKGH)
    return pl.pallas_call(
        functools.partial(_prefill_kernel, num_pages_refs=len(pages), has_window=bool(windows), shape=shape),
        grid=(num_kv, tiles.row_N.shape[0]),
        out_shape=jax.ShapeDtypeStruct(q_TKGH.shape, q_TKGH.dtype),
        input_output_aliases={len(arrays) - 1: 0},
        compiler_params=plgpu.CompilerParams(num_warps=sizes.prefill_warps, num_stages=sizes.prefill_stages),
        interpret=interpret,
        name="ragged_paged_attention_gpu_prefill",
    )(*arrays)


def make_op(interpret: bool = False, block_sizes: BlockSizes | None = None) -> AttentionOp:
    """The op.

    Args:
      interpret: run the kernels as plain jax operations, on any platform; for tests.
      block_sizes: for all shapes; None for the defaults.
    """

    def prepare(batch: RaggedBatch, *, num_tokens, max_query_len, page_size, sliding_window):
        sizes = block_sizes or TUNED.choose(work_bucket(page_size), BlockSizes())
        max_query_len = min(max_query_len, num_tokens)
        if max_query_len == 1:  # row b's token is token b: all are written, those of empty rows too
            tokens_R = jnp.arange(batch.query_start_R.shape[0], dtype=jnp.int32)
            batch = batch._replace(query_start_R=tokens_R)
        has_tiles = max_query_len > MAX_DRAFT
        max_short = min(sizes.short_queries, max_query_len) if has_tiles else max_query_len
        most_positions = batch.page_table_BM.shape[1] * page_size
        return GpuWork(
            batch=batch,
            items=list_items(
                batch,
                max_short=max_short,
                window=sliding_window,
                most_positions=most_positions,
                split_keys=sizes.split_keys,
                num_splits=sizes.num_splits,
            ),
            window_1=None if sliding_window is None else jnp.full(1, sliding_window, jnp.int32),
            max_short=max_short,
            has_tiles=has_tiles,
        )

    def attend(q_TKGH, pages, work: GpuWork, *, scale, soft_cap=None):
        sizes = block_sizes or tuned_block_sizes(q_TKGH, pages, work)
        is_full = work.is_decode and work.batch.context_len_B.shape[0] == q_TKGH.shape[0]
        out_TKGH = None if is_full else jnp.zeros_like(q_TKGH)  # also of padding tokens
        if work.has_tiles:
            out_TKGH = _prefill(q_TKGH, pages, out_TKGH, work, sizes, scale, soft_cap, interpret)
        return _decode(q_TKGH, pages, out_TKGH, work, sizes, scale, soft_cap, interpret)

    def why_not(needs: AttentionNeeds) -> str | None:
        if not interpret and needs.platform not in ("gpu", "cuda"):
            return "its kernels are compiled by Triton, for NVIDIA GPUs"
        return _why_not_shape(needs)

    return AttentionOp(
        name="gpu",
        default_page_size=64,
        kv_head_axis=1,
        page_shapes=page_shapes,
        write=functools.partial(write, interpret=interpret),
        prepare=prepare,
        attend=attend,
        why_not=why_not,
    )


def _why_not_shape(needs: AttentionNeeds) -> str | None:
    if needs.head_dim is not None and not (needs.head_dim <= 256 and needs.head_dim % 8 == 0):
        return f"head_dim is {needs.head_dim}; multiples of 8 up to 256 are supported"
    if needs.group is not None and needs.group > MAX_GROUP:
        return f"{needs.group} query heads per KV head; at most {MAX_GROUP} are supported"
    if needs.page_size is not None and (needs.page_size % 8 or needs.page_size > 256):
        return f"page_size is {needs.page_size}; multiples of 8 up to 256 are supported"
    if needs.dtype is not None and needs.dtype not in ("bfloat16", "float32"):
        return f"activations of {needs.dtype}; bfloat16 and float32 are supported"
    return why_not_dtype(needs.kv_dtype)


OP = make_op()
