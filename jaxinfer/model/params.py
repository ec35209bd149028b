"""Parameters: declared once inside the modules, then flat arrays.

A module declares each parameter by `declare(...)`: shape, logical axes and initial scale. From that one declaration
come the abstract tree (loading), random values (tests) and shardings. After `nnx.split` nothing but arrays and a static
graph remains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxinfer.model.sharding import Axis, MeshRules


class ModelParams(NamedTuple):
    """The decoder's arrays, and their static structure.

    Attributes:
      top: state of everything but the layers.
      layers: one state per layer; equal structure, so a layer is traced once.
      top_graph, layer_graphs: static graph definitions, hashable.
    """

    top: Any
    layers: tuple[Any, ...]
    top_graph: Any
    layer_graphs: tuple[Any, ...]


def declare(
    rngs: nnx.Rngs | None, shape: tuple[int, ...], axes: tuple[Axis, ...], *, dtype, scale: float | None
) -> nnx.Param:
    """One parameter.

    Args:
      rngs: where random values come from; None declares the shape alone, and no value is made.
      shape, axes: size and logical axis (see `sharding.py`) of each dimension.
      dtype: of the stored values.
      scale: standard deviation of random values, or None for ones.
    """
    assert len(shape) == len(axes)
    if rngs is None:
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype), axes=axes)
    value = jnp.ones(shape, dtype) if scale is None else (jax.random.normal(rngs.params(), shape) * scale).astype(dtype)
    return nnx.Param(value, axes=axes)


def split_decoder(decoder: Any) -> ModelParams:
    """Takes a decoder module apart into arrays and static graphs."""
    layers = [decoder.layers[i] for i in range(len(decoder.layers))]
    decoder.layers = None
    top_graph, top = nnx.split(decoder)
    parts = [nnx.split(layer) for layer in layers]
    return ModelParams(top, tuple(state for _, state in parts), top_graph, tuple(graph for graph, _ in parts))


def abstract_params(make_decoder: Callable[[nnx.Rngs | None], Any]) -> ModelParams:
    """The parameters' shapes, dtypes and axes; no memory is used, and nothing is traced.

    Args:
      make_decoder: builds the module from a source of random numbers, or from None.
    """
    return split_decoder(make_decoder(None))


def fill(abstract: ModelParams, rules: MeshRules, value_of: Callable[[str, Any], np.ndarray]) -> ModelParams:
    """Makes real parameters, one at a time, each put straight into its sharding, and in the order it needs there.

    Args:
      abstract: from `abstract_params`.
      rules: the mesh.
      value_of: (name, ShapeDtypeStruct) -> numpy array of that shape and dtype; names are `top.<path>` and
        `layers.<i>.<path>`.
    """

    def one(prefix: str, path, leaf):
        name = prefix + "".join(f".{k}" for k in path)
        struct = leaf.get_value()
        value = value_of(name, struct)
        assert (value.shape, value.dtype) == (struct.shape, struct.dtype), (name, value.shape, value.dtype, struct)
        axes = leaf.get_metadata()["axes"]
        return leaf.replace(jax.device_put(rules.deal(value, axes), rules.sharding(struct.shape, axes)))

    def state(prefix: str, tree):
        flat = [(path, one(prefix, path, leaf)) for path, leaf in nnx.to_flat_state(tree)]
        return nnx.from_flat_state(flat)

    return abstract._replace(
        top=state("top", abstract.top),
        layers=tuple(state(f"layers.{i}", layer) for i, layer in enumerate(abstract.layers)),
    )


def random_params(make_decoder: Callable[[nnx.Rngs | None], Any], rules: MeshRules, seed: int) -> ModelParams:
    """Random parameters of a small model, the same function on every mesh."""
    params = split_decoder(make_decoder(nnx.Rngs(params=seed)))
    flat: Mapping[str, np.ndarray] = _flatten(params)
    return fill(params, rules, lambda name, struct: flat[name])


def _flatten(params: ModelParams) -> dict[str, np.ndarray]:
    trees = {"top": params.top, **{f"layers.{i}": layer for i, layer in enumerate(params.layers)}}
    return {
        prefix + "".join(f".{k}" for k in path): np.asarray(leaf.get_value())
        for prefix, tree in trees.items()
        for path, leaf in nnx.to_flat_state(tree)
    }
