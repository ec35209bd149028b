"""The op on a TPU, in Pallas: one kernel for prefill chunks, single-token decodes and verified drafts.

Grid: none; the kernel walks the tiles of `tpu_work.py` in order, and for each the pages that it sees, a block of
`pages_per_block` at a time:

    HBM pages ──copy of block i + 1──> kv_buf[1 - s]        while        kv_buf[s] ──> scores ──> softmax ──> sums

Copies run one block ahead, over the borders of tiles; a tile's queries are copied with its first block, its outputs
leave while the next tile runs. Scores and sums are float32, softmax is online, in powers of two (one multiplication
less a score).

A tile of one token (decode) takes the heads of a group together, so that the registers are full: the queries of KV head
k stand in row block k, and are multiplied with the keys of all heads, laid side by side.

    [ q0  0  ]   [ K0 ]T     [ q0 K0 ]            a product whose inner dimension is (head, lane);
    [ 0   q1 ] x [ K1 ]   =  [ q1 K1 ]            likewise the probabilities with the values below each other

A tile of more tokens goes through the KV heads one by one; its rows are (query head of the group, token).

VMEM: two blocks of pages, two tiles of queries and of outputs, and for tiles of more than one token their queries by
head, peaks, totals and sums.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.block_sizes import BlockSizeTable, shape_bucket, work_bucket
from pallas_kernels.ragged_paged_attention import tpu_write
from pallas_kernels.ragged_paged_attention.contract import AttentionNeeds, AttentionOp, RaggedBatch
from pallas_kernels.ragged_paged_attention.kv_quant import is_quantized, why_not_dtype
from pallas_kernels.ragged_paged_attention.tpu_work import TpuWork, list_tiles, tile_size
from pallas_kernels.ragged_paged_attention.tpu_write import (
    LANES,
    for_pieces,
    key_lanes,
    page_shapes,
    round_up,
    row_lanes,
    value_lane,
)

LOWEST = -1e30  # a finite stand-in for -inf: LOWEST - LOWEST must not be NaN
LOG2_E = math.log2(math.e)
VMEM_LIMIT = 64 << 20
MAX_TABLE_ENTRIES = 200_000  # int32; the page table lies in SMEM, which holds 1 MB, beside the list of tiles
FP8_SHIFT = 120  # 127 - 7, the biases of float32's and float8_e4m3fn's exponents
FP8_BITS = -0x78100000  # 0x87F00000: the sign, four bits of exponent and three of mantissa


@dataclass(frozen=True)
class BlockSizes:
    """What the tuner may change.

    Attributes:
      pages_per_block: pages of one inner step; two blocks are in VMEM.
      queries_per_tile: most query tokens of a tile; a power of two, 8 at least.
    """

    pages_per_block: int = 8
    queries_per_tile: int = 128


def default_block_sizes(num_kv_heads: int, head_dim: int, page_size: int, dtype) -> BlockSizes:
    """A block of about 2 MiB, at least 128 and at most 2,048 positions; tiles of 128 queries."""
    position_bytes = num_kv_heads * row_lanes(head_dim) * jnp.dtype(dtype).itemsize
    positions = min(max((2 << 20) // position_bytes, 128), 2048)
    return BlockSizes(pages_per_block=max(1, positions // page_size))


TUNED = BlockSizeTable.load(Path(__file__).parent, "TPU", BlockSizes)


def tuned_block_sizes(q_TKGH, pages, work: TpuWork) -> BlockSizes:
    """Those that `tuned.json` has for the device and the shape, else the default ones."""
    _, num_kv, group, head_dim = q_TKGH.shape
    page_size, kv_dtype = pages[0].shape[2], pages[0].dtype
    name = shape_bucket(
        "decode" if work.queries_per_tile == 1 else "mixed",
        num_kv_heads=num_kv,
        group=group,
        head_dim=head_dim,
        page_size=page_size,
        kv_dtype=kv_dtype,
    )
    return TUNED.choose(name, default_block_sizes(num_kv, head_dim, page_size, kv_dtype))


@dataclass(frozen=True)
class _Shapes:
    """Static sizes of a call.

    Attributes:
      num_kv, group, head_dim, page_size: K, G, H, Z.
      rows: query heads of a token, padded to whole registers.
      pages: of a block.
      tile: Q.
      window, soft_cap: or None.
      scale: of the scores.
      heads_per_group: KV heads that a tile of one token takes together.
      is_scaled: whether pages are quantized.
      shift: the power of two that numbers of the pages are too small by, as they are taken: FP8_SHIFT or 0.
    """

    num_kv: int
    group: int
    head_dim: int
    page_size: int
    rows: int
    pages: int
    tile: int
    window: int | None
    soft_cap: float | None
    scale: float
    heads_per_group: int
    is_scaled: bool
    shift: int

    @property
    def query_factor(self) -> float:
        """Gives queries and weights most of the shift before they meet the pages: no product is too small."""
        return 2.0**96 if self.shift else 1.0

    @property
    def product_factor(self) -> float:
        """Gives products the rest of it."""
        return 2.0**self.shift / self.query_factor

    @property
    def block(self) -> int:
        """Positions of a block."""
        return self.pages * self.page_size

    @property
    def key(self) -> slice:
        """Lanes of a page's row that queries are multiplied with."""
        return slice(0, key_lanes(self.head_dim))

    @property
    def value(self) -> slice:
        """Lanes that probabilities are multiplied with; for H <= 64 the outputs are the second half of them."""
        width = row_lanes(self.head_dim)
        return slice(width - key_lanes(self.head_dim), width)


