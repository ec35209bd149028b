"""Which axes are divided, and that no program puts divided weights together again."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from tiny import tiny_architecture, tiny_mesh

from jaxinfer.config import EngineConfig
from jaxinfer.engine.layout import abstract_model, lay_out
from jaxinfer.model.sharding import PackedAxis
from jaxinfer.plan.exchanges import exchanged_bytes
from jaxinfer.step import CompileCounter


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((512, 64), ("vocab", None), PartitionSpec("model", None)),
        ((64, 2 * 4 * 16), (None, PackedAxis("kv_heads", 2)), PartitionSpec(None, "model")),
        ((2 * 128, 64), (PackedAxis("mlp", 128, 2), None), PartitionSpec("model", None)),
        ((32, 64), ("tokens", None), PartitionSpec("data", None)),
        ((64,), (None,), PartitionSpec(None)),
        ((), (), PartitionSpec()),
        ((64, 3 * 4 * 16), (None, PackedAxis("kv_heads", 3)), PartitionSpec(None, None)),
        ((2 * 127, 64), (PackedAxis("mlp", 127, 2), None), PartitionSpec(None, None)),
        ((511, 64), ("vocab", None), PartitionSpec(None, None)),
        ((1, 64), ("tokens", None), PartitionSpec(None, None)),
        ((64,), ("no such axis",), PartitionSpec(None)),
    ],
    ids=[
        "vocab",
        "heads",
        "mlp",
        "tokens",
        "none",
        "scalar",
        "3 heads on 2",
        "2 x 127 on 2",
        "511 on 2",
        "1 token on 2",
        "unknown",
    ],
)
def test_an_axis_is_divided_where_it_divides_and_replicated_elsewhere(shape, axes, spec):
    assert tiny_mesh(2, 2).spec(shape, axes) == spec


def test_a_sharding_places_the_parts():
    rules = tiny_mesh(1, 4)
    assert rules.sharding((512, 64), ("vocab", None)).shard_shape((512, 64)) == (128, 64)
    assert rules.replicated.shard_shape((512, 64)) == (512, 64)


@pytest.mark.parametrize(("model", "dealt"), [(1, "abcdefABCDEF"), (2, "abcABCdefDEF"), (3, "abABcdCDefEF")])
@pytest.mark.parametrize("axis", [0, 1])
def test_members_of_an_axis_are_dealt_together(model: int, dealt: str, axis: int):
    """Every device holds the same share of both; devices that do not divide them hold all in the order of the file."""
    rules = tiny_mesh(1, model)
    axes = (PackedAxis("mlp", 6, 2), None)[:: 1 - 2 * axis]
    value = np.expand_dims(np.array(list("abcdefABCDEF")), 1 - axis)
    assert "".join(rules.deal(value, axes).ravel()) == dealt
    assert "".join(tiny_mesh(1, 4).deal(value, axes).ravel()) == "abcdefABCDEF"
    assert "".join(rules.deal(value, (PackedAxis("mlp", 12), None)[:: 1 - 2 * axis]).ravel()) == "abcdefABCDEF"


def test_rules_of_equal_meshes_are_equal_and_hashable():
    """They are static arguments of compiled programs."""
    assert tiny_mesh(1, 2) == tiny_mesh(1, 2)
    assert len({tiny_mesh(1, 2), tiny_mesh(1, 2), tiny_mesh(2, 1)}) == 2


def test_a_name_per_dimension_is_required():
    with pytest.raises(ValueError, match="zip"):
        tiny_mesh().spec((2, 3), ("vocab",))
    assert np.array_equal(tiny_mesh(2, 2).mesh.devices.shape, (2, 2))


NUM_ROWS, NUM_TOKENS = 4, 32


@pytest.mark.parametrize("order", ["in_out", "out_in"])
@pytest.mark.parametrize(("key", "num_tokens"), [(("decode", NUM_ROWS), NUM_ROWS), (("mixed", NUM_TOKENS), NUM_TOKENS)])
def test_weights_divided_over_four_devices_are_never_put_together(key: tuple, num_tokens: int, order: str):
    """What is sent are hidden states, reduced once behind the embedding and twice a layer, and the logits."""
    arch = tiny_architecture(num_heads=8, num_kv_heads=4, hidden_size=128, intermediate_size=512)
    config = EngineConfig.from_flat(
        tensor_parallel_size=4, page_size=16, max_num_seqs=NUM_ROWS, max_num_batched_tokens=NUM_TOKENS, num_pages=64
    )
    rules = tiny_mesh(1, 4)
    params = abstract_model(arch, order, jnp.float32, rules)
    leaves = [leaf.get_value() for _, leaf in nnx.to_flat_state(params.layers[0])]
    matrices = [leaf for leaf in leaves if len(leaf.shape) > 1]
    num_values = [math.prod(leaf.shape) for leaf in matrices]
    assert [4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in matrices] == num_values
    compiled = lay_out(config, arch, params, rules).programs(CompileCounter()).lower(key).compile()
    sent = exchanged_bytes(compiled.as_text() or "")
    assert 0 < sent.pop("all-reduce") <= (1 + 2 * arch.num_layers) * num_tokens * arch.hidden_size * 4
    assert 0 < sum(sent.values()) < 4 * min(num_values), "the logits are smaller than any matrix"
