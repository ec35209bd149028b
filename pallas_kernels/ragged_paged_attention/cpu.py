"""The op on a CPU as a native kernel: `cpu.cc`, called through jax's foreign function interface.

Keys are [P, K, Z / 16, H, 16] and values [P, K, Z, H]; see `cpu.cc`. It reads pages in place where the XLA form copies
them first.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import native
from pallas_kernels.ragged_paged_attention.contract import AttentionNeeds, AttentionOp, RaggedBatch
from pallas_kernels.ragged_paged_attention.kv_quant import is_quantized, quantize_heads, why_not_dtype

SOURCE = Path(__file__).with_name("cpu.cc")
PANEL = 16  # positions that lie side by side in the keys
ATTEND, WRITE = "jaxinfer_ragged_paged_attention", "jaxinfer_write_kv_pages"
TARGETS = ((ATTEND, "Attend"), (WRITE, "Write"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CpuWork:
    """The batch as it is.

    Attributes:
      window: positions a query sees, or None for all; static.
    """

    batch: RaggedBatch
    window: int | None = dataclasses.field(metadata={"static": True})


def page_shapes(num_pages, num_kv_heads, head_dim, page_size, dtype):
    """Keys and values, and their scales [P, K, Z] when quantized."""
    keys = jax.ShapeDtypeStruct((num_pages, num_kv_heads, page_size // PANEL, head_dim, PANEL), dtype)
    values = jax.ShapeDtypeStruct((num_pages, num_kv_heads, page_size, head_dim), dtype)
    if not is_quantized(dtype):
        return keys, values
    scales = jax.ShapeDtypeStruct((num_pages, num_kv_heads, page_size), jnp.float32)
    return keys, values, scales, scales


def write(pages, k_TKH, v_TKH, page_T, offset_T):
    """Writes each token's key and value at (page, offset), in place when the pages are donated."""
    key_pages, value_pages, *scales = pages
    dtype = key_pages.dtype
    if scales:
        k_TKH, k_scale_TK = quantize_heads(k_TKH, dtype)
        v_TKH, v_scale_TK = quantize_heads(v_TKH, dtype)
        new = (k_scale_TK, v_scale_TK)
        scales = [s.at[page_T, :, offset_T].set(x) for s, x in zip(scales, new, strict=True)]
    call = jax.ffi.ffi_call(
        WRITE,
        tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (key_pages, value_pages)),
        input_output_aliases={4: 0, 5: 1},
    )
    written = call(k_TKH.astype(dtype), v_TKH.astype(dtype), page_T, offset_T, key_pages, value_pages)
    return (*written, *scales)


def prepare(batch: RaggedBatch, *, num_tokens, max_query_len, page_size, sliding_window):
    """The kernel works everything out from the batch."""
    del num_tokens, max_query_len, page_size
    return CpuWork(batch, sliding_window)


def attend(q_TKGH, pages, work: CpuWork, *, scale, soft_cap=None):
    """See the contract in `contract.py`."""
    key_pages, value_pages, *scales = pages
    none = jnp.zeros((0,), jnp.float32)
    call = jax.ffi.ffi_call(ATTEND, jax.ShapeDtypeStruct(q_TKGH.shape, jnp.float32))
    out_TKGH = call(
        q_TKGH.astype(jnp.float32),
        work.batch.page_table_BM,
        work.batch.context_len_B,
        work.batch.query_start_R,
        key_pages,
        value_pages,
        *(scales or (none, none)),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
        window=np.int64(work.window or 0),
    )
    return out_TKGH.astype(q_TKGH.dtype)


def why_not(needs: AttentionNeeds) -> str | None:
    """None after the library is loaded; else what is missing."""
    if needs.platform != "cpu":
        return "it is written for CPUs"
    if needs.page_size is not None and needs.page_size % PANEL:
        return f"page_size is {needs.page_size}; it must be a multiple of {PANEL}"
    if needs.head_dim is not None and needs.head_dim % PANEL:
        return f"head_dim is {needs.head_dim}; it must be a multiple of {PANEL}"
    if (why := why_not_dtype(needs.kv_dtype)) is not None:
        return why
    if needs.native_folder is None:
        return "no folder of native kernels was given"
    path = native.library_path(SOURCE, needs.native_folder)
    if not path.exists():
        return "it is not built for this machine; `python -m jaxinfer.native` does so where there is a C++ compiler"
    try:
        native.load(path, TARGETS)
    except OSError as why:
        return f"{path} cannot be loaded: {why}; delete it and run `python -m jaxinfer.native`"
    return None


OP = AttentionOp(
    name="cpu",
    default_page_size=32,
    kv_head_axis=1,
    page_shapes=page_shapes,
    write=write,
    prepare=prepare,
    attend=attend,
    why_not=why_not,
)
