"""Pages of the GPU kernels, and the kernel that writes them.

Keys and values [P, K, Z, H], so that a page of a head is one piece of memory; in 8 bits also their scales [P, K, Z].
One program writes one token's keys and values, all heads, and quantizes them on the way: XLA would take six kernels
more in every layer for that.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.ragged_paged_attention.kv_quant import LARGEST, is_quantized


def page_shapes(num_pages, num_kv_heads, head_dim, page_size, dtype):
    """Keys and values [P, K, Z, H], and in 8 bits their scales [P, K, Z]."""
    shape = (num_pages, num_kv_heads, page_size, head_dim)
    scales = (jax.ShapeDtypeStruct(shape[:3], jnp.float32),) * 2 if is_quantized(dtype) else ()
    return (*(jax.ShapeDtypeStruct(shape, dtype),) * 2, *scales)


def pow2(x: int) -> int:
    """The least power of 2 that is not less."""
    return 1 << (x - 1).bit_length()


def _quantized(x_KH, dtype):
    """What `quantize_heads` gives, from what Triton has: there is no rounding and no test for infinity."""
    largest = LARGEST[jnp.dtype(dtype).name]
    scale_K = jnp.abs(x_KH).max(1) / largest
    scale_K = jnp.where(scale_K == 0.0, 1.0, scale_K)
    is_finite_K = (x_KH * 0.0).sum(1) == 0.0
    x_KH = jnp.maximum(jnp.minimum(x_KH / scale_K[:, None], largest), -largest)
    x_KH = jnp.where(is_finite_K[:, None], x_KH, 0.0)
    if dtype == jnp.int8:
        below_KH = jnp.floor(x_KH)
        rest_KH, half_KH = x_KH - below_KH, below_KH * 0.5
        is_up_KH = (rest_KH > 0.5) | ((rest_KH == 0.5) & (half_KH != jnp.floor(half_KH)))
        x_KH = below_KH + jnp.where(is_up_KH, 1.0, 0.0)
    return x_KH.astype(dtype), jnp.where(is_finite_K, scale_K, jnp.nan)


def _write_kernel(page_ref, offset_ref, k_ref, v_ref, *refs, num_kv_heads: int, head_dim: int):
    """One token: its heads, and their scales if any, to (page, offset)."""
    outs = refs[len(refs) // 2 :]  # behind the same arrays as inputs
    token = pl.program_id(0)
    page, offset = page_ref[token], offset_ref[token]
    head_K = jnp.arange(pow2(num_kv_heads), dtype=jnp.int32)
    lane_H = jnp.arange(pow2(head_dim), dtype=jnp.int32)
    mask_K = head_K < num_kv_heads
    mask_KH = mask_K[:, None] & (lane_H < head_dim)[None, :]
    for i, new_ref in enumerate((k_ref, v_ref)):
        at = new_ref.at[token, head_K[:, None], lane_H[None, :]]
        x_KH = plgpu.load(at, mask=mask_KH, other=jnp.zeros((), new_ref.dtype))
        if len(outs) == 4:
            x_KH, scale_K = _quantized(x_KH.astype(jnp.float32), outs[i].dtype)
            plgpu.store(outs[2 + i].at[page, head_K, offset], scale_K, mask=mask_K)
        at = outs[i].at[page, head_K[:, None], offset, lane_H[None, :]]
        plgpu.store(at, x_KH.astype(outs[i].dtype), mask=mask_KH)


def write(pages, k_TKH, v_TKH, page_T, offset_T, *, interpret=False):
    """Writes each token's key and value at (page, offset), in one kernel for all arrays and in place.

    Raises:
      NotImplementedError: offsets into the pages of one device would wrap.
    """
    if 2**31 < pages[0].size * pages[0].dtype.itemsize <= 2**32 and pages[0].dtype.itemsize == 1:
        # Pallas takes 32-bit signed offsets up to 4 GiB; past that 64-bit ones.
        raise NotImplementedError(
            f"{pages[0].size} bytes of keys in one layer on one device: Triton's offsets wrap between 2 and 4 GiB of "
            f"8-bit pages; use at most {2**31 // math.prod(pages[0].shape[1:])} pages"
        )
    num_tokens, num_kv_heads, head_dim = k_TKH.shape
    return tuple(
        pl.pallas_call(
            functools.partial(_write_kernel, num_kv_heads=num_kv_heads, head_dim=head_dim),
            grid=(num_tokens,),
            out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in pages],
            input_output_aliases={4 + i: i for i in range(len(pages))},
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="ragged_paged_attention_gpu_write",
        )(page_T, offset_T, k_TKH, v_TKH, *pages)
    )
