"""One declaration gives the abstract tree, the loading order, random values and shardings."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import tiny_architecture, tiny_mesh, tiny_params

from jaxinfer.model import Decoder, ModelParams, abstract_params
from jaxinfer.model.params import fill
from jaxinfer.model.sharding import LOGICAL_TO_MESH, PackedAxis


def _abstract(order: str = "in_out", **changes) -> ModelParams:
    arch = tiny_architecture(**changes)
    return abstract_params(lambda rngs: Decoder(arch, order=order, dtype=jnp.float32, rngs=rngs))


def _leaves(params: ModelParams):
    for state in (params.top, *params.layers):
        for _, leaf in nnx.to_flat_state(state):
            yield leaf


@pytest.mark.parametrize("order", ["in_out", "out_in"])
@pytest.mark.parametrize("is_tied", [True, False])
def test_every_parameter_has_one_declared_axis_per_dimension(is_tied, order):
    leaves = list(_leaves(_abstract(order, is_tied=is_tied)))
    assert len(leaves) == (2 if is_tied else 3) + 2 * 6
    for leaf in leaves:
        axes = leaf.get_metadata()["axes"]
        assert len(axes) == len(leaf.get_value().shape)
        assert {axis.name if isinstance(axis, PackedAxis) else axis for axis in axes} <= {None, *LOGICAL_TO_MESH}


def test_the_abstract_tree_of_a_model_larger_than_memory_costs_nothing():
    abstract = _abstract(vocab_size=10**7, hidden_size=2**16, num_layers=2, intermediate_size=2**18)
    values = [leaf.get_value() for leaf in _leaves(abstract)]
    assert all(isinstance(value, jax.ShapeDtypeStruct) for value in values)
    assert sum(value.size * 4 for value in values) > 2**40


def test_filling_goes_through_the_top_and_then_layer_by_layer():
    rules, seen = tiny_mesh(1, 2), []

    def value_of(name, struct):
        seen.append(name)
        return np.full(struct.shape, len(seen), struct.dtype)

    abstract = _abstract(is_tied=False)
    params = fill(abstract, rules, value_of)
    assert [name for name in seen if name.startswith("top.")] == seen[:3]
    assert set(seen[:3]) == {"top.embedding", "top.head", "top.norm.weight"}
    of_layer = [
        "attention.out.weight",
        "attention.qkv.weight",
        "attention_norm.weight",
        "mlp.down.weight",
        "mlp.gate_up.weight",
        "mlp_norm.weight",
    ]
    assert sorted(seen[3:9]) == [f"layers.0.{path}" for path in of_layer]
    assert sorted(seen[9:]) == [f"layers.1.{path}" for path in of_layer]
    numbers = sorted(int(np.asarray(leaf.get_value()).flat[0]) for leaf in _leaves(params))
    assert numbers == list(range(1, len(seen) + 1)), "every value is put where its name says, once"
    embedding = params.top["embedding"].get_value()
    assert embedding.sharding == rules.sharding(embedding.shape, ("vocab", None))
    assert (params.top_graph, params.layer_graphs) == (abstract.top_graph, abstract.layer_graphs)


@pytest.mark.parametrize("wrong", [np.zeros((3, 3), np.float32), np.zeros((512, 64), np.float16)])
def test_a_value_of_another_shape_or_dtype_is_refused(wrong):
    with pytest.raises(AssertionError, match=r"top\."):
        fill(_abstract(), tiny_mesh(), lambda name, struct: wrong)


def test_all_layers_share_one_static_graph():
    """So that a layer is traced once."""
    assert len(set(_abstract(num_layers=3).layer_graphs)) == 1


@functools.cache
def _flat(data: int, model: int) -> list[np.ndarray]:
    """Random values in the order of one device: gate and up are dealt to several in turn."""
    params, arch = tiny_params(tiny_architecture(), tiny_mesh(data, model)), tiny_architecture()
    for layer in params.layers:
        leaf = layer["mlp"]["gate_up"]["weight"]
        dealt = np.asarray(leaf.get_value()).reshape(arch.hidden_size, model, 2, arch.intermediate_size // model)
        layer["mlp"]["gate_up"]["weight"] = leaf.replace(dealt.swapaxes(1, 2).reshape(arch.hidden_size, -1))
    return [np.asarray(leaf.get_value()) for leaf in _leaves(params)]


@pytest.mark.parametrize("mesh", [(1, 2), (1, 4), (2, 2)])
def test_random_values_are_the_same_on_every_mesh(mesh):
    for one, other in zip(_flat(1, 1), _flat(*mesh), strict=True):
        assert np.array_equal(one, other)


def test_another_seed_gives_other_values():
    other = tiny_params(tiny_architecture(), tiny_mesh(), seed=1)
    assert not np.array_equal(_flat(1, 1)[0], np.asarray(next(_leaves(other)).get_value()))
