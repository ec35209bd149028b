"""The op, slow and obvious: the weight is rebuilt in float32.

Written before the fast ones; shares no helper with them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_matmul.contract import MatmulOp, QuantizedWeight, check_shapes


def matmul(x_TI, weight: QuantizedWeight, *, scheme: str, x_scale: jax.Array | None = None):
    """Rebuilds the weight, and for w8a8 the rounded activations, and multiplies in full float32."""
    check_shapes(x_TI, weight, scheme, x_scale)
    values_IO, scale = weight
    scale_UO = scale if scale.ndim == 2 else scale[None, :]
    scale_IO = jnp.repeat(scale_UO, values_IO.shape[0] // scale_UO.shape[0], axis=0)
    w_IO = values_IO.astype(jnp.float32) * scale_IO
    x32_TI = x_TI.astype(jnp.float32)
    if scheme == "w8a8":
        x32_TI = jnp.stack([_rounded(x_I, x_scale) for x_I in x32_TI])
    y_TO = jnp.matmul(x32_TI, w_IO, precision=lax.Precision.HIGHEST)
    return y_TO.astype(x_TI.dtype)


def _rounded(x_I, x_scale: jax.Array | None):
    """A row as int8 would hold it, in float32; NaN where the row is not finite."""
    peak = jnp.max(jnp.abs(x_I))
    if x_scale is None:
        x_scale = jnp.where(peak == 0.0, 1.0, peak / 127.0)
    steps_I = jnp.clip(jnp.round(x_I / x_scale), -127.0, 127.0)
    return jnp.where(jnp.all(jnp.isfinite(x_I)), steps_I * x_scale, jnp.nan)


OP = MatmulOp(name="reference", matmul=matmul)
