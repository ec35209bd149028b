"""Rotary frequencies against formulas written out number by number, phases and rotation against float64."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import tiny_architecture

from jaxinfer.model import LinearRopeScaling, Llama3RopeScaling
from jaxinfer.model.rope import inverse_frequencies, phases, rotate

LLAMA_3_1 = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)


def _apply_scaling(frequencies, scaling: Llama3RopeScaling, number) -> list:
    """`apply_scaling` of Meta's Llama 3.1 reference code, one frequency at a time in the arithmetic of `number`."""
    out = []
    for frequency in map(number, frequencies):
        wavelength = number(2 * math.pi) / frequency
        if wavelength > number(scaling.original_context / scaling.low_freq_factor):
            frequency = frequency / number(scaling.factor)
        elif not wavelength < number(scaling.original_context / scaling.high_freq_factor):
            span = number(scaling.high_freq_factor - scaling.low_freq_factor)
            smooth = (number(scaling.original_context) / wavelength - number(scaling.low_freq_factor)) / span
            frequency = (number(1) - smooth) * frequency / number(scaling.factor) + smooth * frequency
        out.append(frequency)
    return out


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_plain_frequencies_are_powers_of_theta(theta, head_dim):
    got = inverse_frequencies(tiny_architecture(head_dim=head_dim, rope_theta=theta))
    assert got.dtype == np.float32
    exact = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    # numpy's float32 power: a unit or two in the last place, and differently so for numbers and for vectors.
    np.testing.assert_allclose(got, exact, rtol=1e-6)


def test_linear_scaling_divides_every_frequency():
    plain = tiny_architecture(head_dim=64)
    got = inverse_frequencies(dataclasses.replace(plain, rope_scaling=LinearRopeScaling(factor=4.0)))
    assert got.dtype == np.float32
    assert np.array_equal(got, inverse_frequencies(plain) / 4)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_llama3_scaling_is_the_formula_exactly(head_dim):
    """R147: no difference in float32 from the reference code, for Llama 3.1's numbers."""
    plain = tiny_architecture(head_dim=head_dim, rope_theta=500000.0)
    got = inverse_frequencies(dataclasses.replace(plain, rope_scaling=LLAMA_3_1))
    assert got.dtype == np.float32
    want = np.array(_apply_scaling(inverse_frequencies(plain), LLAMA_3_1, np.float32))
    assert want.dtype == np.float32
    assert np.abs(got - want).max() == 0
    exact = 500000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    np.testing.assert_allclose(got, _apply_scaling(exact, LLAMA_3_1, float), rtol=2e-6)


def test_scaling_changes_long_wavelengths_only():
    """Mutant of R147: dropping the scaling must show."""
    plain = tiny_architecture(head_dim=128, rope_theta=500000.0)
    scaled = dataclasses.replace(plain, rope_scaling=LLAMA_3_1)
    ratio = inverse_frequencies(plain) / inverse_frequencies(scaled)
    assert (ratio[:20] == 1).all()
    assert (ratio[-20:] == 8).all()
    assert (np.diff(ratio) >= 0).all()


@pytest.mark.parametrize("theta", [10000.0, 100000.0])
def test_phases_are_exact_over_8192_positions(theta):
    """R149: under 1e-3 from float64; bfloat16 phases, the mutant, are off by far more."""
    arch = tiny_architecture(head_dim=64, rope_theta=theta)
    position_T = np.arange(8192, dtype=np.int32)
    cos_T2H, sin_T2H = phases(arch, jnp.asarray(position_T))
    assert cos_T2H.dtype == sin_T2H.dtype == jnp.float32
    angle_TH = position_T[:, None] * theta ** (-np.arange(0, 64, 2) / 64)[None, :]
    for half, sign in ((0, -1), (1, 1)):
        assert np.abs(np.asarray(cos_T2H)[:, half] - np.cos(angle_TH)).max() < 1e-3
        assert np.abs(np.asarray(sin_T2H)[:, half] - sign * np.sin(angle_TH)).max() < 1e-3
    coarse_TH = angle_TH.astype(jnp.bfloat16).astype(np.float64)
    assert np.abs(np.cos(coarse_TH) - np.cos(angle_TH)).max() > 0.5


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-6), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("shape", [(5, 16), (5, 2, 16), (5, 2, 3, 16)])
def test_halves_are_rotated_against_each_other(shape, dtype, tolerance):
    """Float32 within rounding; bfloat16 within half a unit in the last place of its output."""
    arch = tiny_architecture()
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(jnp.dtype(dtype))
    position_T = np.array([0, 1, 7, 100, 4000], np.int32)
    got = jax.jit(rotate)(x, *phases(arch, jnp.asarray(position_T)))
    assert got.dtype == x.dtype
    for t, position in enumerate(position_T):
        for i in range(8):
            turn = np.exp(1j * position * 10000.0 ** (-i / 8))
            pair = (x[t, ..., i].astype(np.float64) + 1j * x[t, ..., i + 8].astype(np.float64)) * turn
            np.testing.assert_allclose(np.asarray(got)[t, ..., i].astype(np.float64), pair.real, atol=tolerance + 3e-4)
            np.testing.assert_allclose(
                np.asarray(got)[t, ..., i + 8].astype(np.float64), pair.imag, atol=tolerance + 3e-4
            )


def test_scores_depend_on_the_distance_alone():
    arch = tiny_architecture()
    q, k = np.random.default_rng(0).standard_normal((2, 16)).astype(np.float32)

    def score(q_pos, k_pos):
        a, b = rotate(jnp.stack([q, k]), *phases(arch, jnp.array([q_pos, k_pos], jnp.int32)))
        return float(a @ b)

    assert abs(score(10, 3) - score(110, 103)) < 1e-3
    assert abs(score(10, 3) - score(10, 4)) > 1e-2