def _heads_per_group(num_kv: int, group: int) -> int:
    """The fewest KV heads whose query heads fill whole packed registers (16 rows); all where none do."""
    for heads in range(1, num_kv):
        if num_kv % heads == 0 and heads * group % 16 == 0:
            return heads
    return num_kv


def _masked_scores(s, sees, z: _Shapes):
    """Scores in powers of two; LOWEST where not seen."""
    if z.soft_cap is None:
        s *= z.scale * LOG2_E
    else:
        s = jnp.tanh(s * (z.scale / z.soft_cap)) * (z.soft_cap * LOG2_E)
    return jnp.where(sees, s, LOWEST)


def _dot(a, b, contract_b: int):
    """a [m, c] times b, over b's axis `contract_b`, summed in float32."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(
        a, b, (((1,), (contract_b,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _part(buf, head, lanes: slice, dtype, z: _Shapes):
    """[positions of the block, lanes] of one KV head, over 2 ** z.shift; buf is [pages, K, Z, C].

    float8_e4m3fn has its sign, exponent and mantissa where float32 has them, 20 bits below, and only the exponent's
    bias differs: one shift and one mask instead of a conversion. What is below its least normal number, 2 ** -15 of the
    largest, counts as 0.
    """
    x = buf[:, head, :, lanes]
    if z.shift:
        bits = pltpu.bitcast(x, jnp.int8).astype(jnp.int32)
        x = lax.bitcast_convert_type((bits << 20) & FP8_BITS, jnp.float32)
    elif x.dtype != dtype:
        x = x.astype(jnp.float32)
    return x.reshape(-1, x.shape[-1]).astype(dtype)


def _load_scales(refs, z: _Shapes, slot):
    """Lays the scales of a block's keys and values side by side, [K, positions of the block] each."""
    if z.is_scaled:
        pages = [refs.scale_buf[slot, i] for i in range(z.pages)]
        factors = (z.product_factor, z.query_factor)
        for part, (scale, factor) in enumerate(zip((refs.key_scale, refs.value_scale), factors, strict=True)):
            lanes = slice(part * z.page_size, (part + 1) * z.page_size)
            x = jnp.concatenate([x[:, lanes] for x in pages], axis=1)
            scale[...] = x * factor if z.shift else x


def _times_row(x, scale_ref, head):
    """x [rows, positions] times the scales of one head."""
    return x * jnp.broadcast_to(scale_ref[pl.ds(head, 1), :], x.shape)


