"""The matrix product in both stored orders."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.model.linear import Linear, dot
from jaxinfer.model.sharding import PackedAxis

# Largest difference of sums of 24 products of normal draws, weights scaled by 24 ** -0.5.
TOLERANCES = {
    "float32": 1e-6,  # sums in another order
    "bfloat16": 1e-2,  # the output is rounded to 8 bits: half a unit in the last place of values up to 4
}
IN, OUT = 24, 15
AXIS_IN, AXIS_OUT = PackedAxis("mlp", 4), PackedAxis("kv_heads", 3)


def _layer(order: str, dtype, **options) -> Linear:
    return Linear(IN, AXIS_IN, OUT, AXIS_OUT, order=order, dtype=dtype, rngs=nnx.Rngs(1), **options)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("order", ["in_out", "out_in"])
def test_equals_the_product_with_the_matrix_in_its_order(order, dtype):
    layer = _layer(order, jnp.dtype(dtype))
    weight = np.asarray(layer.weight[...]).astype(np.float64)
    weight_IO = weight if order == "in_out" else weight.T
    x_TI = np.random.default_rng(0).standard_normal((7, IN)).astype(jnp.dtype(dtype))
    got = layer(jnp.asarray(x_TI))
    assert (got.shape, got.dtype) == ((7, OUT), jnp.dtype(dtype))
    want = x_TI.astype(np.float64) @ weight_IO
    assert np.abs(np.asarray(got).astype(np.float64) - want).max() <= TOLERANCES[dtype]
    mutant = x_TI.astype(np.float64) @ weight_IO.reshape(OUT, IN).T
    assert np.abs(mutant - want).max() > 10 * TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("order", "shape", "axes"),
    [("in_out", (IN, OUT), (AXIS_IN, AXIS_OUT)), ("out_in", (OUT, IN), (AXIS_OUT, AXIS_IN))],
)
def test_shape_and_axes_follow_the_order(order, shape, axes):
    weight = _layer(order, jnp.float32).weight
    assert (weight.shape, weight.get_metadata()["axes"]) == (shape, axes)


def test_bfloat16_products_are_summed_in_float32():
    """256 + 1 + ... is lost in bfloat16, whose step there is 2."""
    x = jnp.ones((1, 65), jnp.bfloat16)
    w = jnp.concatenate([jnp.full((1, 1), 256, jnp.bfloat16), jnp.ones((64, 1), jnp.bfloat16)])
    assert float(dot(x, w, 0)[0, 0]) == 320


@pytest.mark.parametrize("order", ["in_out", "out_in"])
def test_a_bias_is_added_to_each_output_and_shards_with_it(order):
    layer = _layer(order, jnp.float32, has_bias=True)
    assert (layer.bias.shape, layer.bias.get_metadata()["axes"]) == ((OUT,), (AXIS_OUT,))
    x_TI = jnp.asarray(np.random.default_rng(0).standard_normal((7, IN)), jnp.float32)
    bias_O = np.arange(OUT, dtype=np.float32)
    layer.bias.set_value(jnp.zeros(OUT))
    without = np.asarray(layer(x_TI))
    layer.bias.set_value(jnp.asarray(bias_O))
    assert np.abs(np.asarray(layer(x_TI)) - (without + bias_O[None, :])).max() <= 2e-6


def test_a_bias_is_added_before_the_sum_is_rounded():
    """256 + 1 is a tie in bfloat16, whose step there is 2: rounded to 256 twice, or to 258 once."""
    layer = Linear(2, None, 1, None, order="in_out", dtype=jnp.bfloat16, rngs=nnx.Rngs(0), has_bias=True)
    layer.weight.set_value(jnp.array([[256], [1]], jnp.bfloat16))
    layer.bias.set_value(jnp.array([1], jnp.bfloat16))
    assert float(layer(jnp.ones((1, 2), jnp.bfloat16))[0, 0]) == 258


def test_an_unknown_order_is_refused():
    with pytest.raises(AssertionError):
        Linear(IN, None, OUT, None, order="sideways", dtype=jnp.float32, rngs=nnx.Rngs(0))
