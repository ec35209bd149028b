"""Quantized products compile for every chip, and none of them writes a copy of the weight to the device's memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels.quantized_matmul import SCHEMES, MatmulNeeds, QuantizedWeight, get_matmul

pytestmark = pytest.mark.aot
TARGETS = ("v5e", "v5p", "v6e", "tpu7x", "h200")
KERNELS = {"v6e": "tpu", "tpu7x": "tpu", "h200": "gpu"}


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize(("num_inputs", "num_outputs", "group"), [(4096, 6144, 128), (1536, 576, 32)])
@pytest.mark.parametrize("num_rows", [1, 32, 128])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_product_compiles_without_a_copy_of_the_weight(target, scheme, num_rows, num_inputs, num_outputs, group):
    needs = MatmulNeeds(
        platform=target.chip.platform,
        scheme=scheme,
        num_rows=num_rows,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        group_size=group,
        dtype="bfloat16",
        device_kind=target.devices()[0].device_kind,
    )
    op = get_matmul("auto", needs).op
    assert op.name == (KERNELS.get(target.chip.name, "xla") if scheme == "w4a16" else "xla")
    mesh = target.mesh()
    shape = functools.partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, PartitionSpec()))
    weight = QuantizedWeight(
        shape((num_inputs, num_outputs), jnp.int4 if scheme == "w4a16" else jnp.int8),
        shape((num_inputs // group, num_outputs) if scheme == "w4a16" else (num_outputs,), jnp.float32),
    )
    with jax.set_mesh(mesh):
        program = jax.jit(functools.partial(op.matmul, scheme=scheme))
        memory = program.lower(shape((num_rows, num_inputs), jnp.bfloat16), weight).compile().memory_analysis()
    # Sums of a product divided over its inputs, and of groups: of a small weight they are larger than a copy.
    parts_bytes = 8 * max(num_rows, 8) * num_outputs * 4
    if num_inputs * num_outputs > 1 << 22:
        assert memory.temp_size_in_bytes < parts_bytes + num_inputs * num_outputs // 8
