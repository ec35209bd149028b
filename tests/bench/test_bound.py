"""The products alone: every matrix is used, and each formulation computes the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxinfer.bench.bound import HEAD_FORMS, Bound, ProductTimes, bound_of, product_shapes, products
from jaxinfer.model.linear import WEIGHT_ORDERS

ARCH = tiny.tiny_architecture()


def matrices(order):
    rng = np.random.default_rng(0)
    layers = [
        [rng.standard_normal(s, np.float32) / np.sqrt(np.float32(s[0])) for s in product_shapes(ARCH)]
        for _ in range(ARCH.num_layers)
    ]
    return [[jnp.asarray(w if order == "in_out" else w.T) for w in layer] for layer in layers]


def hidden():
    return jnp.asarray(np.random.default_rng(1).standard_normal((3, ARCH.hidden_size), np.float32))


def test_orders_of_the_layers_agree():
    found = [products(ARCH, "layers", order, hidden(), matrices(order)) for order in WEIGHT_ORDERS]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)  # float32 sums in another order


def test_forms_of_the_head_agree():
    table_DV = jnp.asarray(np.random.default_rng(2).standard_normal((ARCH.hidden_size, ARCH.vocab_size), np.float32))
    tables = {"in_out": table_DV, "out_in": table_DV.T, "table_first": table_DV.T}
    found = {form: products(ARCH, "head", form, hidden(), tables[form]) for form in HEAD_FORMS}
    np.testing.assert_allclose(found["in_out"], found["out_in"], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found["in_out"], found["table_first"].T, rtol=1e-4, atol=1e-4)


def test_every_weight_of_every_layer_reaches_the_result():
    """A weight without influence could be left out by the compiler, and the bound would be too low."""

    def total(weights):
        return jnp.abs(products(ARCH, "layers", "in_out", hidden(), weights)).sum()

    gradients = jax.grad(total)(matrices("in_out"))
    assert all(bool(jnp.all(g != 0)) for layer in gradients for g in layer)


@pytest.mark.parametrize("rows", [1, 4])
def test_compiled_products_keep_all_their_operations(rows):
    lowered = jax.jit(products, static_argnums=(0, 1, 2)).lower(
        ARCH, "layers", "in_out", jnp.ones((rows, ARCH.hidden_size), jnp.float32), matrices("in_out")
    )
    analysis = lowered.compile().cost_analysis()
    assert analysis is not None
    wanted = 2 * rows * ARCH.num_layers * sum(i * o for i, o in product_shapes(ARCH))
    assert wanted <= analysis["flops"] < 1.2 * wanted


def test_bound_takes_the_best_form_of_each_part_over_all_visits():
    layers = [
        ProductTimes(32, {"in_out": 3.0, "out_in": 2.0}, {}),
        ProductTimes(32, {"in_out": 1.5, "out_in": 4.0}, {}),
    ]
    heads = [ProductTimes(1, {}, {"in_out": 0.5, "out_in": 0.25, "table_first": 0.75})]
    assert bound_of(layers, heads) == Bound(1.75, "in_out", "out_in")