def _softmax_step(s, peak, total):
    """One block more of an online softmax: (new peak, new total, what the old sums keep, weights)."""
    new_peak = jnp.maximum(peak, s.max(1, keepdims=True))
    p = jnp.exp2(s - new_peak)
    keep = jnp.exp2(peak - new_peak)
    return new_peak, total * keep + p.sum(1, keepdims=True), keep, p


def _attend_one(refs, z: _Shapes, tile, step, run_blocks):
    """A tile of one token. Returns sums [rows, value lanes], normalised."""
    dtype = refs.compute_dtype
    heads = z.heads_per_group
    num_groups = z.num_kv // heads
    rows = z.rows if num_groups == 1 else heads * z.group
    head_of_row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0) // z.group
    q_NC = refs.q_buf[tile % 2, 0].astype(jnp.float32) * z.query_factor
    position = refs.position_N[tile]

    def pick(x, k):
        return jnp.where(jnp.broadcast_to(head_of_row == k, x.shape), x, 0.0).astype(dtype)

    q = [[pick(q_NC[g * rows : (g + 1) * rows], k) for k in range(heads)] for g in range(num_groups)]

    def scores(g, buf, sees):
        s = jnp.zeros((rows, z.block), jnp.float32)
        for k in range(heads):
            part = _dot(q[g][k], _part(buf, g * heads + k, z.key, dtype, z), 1)
            s += _times_row(part, refs.key_scale, g * heads + k) if z.is_scaled else part
        return _masked_scores(s, sees, z)

    def add_values(g, buf, p, acc):
        for k in range(heads):
            weights = _times_row(p, refs.value_scale, g * heads + k) if z.is_scaled else p
            acc += _dot(pick(weights, k), _part(buf, g * heads + k, z.value, dtype, z), 0)
        return acc

    def block(slot, first, carry):
        buf = refs.kv_buf.at[slot]
        _load_scales(refs, z, slot)
        key_pos = first + lax.broadcasted_iota(jnp.int32, (1, z.block), 1)
        sees = key_pos <= position
        if z.window is not None:
            sees &= key_pos > position - z.window
        sees = jnp.broadcast_to(sees, (rows, z.block))
        # The units take products in this order: the scores of a group fill the wait for another's softmax.
        all_scores = [scores(g, buf, sees) for g in range(num_groups)]
        weighed = [_softmax_step(s, *carry[g][:2]) for g, s in enumerate(all_scores)]
        return tuple(
            (peak, total, add_values(g, buf, p, carry[g][2] * keep)) for g, (peak, total, keep, p) in enumerate(weighed)
        )

    width = z.value.stop - z.value.start
    start = (
        jnp.full((rows, 1), LOWEST, jnp.float32),
        jnp.zeros((rows, 1), jnp.float32),
        jnp.zeros((rows, width), jnp.float32),
    )
    groups = run_blocks(tile, step, block, (start,) * num_groups)
    out = [acc * (z.product_factor / total) for _, total, acc in groups]
    return out[0] if num_groups == 1 else jnp.concatenate(out, axis=0)


