"""Which axes are divided."""

from __future__ import annotations

import numpy as np
import pytest
from jax.sharding import PartitionSpec
from tiny import tiny_mesh


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((512, 64), ("vocab", None), PartitionSpec("model", None)),
        ((64, 2, 4, 16), (None, "kv_heads", None, None), PartitionSpec(None, "model", None, None)),
        ((64, 2, 128), (None, None, "mlp"), PartitionSpec(None, None, "model")),
        ((32, 64), ("tokens", None), PartitionSpec("data", None)),
        ((64,), (None,), PartitionSpec(None)),
        ((), (), PartitionSpec()),
        ((64, 3, 4, 16), (None, "kv_heads", None, None), PartitionSpec(None, None, None, None)),
        ((511, 64), ("vocab", None), PartitionSpec(None, None)),
        ((1, 64), ("tokens", None), PartitionSpec(None, None)),
        ((64,), ("no such axis",), PartitionSpec(None)),
    ],
    ids=["vocab", "heads", "mlp", "tokens", "none", "scalar", "3 heads on 2", "511 on 2", "1 token on 2", "unknown"],
)
def test_an_axis_is_divided_where_it_divides_and_replicated_elsewhere(shape, axes, spec):
    assert tiny_mesh(2, 2).spec(shape, axes) == spec


def test_a_sharding_places_the_parts():
    rules = tiny_mesh(1, 4)
    assert rules.sharding((512, 64), ("vocab", None)).shard_shape((512, 64)) == (128, 64)
    assert rules.replicated.shard_shape((512, 64)) == (512, 64)


def test_rules_of_equal_meshes_are_equal_and_hashable():
    """They are static arguments of compiled programs."""
    assert tiny_mesh(1, 2) == tiny_mesh(1, 2)
    assert len({tiny_mesh(1, 2), tiny_mesh(1, 2), tiny_mesh(2, 1)}) == 2


def test_a_name_per_dimension_is_required():
    with pytest.raises(ValueError, match="zip"):
        tiny_mesh().spec((2, 3), ("vocab",))
    assert np.array_equal(tiny_mesh(2, 2).mesh.devices.shape, (2, 2))
