"""The op in plain XLA, in the forms that its compilers turn into one pass over the stored bytes.

What fuses was read off compiled programs (TPU v5e to tpu7x, H200), and is not what one would write first:

    w8a16   dot(x, int8 -> x's dtype) * scale    the conversion fuses into the dot, everywhere
    w8a8    dot(int8, int8) -> int32             native, everywhere
    w4a16   up to 64 rows: one product per group, [U, T, O], times its scale, summed over U. A TPU fuses all three.
            more rows: dequantize in [U, I / U, O], contract both. A TPU fuses; scaled as [I, O] it writes a bfloat16
            copy of the weight. A GPU writes one either way: there `gpu.py` is for.

Fewer than 8 rows are padded to 8: a product with one row leaves a TPU's matrix unit for its vector unit, which then
takes up to 2.8 times as long as the bytes, and XLA's CPU back end falls off its fast path too.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_matmul.contract import MatmulOp, QuantizedWeight, check_shapes

LEAST_ROWS = 8
MOST_GROUPED_ROWS = 64  # v5e, 4096 x 6144, bundles of grouped and dequantized form: see docs/kernels.md


def matmul(x_TI, weight: QuantizedWeight, *, scheme: str, x_scale: jax.Array | None = None):
    """See `contract.py`."""
    check_shapes(x_TI, weight, scheme, x_scale)
    num_rows = x_TI.shape[0]
    x_TI = jnp.pad(x_TI, ((0, max(0, LEAST_ROWS - num_rows)), (0, 0)))
    if scheme == "w8a8":
        y_TO = _w8a8(x_TI, weight, x_scale)
    elif scheme == "w8a16":
        y_TO = _dot(x_TI, weight.values_IO.astype(x_TI.dtype)) * weight.scale[None, :]
    elif num_rows <= MOST_GROUPED_ROWS:
        y_TO = grouped(x_TI, weight)
    else:
        y_TO = dequantized(x_TI, weight)
    return y_TO[:num_rows].astype(x_TI.dtype)


def _precision(x) -> lax.Precision:
    """float32 activations keep full float32 precision on every platform."""
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


def _dot(x_TI, w_IO):
    return jnp.matmul(x_TI, w_IO, precision=_precision(x_TI), preferred_element_type=jnp.float32)


def _by_group(x_TI, weight: QuantizedWeight):
    """x [T, U, E] and values [U, E, O]; E inputs share a scale."""
    num_groups, num_outputs = weight.scale.shape
    return x_TI.reshape(x_TI.shape[0], num_groups, -1), weight.values_IO.reshape(num_groups, -1, num_outputs)


def grouped(x_TI, weight: QuantizedWeight):
    """One product per group, scaled afterwards; float32 [T, O]."""
    x_TUE, values_UEO = _by_group(x_TI, weight)
    part_UTO = jnp.einsum(
        "TUE,UEO->UTO",
        x_TUE,
        values_UEO.astype(x_TI.dtype),
        precision=_precision(x_TI),
        preferred_element_type=jnp.float32,
    )
    return jnp.sum(part_UTO * weight.scale[:, None, :], axis=0)


def dequantized(x_TI, weight: QuantizedWeight):
    """The weight in x's dtype, contracted over groups and their inputs at once; float32 [T, O]."""
    # Without the barrier XLA contracts the weight as [I, O], and writes that out.
    x_TUE, values_UEO = lax.optimization_barrier(_by_group(x_TI, weight))
    w_UEO = (values_UEO.astype(jnp.float32) * weight.scale[:, None, :]).astype(x_TI.dtype)
    return jnp.einsum("TUE,UEO->TO", x_TUE, w_UEO, precision=_precision(x_TI), preferred_element_type=jnp.float32)


def _w8a8(x_TI, weight: QuantizedWeight, x_scale: jax.Array | None):
    x32_TI = x_TI.astype(jnp.float32)
    peak_T1 = jnp.max(jnp.abs(x32_TI), axis=1, keepdims=True)
    if x_scale is None:
        scale_T1 = jnp.where(peak_T1 == 0.0, 1.0, peak_T1 / 127.0)
    else:
        scale_T1 = jnp.broadcast_to(x_scale, peak_T1.shape)
    steps_TI = jnp.clip(jnp.round(x32_TI / scale_T1), -127.0, 127.0).astype(jnp.int8)
    sum_TO = jnp.matmul(steps_TI, weight.values_IO, preferred_element_type=jnp.int32)
    # The integers of a row that is not finite mean nothing. (A maximum may lose a NaN on the CPU.)
    is_finite_T1 = jnp.all(jnp.isfinite(x32_TI), axis=1, keepdims=True)
    scale_T1 = jnp.where(is_finite_T1, scale_T1, jnp.nan)
    return sum_TO.astype(jnp.float32) * scale_T1 * weight.scale[None, :]


OP = MatmulOp(name="xla", matmul=matmul)
