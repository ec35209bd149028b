"""Rows whose logits are not numbers any more: one flag per row, so that the engine ends that request alone.

Compiled code never raises. `isfinite` of every entry, and not of the row's maximum and minimum: in long rows XLA:CPU's
max drops NaN (jax 0.10.2, 4096 entries). [32, 49152] float32 on 2 cores: 0.23 ms beside a step of 70 to 110 ms.
"""

import jax
import jax.numpy as jnp


def is_bad_rows(x_BV: jax.Array) -> jax.Array:
    """bool [B]: the row holds a NaN or an infinity."""
    return ~jnp.all(jnp.isfinite(x_BV), axis=1)
