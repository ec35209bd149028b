"""Keys and values in 8 bits: a head is `stored * scale`, one float32 scale per position and KV head.

    x_TKH   [ 0.10 -0.40  0.20 ]      peak 0.40     int8: scale 0.40 / 127     fp8: scale 0.40 / 448
    stored  [   32  -127    64 ]      at most half a step off: 0.40 / 254

Every head is scaled to the whole range of the dtype by what it holds itself: nothing is calibrated, and no later value
can be out of range.
"""

from __future__ import annotations

import jax.numpy as jnp

LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}  # by dtype; -128 stays unused, so that a sign costs nothing
PLAIN = ("float32", "bfloat16")


def is_quantized(dtype) -> bool:
    """Whether pages of this dtype have scales."""
    return jnp.dtype(dtype).name in LARGEST


def quantize_heads(x_TKH, dtype):
    """Divides each head by its scale and rounds to the nearest, ties to even.

    Args:
      x_TKH: keys or values of any float dtype.
      dtype: int8 or float8_e4m3fn.

    Returns:
      stored_TKH: finite always.
      scale_TK: float32; the largest magnitude over the dtype's largest number, 1 where that is 0, and NaN where a head
        holds anything that is not finite: the engine's NaN guard then sees it in every output that it reaches.
    """
    dtype = jnp.dtype(dtype)
    largest = LARGEST[dtype.name]
    x_TKH = x_TKH.astype(jnp.float32)
    peak_TK = jnp.abs(x_TKH).max(-1)
    scale_TK = peak_TK / largest
    scale_TK = jnp.where(scale_TK == 0.0, 1.0, scale_TK)  # also where the quotient underflows
    is_finite_TK = jnp.isfinite(x_TKH).all(-1)  # not of the peak: XLA's maximum may pass over a NaN
    # Clipped before the cast: float8_e4m3fn has no infinity, and what is too large for it becomes NaN.
    stored_TKH = jnp.clip(x_TKH / scale_TK[..., None], -largest, largest)
    stored_TKH = jnp.where(is_finite_TK[..., None], stored_TKH, 0.0)
    if dtype == jnp.int8:
        stored_TKH = jnp.round(stored_TKH)
    return stored_TKH.astype(dtype), jnp.where(is_finite_TK, scale_TK, jnp.nan)


def why_not_dtype(kv_dtype: str | None) -> str | None:
    """Why pages cannot be of this dtype, or None."""
    if kv_dtype is None or kv_dtype in PLAIN or kv_dtype in LARGEST:
        return None
    return f"pages of {kv_dtype}; keys and values may be {', '.join((*PLAIN, *LARGEST))}"
