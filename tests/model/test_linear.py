"""The matrix product in both stored orders."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.model.linear import Linear, dot

# Largest difference of sums of 24 products of normal draws, weights scaled by 24 ** -0.5.
TOLERANCES = {
    "float32": 1e-6,  # sums in another order
    "bfloat16": 1e-2,  # the output is rounded to 8 bits: half a unit in the last place of values up to 4
}
IN, OUT = (4, 6), (3, 5)


def _layer(order: str, dtype) -> tuple[Linear, np.ndarray]:
    """A layer, and its weight as [in, out]."""
    layer = Linear(IN, ("mlp", None), OUT, ("kv_heads", None), order=order, dtype=dtype, rngs=nnx.Rngs(1))
    weight = np.asarray(layer.weight[...]).astype(np.float64)
    return layer, weight.reshape(24, 15) if order == "in_out" else weight.reshape(15, 24).T


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("order", ["in_out", "out_in"])
def test_equals_the_product_over_all_input_axes(order, dtype):
    layer, weight_IO = _layer(order, jnp.dtype(dtype))
    x = np.random.default_rng(0).standard_normal((7, *IN)).astype(jnp.dtype(dtype))
    got = layer(jnp.asarray(x))
    assert got.shape == (7, *OUT)
    assert got.dtype == jnp.dtype(dtype)
    want = (x.astype(np.float64).reshape(7, 24) @ weight_IO).reshape(7, *OUT)
    assert np.abs(np.asarray(got).astype(np.float64) - want).max() <= TOLERANCES[dtype]
    mutant = (x.astype(np.float64).swapaxes(1, 2).reshape(7, 24) @ weight_IO).reshape(7, *OUT)
    assert np.abs(mutant - want).max() > 10 * TOLERANCES[dtype]


@pytest.mark.parametrize("order", ["in_out", "out_in"])
def test_shape_and_axes_follow_the_order(order):
    layer, _ = _layer(order, jnp.float32)
    shape, axes = ((*IN, *OUT), ("mlp", None, "kv_heads", None))
    if order == "out_in":
        shape, axes = ((*OUT, *IN), ("kv_heads", None, "mlp", None))
    assert layer.weight.shape == shape
    assert layer.weight.get_metadata()["axes"] == axes


def test_bfloat16_products_are_summed_in_float32():
    """256 + 1 + ... is lost in bfloat16, whose step there is 2."""
    x = jnp.ones((1, 65), jnp.bfloat16)
    w = jnp.concatenate([jnp.full((1, 1), 256, jnp.bfloat16), jnp.ones((64, 1), jnp.bfloat16)])
    assert float(dot(x, w, 0)[0, 0]) == 320


@pytest.mark.parametrize("order", ["in_out", "out_in"])
def test_a_bias_is_added_to_each_output_and_shards_with_it(order):
    layer = Linear(
        IN, ("mlp", None), OUT, ("kv_heads", None), order=order, dtype=jnp.float32, rngs=nnx.Rngs(1), has_bias=True
    )
    assert (layer.bias.shape, layer.bias.get_metadata()["axes"]) == (OUT, ("kv_heads", None))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((7, *IN)), jnp.float32)
    bias = np.arange(15, dtype=np.float32).reshape(OUT)
    layer.bias.set_value(jnp.zeros(OUT))
    without = np.asarray(layer(x))
    layer.bias.set_value(jnp.asarray(bias))
    assert np.abs(np.asarray(layer(x)) - (without + bias)).max() <= 2e-6


def test_a_bias_is_added_before_the_sum_is_rounded():
    """256 + 1 is a tie in bfloat16, whose step there is 2: rounded to 256 twice, or to 258 once."""
    layer = Linear((2,), (None,), (1,), (None,), order="in_out", dtype=jnp.bfloat16, rngs=nnx.Rngs(0), has_bias=True)
    layer.weight.set_value(jnp.array([[256], [1]], jnp.bfloat16))
    layer.bias.set_value(jnp.array([1], jnp.bfloat16))
    assert float(layer(jnp.ones((1, 2), jnp.bfloat16))[0, 0]) == 258


def test_an_unknown_order_is_refused():
    with pytest.raises(AssertionError):
        Linear(IN, (None, None), OUT, (None, None), order="sideways", dtype=jnp.float32, rngs=nnx.Rngs(0))
