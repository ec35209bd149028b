"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864).

Halves are rotated against each other, as in Llama's public weights. Phases are float32 from int32 positions whatever
the activations' dtype: in bfloat16 they are off by 0.86 at position 257.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.model.architecture import Architecture, LinearRopeScaling


def inverse_frequencies(arch: Architecture) -> np.ndarray:
    """Radians per position, float32 [H / 2]."""
    inv_freq = 1.0 / (
        np.float32(arch.rope_theta) ** (np.arange(0, arch.head_dim, 2, dtype=np.float32) / np.float32(arch.head_dim))
    )
    scaling = arch.rope_scaling
    if scaling is None:
        return inv_freq.astype(np.float32)
    if isinstance(scaling, LinearRopeScaling):
        return (inv_freq / np.float32(scaling.factor)).astype(np.float32)
    wavelength = 2 * math.pi / inv_freq
    long = scaling.original_context / scaling.low_freq_factor
    short = scaling.original_context / scaling.high_freq_factor
    smooth = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq
    return np.where(
        wavelength > long, inv_freq / scaling.factor, np.where(wavelength < short, inv_freq, blended)
    ).astype(np.float32)


def phases(arch: Architecture, position_T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine, float32 [T, 2, H / 2] each, of int32 positions [T], for both halves of a head.

    The first half's sine is negated. Stacked here, once: XLA's CPU back end computes every cosine again in every layer
    that uses it, but not what a concatenation has made.
    """
    angle_TH = position_T.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies(arch))[None, :]
    cos_TH, sin_TH = jnp.cos(angle_TH), jnp.sin(angle_TH)
    return jnp.stack([cos_TH, cos_TH], axis=1), jnp.stack([-sin_TH, sin_TH], axis=1)


def rotate(x, cos_T2H, sin_T2H):
    """Rotates [T, ..., H] by the phases of its token; computed in float32, returned in x's dtype.

    Written as x * cos + swapped halves * signed sin: XLA's CPU back end fuses a reversal, and not a concatenation.
    """
    shape = (x.shape[0], *(1,) * (x.ndim - 2), *cos_T2H.shape[1:])
    halves = x.astype(jnp.float32).reshape(*x.shape[:-1], *cos_T2H.shape[1:])
    turned = halves * cos_T2H.reshape(shape) + halves[..., ::-1, :] * sin_T2H.reshape(shape)
    return turned.reshape(x.shape).astype(x.dtype)
