"""The kernels that can be reported on, at a workload's shapes: functions, abstract arrays, integer arguments."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention as jax_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import tuned_block_sizes

from jaxinfer.plan.targets import Chip
from pallas_kernels.ragged_paged_attention import AttentionOp, RaggedBatch

from .shapes import Workload

JAX_DEFAULT_BLOCKS = (128, 32)  # pages and queries, where its table has nothing
VMEM_LIMIT = 64 << 20  # for jax's kernel: its tuned blocks do not fit in the default of 16 MiB


@dataclass(frozen=True)
class KernelProgram:
    """What is compiled.

    Attributes:
      function: of `arrays` and then of `numbers`.
      arrays: shapes of what lies on the device.
      numbers: int32 arguments, with the values that the kernel's run depends on.
      notes: choices made for this compile, for the report.
    """

    function: Callable[..., Any]
    arrays: tuple[Any, ...]
    numbers: tuple[np.ndarray, ...]
    notes: str


class CannotRun(Exception):
    """The kernel does not do this; the message says why."""


def _shape(shape: tuple[int, ...], dtype: str):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def build(name: str, load: Workload, chip: Chip, block_sizes: dict[str, int] | None = None) -> KernelProgram:
    """A kernel by name: `jax` (jax's own, TPU), `tpu` or `gpu` (ours), or `tpu-write`, `gpu-write` (ours, writing).

    Args:
      block_sizes: of ours, by field; None for those it takes by itself.

    Raises:
      CannotRun: there is no such kernel, or it says that it cannot do this.
    """
    if name == "jax":
        return _jax_kernel(load, chip)
    module, _, part = name.partition("-")
    op = _our_op(module, block_sizes)
    return _write(op, load) if part == "write" else _attend(op, load)


def _our_op(module: str, block_sizes: dict[str, int] | None) -> AttentionOp:
    path = f"pallas_kernels.ragged_paged_attention.{module}"
    try:
        found = importlib.import_module(path)
    except ModuleNotFoundError as why:
        raise CannotRun(f"there is no module {path}") from why
    return found.OP if block_sizes is None else found.make_op(block_sizes=found.BlockSizes(**block_sizes))


def _attend(op: AttentionOp, load: Workload) -> KernelProgram:
    shape = load.shape
    q_TKGH = _shape((load.num_tokens, shape.num_kv_heads, shape.group, shape.head_dim), load.dtype)
    pages = op.page_shapes(load.num_pages, shape.num_kv_heads, shape.head_dim, load.page_size, jnp.dtype(load.kv_dtype))

    def function(q_TKGH, pages, table_BM, context_len_B, start_R):
        work = op.prepare(
            RaggedBatch(table_BM, context_len_B, start_R),
            num_tokens=load.num_tokens,
            max_query_len=max(load.query_lens),
            page_size=load.page_size,
            sliding_window=shape.window,
        )
        return op.attend(q_TKGH, pages, work, scale=shape.head_dim**-0.5, soft_cap=shape.soft_cap)

    return KernelProgram(function, (q_TKGH, pages), _batch_numbers(load), f"{op.name}, pages of {load.page_size}")


def _batch_numbers(load: Workload) -> tuple[np.ndarray, ...]:
    return load.table(), load.context_lens(), load.query_starts()


def _write(op: AttentionOp, load: Workload) -> KernelProgram:
    shape = load.shape
    new_TKH = _shape((load.num_tokens, shape.num_kv_heads, shape.head_dim), load.dtype)
    pages = op.page_shapes(load.num_pages, shape.num_kv_heads, shape.head_dim, load.page_size, jnp.dtype(load.kv_dtype))
    last_T = np.concatenate([np.arange(load.context - n, load.context) for n in load.query_lens])
    row_T = np.repeat(np.arange(load.num_rows), load.query_lens)
    page_T = load.table()[row_T, last_T // load.page_size]
    offset_T = (last_T % load.page_size).astype(np.int32)

    def function(pages, k_TKH, v_TKH, page_T, offset_T):
        return op.write(pages, k_TKH, v_TKH, page_T, offset_T)

    return KernelProgram(function, (pages, new_TKH, new_TKH), (page_T, offset_T), f"{op.name}, writing")


def _jax_kernel(load: Workload, chip: Chip) -> KernelProgram:
    """Jax's kernel with the blocks that its own table has for the chip, at the nearest size that it has."""
    shape = load.shape
    heads = shape.num_kv_heads * shape.group
    q_TNH = _shape((load.num_tokens, heads, shape.head_dim), load.dtype)
    kv = _shape((load.num_pages, load.page_size, 2 * shape.num_kv_heads, shape.head_dim), load.kv_dtype)
    pages_per_block, queries_per_block = _jax_blocks(load, chip)
    scale = 1.0 if load.kv_dtype in ("int8", "float8_e4m3fn") else None

    def function(q_TNH, kv, table_BM, context_len_B, start_R, num_rows):
        return jax_attention(
            q_TNH,
            kv,
            context_len_B,
            table_BM,
            start_R,
            num_rows,
            sm_scale=shape.head_dim**-0.5,
            sliding_window=shape.window,
            soft_cap=shape.soft_cap,
            k_scale=scale,
            v_scale=scale,
            num_kv_pages_per_block=pages_per_block,
            num_queries_per_block=queries_per_block,
            vmem_limit_bytes=VMEM_LIMIT,
        )

    numbers = (*_batch_numbers(load), np.array([load.num_rows], np.int32))
    notes = f"blocks of {pages_per_block} pages, {queries_per_block} queries"
    return KernelProgram(function, (q_TNH, kv), numbers, notes)


def _jax_blocks(load: Workload, chip: Chip) -> tuple[int, int]:
    """(pages, queries) per block."""
    shape = load.shape
    key = tuned_block_sizes.simplify_key(
        (
            load.dtype,
            load.kv_dtype,
            shape.num_kv_heads * shape.group,
            shape.num_kv_heads,
            shape.head_dim,
            load.page_size,
            load.num_tokens,
            load.pages_per_row,
        )
    )
    device = " ".join(chip.kinds[0].split()[:2])
    alike = {
        k[6:]: blocks for k, blocks in tuned_block_sizes.TUNED_BLOCK_SIZES.get(device, {}).items() if k[:6] == key[:6]
    }
    # The table starts at 512 tokens and ends at contexts of a few pages: take the nearest that it has.
    nearest = min(alike, key=lambda k: (abs(k[0] - key[6]), abs(k[1] - key[7])), default=None)
    pages, queries = alike[nearest] if nearest else JAX_DEFAULT_BLOCKS
    return min(load.pages_per_row, pages), min(load.num_tokens, queries)