def _attend_many(refs, z: _Shapes, tile, step, run_blocks):
    """A tile of up to Q tokens; leaves its outputs in `out_f32`."""
    dtype = refs.compute_dtype
    num_rows = z.group * z.tile
    shift = refs.token_N[tile] - _tile_start(refs, z, tile)
    for c in range(refs.q_f32.shape[0]):
        lanes = slice(c * LANES, (c + 1) * LANES)
        refs.q_f32[c] = refs.q_buf[tile % 2, :, :, lanes].reshape(-1, LANES).astype(jnp.float32) * z.query_factor
        for k in range(z.num_kv):
            heads = [refs.q_f32[c, pl.ds(k * z.group + g, z.tile, stride=z.rows), :] for g in range(z.group)]
            refs.q_by_head[k, :, lanes] = jnp.concatenate(heads, axis=0).astype(dtype)
    refs.peak[...] = jnp.full_like(refs.peak, LOWEST)
    refs.total[...] = jnp.zeros_like(refs.total)
    refs.acc[...] = jnp.zeros_like(refs.acc)
    token = lax.broadcasted_iota(jnp.int32, (num_rows, 1), 0) % z.tile
    query_pos = refs.position_N[tile] - shift + token

    def block(slot, first, carry):
        buf = refs.kv_buf.at[slot]
        _load_scales(refs, z, slot)
        key_pos = first + lax.broadcasted_iota(jnp.int32, (1, z.block), 1)

        def one_head(k, _):
            shape = (num_rows, z.block)
            s = _dot(refs.q_by_head[k], _part(buf, k, z.key, dtype, z), 1)
            if z.is_scaled:
                s = _times_row(s, refs.key_scale, k)
            age = jnp.broadcast_to(query_pos, shape) - jnp.broadcast_to(key_pos, shape)
            sees = age >= 0
            if z.window is not None:
                sees &= age < z.window
            s = _masked_scores(s, sees, z)
            refs.peak[k], refs.total[k], keep, p = _softmax_step(s, refs.peak[k], refs.total[k])
            if z.is_scaled:
                p = _times_row(p, refs.value_scale, k)
            acc = refs.acc[k] * keep
            refs.acc[k] = acc + _dot(p.astype(dtype), _part(buf, k, z.value, dtype, z), 0)
            return 0

        lax.fori_loop(0, z.num_kv, one_head, 0)
        return carry

    run_blocks(tile, step, block, 0)
    for k in range(z.num_kv):
        out = refs.acc[k] * (z.product_factor / refs.total[k])
        for g in range(z.group):
            rows = pl.ds(k * z.group + g, z.tile, stride=z.rows)
            for c in range(refs.out_f32.shape[0]):
                refs.out_f32[c, rows, :] = out[g * z.tile : (g + 1) * z.tile, c * LANES : (c + 1) * LANES]


def _start(copy):
    copy.start()


def _wait(copy):
    copy.wait()


def _tile_start(refs, z: _Shapes, tile):
    """First token of the tile's Q tokens in memory; before its own first token where they would end past T."""
    return jnp.minimum(refs.token_N[tile], refs.q_hbm.shape[0] - z.tile)


def _query_copies(refs, z: _Shapes, tile, act):
    """Copies a tile's queries in: one token, or Q of them."""
    slot = tile % 2
    sem = refs.q_sem.at[slot]

    def copy(start, size):
        act(pltpu.make_async_copy(refs.q_hbm.at[pl.ds(start, size)], refs.q_buf.at[slot, pl.ds(0, size)], sem))

    if z.tile == 1:
        copy(refs.token_N[tile], 1)
        return
    is_one = refs.count_N[tile] == 1
    pl.when(is_one)(lambda: copy(refs.token_N[tile], 1))
    pl.when(jnp.logical_not(is_one))(lambda: copy(_tile_start(refs, z, tile), z.tile))


def _output_copies(refs, z: _Shapes, tile, slot, act):
    """Copies a tile's own outputs out, and no others: a neighbour's may be there already."""
    token, count, sem = refs.token_N[tile], refs.count_N[tile], refs.out_sem.at[slot]
    shift = jnp.where(count == 1, 0, token - _tile_start(refs, z, tile)) if z.tile > 1 else 0

    def copy(at, size):
        source = refs.out_buf.at[slot, pl.ds(shift + at, size)]
        act(pltpu.make_async_copy(source, refs.out_hbm.at[pl.ds(token + at, size)], sem))

    for_pieces(count, z.tile, copy)


def _block_copies(refs, z: _Shapes, tile, block, slot, act):
    """Copies a block's pages in, those alone that the tile sees. Whole blocks, the most, need no loop."""
    first = refs.first_page_N[tile] + block * z.pages
    count = jnp.minimum(refs.end_page_N[tile] - first, z.pages)
    base = refs.base_N[tile] + first

    def one_page(i, _=0):
        page = refs.table_X[base + i]
        for hbm, vmem in refs.page_arrays:
            act(pltpu.make_async_copy(hbm.at[page], vmem.at[slot, i], refs.kv_sem.at[slot]))
        return 0

    @pl.when(count == z.pages)
    def _():
        for i in range(z.pages):
            one_page(i)

    @pl.when(count < z.pages)
    def _():
        lax.fori_loop(0, count, one_page, 0)

    return count


