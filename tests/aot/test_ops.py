"""The attention op, compiled for real chips at the shapes of real models."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from kernel_model.kernels import build
from kernel_model.shapes import Workload

pytestmark = pytest.mark.aot

TARGETS = ("v5e", "v5p", "v6e", "tpu7x", "h200")
MODELS = ("llama-3.1-8b", "qwen3-8b", "gemma-2-9b", "gemma-2-9b-window", "smollm2-135m")
PAGES_NAME = {"tpu": "ragged_paged_attention_tpu", "gpu": "ragged_paged_attention_gpu_decode"}
# Contexts beyond the window of Gemma 2, so that it matters.
SIZES = {"batch": 8, "context": 8192, "chunk": 256}


def compiled(target, kernel: str, load: Workload, donate=()):
    """(the compiled program, bytes of its pages)."""
    mesh = target.mesh()
    place = NamedSharding(mesh, PartitionSpec())
    program = build(kernel, load, target.chip)
    with_place = functools.partial(jax.tree.map, lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place))
    with jax.set_mesh(mesh):
        function = jax.jit(program.function, donate_argnums=donate)
        return function.lower(*with_place(program.arrays), *with_place(program.numbers)).compile()


def pool_bytes(target, load: Workload) -> int:
    """Bytes of the page arrays."""
    program = build(f"{target.chip.platform}-write", load, target.chip)
    return sum(a.size * jnp.dtype(a.dtype).itemsize for a in jax.tree.leaves(program.arrays[0]))


def check_attention(target, load: Workload) -> None:
    """It compiles, runs our kernel, and copies no pages."""
    program = compiled(target, target.chip.platform, load)
    assert PAGES_NAME[target.chip.platform] in program.as_text()
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes < pool_bytes(target, load) / 4


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("mode", ["decode", "mixed"])
@pytest.mark.parametrize("model", MODELS)
def test_attention_compiles_for_every_model(target, model, mode):
    check_attention(target, Workload(model=model, mode=mode, page_size=64, **SIZES))


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("mode", ["decode", "mixed"])
def test_attention_compiles_for_quantized_pages(target, kv_dtype, mode):
    check_attention(target, Workload(model="llama-3.1-8b", mode=mode, kv_dtype=kv_dtype, page_size=64, **SIZES))


@pytest.mark.parametrize("target", TARGETS, indirect=True)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_writing_compiles_and_overwrites_the_pages_it_is_given(target, kv_dtype):
    load = Workload(model="llama-3.1-8b", mode="mixed", kv_dtype=kv_dtype, page_size=64, **SIZES)
    memory = compiled(target, f"{target.chip.platform}-write", load, donate=0).memory_analysis()
    assert memory.alias_size_in_bytes >= pool_bytes(target, load)
    assert memory.temp_size_in_bytes < pool_bytes(target, load) / 4