def _zero_pages(refs, z: _Shapes, slot, count):
    """Clears the pages of a block that were not copied: what stood there may not be finite, and 0 * NaN is NaN."""

    def one_page(i, _):
        for _, vmem in refs.page_arrays:
            vmem[slot, i] = jnp.zeros(vmem.shape[2:], vmem.dtype)
        return 0

    lax.fori_loop(count, z.pages, one_page, 0)


def _run_blocks(refs, z: _Shapes, tile, step, block, carry):
    """Runs `block(slot, first position, carry)` over the tile's blocks, and starts the copy of the one that follows."""
    num_blocks = _num_blocks(refs, z, tile)

    def body(i, carry):
        slot = (step + i) % 2
        is_last = i + 1 == num_blocks
        next_tile, next_block = jnp.where(is_last, tile + 1, tile), jnp.where(is_last, 0, i + 1)

        @pl.when(next_tile < refs.counts_2[0])
        def _():
            _block_copies(refs, z, next_tile, next_block, 1 - slot, _start)

        count = _block_copies(refs, z, tile, i, slot, _wait)
        _zero_pages(refs, z, slot, count)
        return block(slot, (refs.first_page_N[tile] + i * z.pages) * z.page_size, carry)

    return lax.fori_loop(0, num_blocks, body, carry)


def _num_blocks(refs, z: _Shapes, tile):
    return (refs.end_page_N[tile] - refs.first_page_N[tile] + z.pages - 1) // z.pages


def _kernel(*all_refs, z: _Shapes, names: tuple[str, ...], compute_dtype):
    """Walks the tiles."""
    refs = SimpleNamespace(**dict(zip(names, all_refs, strict=True)), compute_dtype=compute_dtype)
    refs.page_arrays = [(refs.kv_hbm, refs.kv_buf)]
    if z.is_scaled:
        refs.page_arrays.append((refs.scale_hbm, refs.scale_buf))
    num_seeing, num_tiles = refs.counts_2[0], refs.counts_2[1]

    @pl.when(num_seeing > 0)
    def _():
        _query_copies(refs, z, 0, _start)
        _block_copies(refs, z, 0, 0, 0, _start)

    def one_tile(tile, step):
        slot = tile % 2
        pl.when(tile + 1 < num_seeing)(lambda: _query_copies(refs, z, tile + 1, _start))
        pl.when(tile >= 2)(lambda: _output_copies(refs, z, tile - 2, slot, _wait))
        _query_copies(refs, z, tile, _wait)
        run_blocks = functools.partial(_run_blocks, refs, z)

        def one():
            out = _attend_one(refs, z, tile, step, run_blocks)
            rows = out.shape[0]
            refs.out_buf[slot, 0, :rows] = out.astype(refs.out_buf.dtype)

        def many():
            _attend_many(refs, z, tile, step, run_blocks)
            for c in range(refs.out_f32.shape[0]):
                out = refs.out_f32[c].reshape(z.tile, z.rows, LANES)
                refs.out_buf[slot, :, :, c * LANES : (c + 1) * LANES] = out.astype(refs.out_buf.dtype)

        if z.tile == 1:
            one()
        else:
            pl.when(refs.count_N[tile] == 1)(one)
            pl.when(refs.count_N[tile] > 1)(many)
        _output_copies(refs, z, tile, slot, _start)
        return step + _num_blocks(refs, z, tile)

    lax.fori_loop(0, num_seeing, one_tile, 0)
    for back in (2, 1):
        tile = num_seeing - back
        pl.when(tile >= 0)(functools.partial(lambda tile: _output_copies(refs, z, tile, tile % 2, _wait), tile))
    refs.out_buf[0] = jnp.zeros(refs.out_buf.shape[1:], refs.out_buf.dtype)
    for act in (_start, _wait):
        lax.fori_loop(num_seeing, num_tiles, lambda tile, _, act=act: _output_copies(refs, z, tile, 0, act) or 0, 0)


def _scratch(z: _Shapes, page_arrays, compute_dtype, dtype, vmem_tile: int):
    """(name, scratch shape) in the kernel's order."""
    key, value = z.key.stop - z.key.start, z.value.stop - z.value.start
    named = [
        ("q_buf", pltpu.VMEM((2, vmem_tile, z.rows, key), dtype)),
        ("out_buf", pltpu.VMEM((2, vmem_tile, z.rows, value), dtype)),
        ("q_sem", pltpu.SemaphoreType.DMA((2,))),
        ("out_sem", pltpu.SemaphoreType.DMA((2,))),
        ("kv_sem", pltpu.SemaphoreType.DMA((2,))),
    ]
    names = ("kv_buf", "scale_buf")[: len(page_arrays)]
    named += [(n, pltpu.VMEM((2, z.pages, *x.shape[1:]), x.dtype)) for n, x in zip(names, page_arrays, strict=True)]
    if z.tile > 1:
        num_rows = z.group * z.tile
        named += [
            ("q_f32", pltpu.VMEM((key // LANES, z.tile * z.rows, LANES), jnp.float32)),
            ("out_f32", pltpu.VMEM((value // LANES, z.tile * z.rows, LANES), jnp.float32)),
            ("q_by_head", pltpu.VMEM((z.num_kv, num_rows, key), compute_dtype)),
            ("peak", pltpu.VMEM((z.num_kv, num_rows, 1), jnp.float32)),
            ("total", pltpu.VMEM((z.num_kv, num_rows, 1), jnp.float32)),
            ("acc", pltpu.VMEM((z.num_kv, num_rows, value), jnp.float32)),
        ]
    if z.is_scaled:
        named += [(n, pltpu.VMEM((z.num_kv, z.block), jnp.float32)) for n in ("key_scale", "value_scale")]
    return named


def _shapes_of(q_TKGH, pages, work: TpuWork, compute_dtype, pages_per_block: int, soft_cap, scale) -> _Shapes:
    _, num_kv, group, head_dim = q_TKGH.shape
    kv_dtype = pages[0].dtype
    return _Shapes(
        num_kv=num_kv,
        group=group,
        head_dim=head_dim,
        page_size=pages[0].shape[2],
        rows=round_up(num_kv * group, 32 // q_TKGH.dtype.itemsize),
        pages=pages_per_block,
        tile=work.queries_per_tile,
        window=work.window,
        soft_cap=soft_cap,
        scale=scale,
        heads_per_group=_heads_per_group(num_kv, group),
        is_scaled=is_quantized(kv_dtype),
        shift=FP8_SHIFT if kv_dtype == jnp.float8_e4m3fn and compute_dtype == jnp.bfloat16 else 0,
    )


def attend(q_TKGH, pages, work: TpuWork, *, scale, soft_cap=None, block_sizes: BlockSizes | None, interpret):
    """See the contract in `contract.py`."""
    num_tokens, num_kv, group, head_dim = q_TKGH.shape
    dtype = q_TKGH.dtype
    compute_dtype = jnp.promote_types(dtype, jnp.float32 if pages[0].dtype == jnp.float32 else dtype)
    sizes = block_sizes or tuned_block_sizes(q_TKGH, pages, work)
    z = _shapes_of(q_TKGH, pages, work, compute_dtype, sizes.pages_per_block, soft_cap, scale)
    num_heads = num_kv * group
    padded_tokens = max(num_tokens, z.tile)
    key, value = z.key.stop - z.key.start, z.value.stop - z.value.start
    q_TNC = jnp.pad(
        q_TKGH.reshape(num_tokens, num_heads, head_dim),
        ((0, padded_tokens - num_tokens), (0, z.rows - num_heads), (0, key - head_dim)),
    )
    scalars = {
        name: getattr(work, name)
        for name in (
            "table_X",
            "base_N",
            "token_N",
            "count_N",
            "position_N",
            "first_page_N",
            "end_page_N",
            "counts_2",
        )
    }
    scratch = _scratch(z, pages, compute_dtype, dtype, z.tile)
    names = (*scalars, "q_hbm", *("kv_hbm", "scale_hbm")[: len(pages)], "out_hbm", *(name for name, _ in scratch))
    any_spec = pl.BlockSpec(memory_space=pl.ANY)
    out_TNC = pl.pallas_call(
        functools.partial(_kernel, z=z, names=names, compute_dtype=compute_dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            in_specs=[any_spec] * (1 + len(pages)),
            out_specs=any_spec,
            grid=(1,),
            scratch_shapes=[shape for _, shape in scratch],
        ),
        out_shape=jax.ShapeDtypeStruct((padded_tokens, z.rows, value), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VMEM_LIMIT,
            disable_bounds_checks=True,
        ),
        cost_estimate=_cost(z, work, pages, num_tokens),
        interpret=interpret,
        name="ragged_paged_attention_tpu",
    )(*scalars.values(), q_TNC, *pages)
    first = value_lane(head_dim) - z.value.start
    return out_TNC[:num_tokens, :num_heads, first : first + head_dim].reshape(q_TKGH.shape)


def _cost(z: _Shapes, work: TpuWork, pages, num_tokens: int) -> pl.CostEstimate:
    """Of contexts that fill half their tables: the real ones are not known when compiling."""
    num_pages = work.table_X.shape[0] // 2
    page_bytes = sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in pages)
    seen = num_tokens * max(1, num_pages * z.page_size // max(1, work.base_N.shape[0]))
    if z.window is not None:
        seen = min(seen, num_tokens * z.window)
    scores = seen * z.num_kv * z.group
    token_bytes = 2 * z.num_kv * z.group * z.head_dim * 2
    return pl.CostEstimate(
        flops=4 * scores * z.head_dim,
        transcendentals=scores,
        bytes_accessed=num_pages * page_bytes + num_tokens * token_bytes,
    )


def prepare(
    batch: RaggedBatch, *, num_tokens, max_query_len, page_size, sliding_window, block_sizes: BlockSizes | None
):
    """Lists the work of a step, once for all layers."""
    sizes = block_sizes or TUNED.choose(work_bucket(page_size), BlockSizes())
    tile = tile_size(max_query_len, sizes.queries_per_tile)
    return list_tiles(batch, num_tokens=num_tokens, page_size=page_size, window=sliding_window, tile=tile)


def why_not(needs: AttentionNeeds) -> str | None:
    """Why the kernel cannot run what is needed, and what to do."""
    if needs.platform != "tpu":
        return "it is compiled by the TPU compiler alone; use 'auto'"
    if needs.head_dim is not None and needs.head_dim > 256:
        return f"head_dim is {needs.head_dim}, at most 256 are supported; use 'xla'"
    if needs.page_size is not None:
        least = {None: 8, "float32": 8, "bfloat16": 16}.get(needs.kv_dtype, 16)
        if not least <= needs.page_size <= 256 or needs.page_size & (needs.page_size - 1):
            return f"page_size is {needs.page_size}; set it to a power of two from {least} to 256"
    if needs.dtype not in (None, "float32", "bfloat16"):
        return f"activations are {needs.dtype}; use bfloat16 or float32"
    return why_not_dtype(needs.kv_dtype)


def make_op(*, interpret=False, block_sizes: BlockSizes | None = None) -> AttentionOp:
    """The op.

    Args:
      interpret: as in `pl.pallas_call`, for tests on another platform.
      block_sizes: None for the default ones.
    """
    return AttentionOp(
        name="tpu",
        default_page_size=128,
        kv_head_axis=1,
        page_shapes=page_shapes,
        write=functools.partial(tpu_write.write, interpret=interpret),
        prepare=functools.partial(prepare, block_sizes=block_sizes),
        attend=functools.partial(attend, block_sizes=block_sizes, interpret=interpret),
        why_not=why_not,
        max_table_entries=MAX_TABLE_ENTRIES,
    )


OP = make_op()
