"""What an engine is made of before any array exists: page format, static sizes, memory, and every array's shape.

    configuration + architecture + mesh ─► Layout ─┬─► build_engine: the arrays, programs over them
                                                   └─► plan: the same programs, compiled for chips that are not here

Nothing is allocated and nothing compiled here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import EngineConfig, native_folder
from jaxinfer.errors import ConfigError
from jaxinfer.model import Architecture, Decoder, MeshRules, ModelParams, PageFormat, abstract_params
from jaxinfer.model.decoder import run_layer
from jaxinfer.sampling import packed_row_size
from jaxinfer.step import CompileCounter, MemoryPlan, Programs, ProgramSizes, plan_memory
from jaxinfer.step.compiled import traced_once
from jaxinfer.step.programs import ProgramContext
from jaxinfer.step.slot_state import SlotState
from pallas_kernels.ragged_paged_attention import AttentionNeeds, get_attention

HEAD_ROOM_BYTES = 64 << 20  # for temporaries of programs, beside the logits


@dataclass(frozen=True)
class Layout:
    """Everything static, and the shapes of everything else.

    Attributes:
      attention_reason: why this implementation of attention was taken.
      leaves: of the parameters, as they were given: arrays, or shapes with shardings.
      rebuild: leaves -> ModelParams.
      pages, state: shapes with shardings.
    """

    arch: Architecture
    rules: MeshRules
    page_format: PageFormat
    attention_reason: str
    sizes: ProgramSizes
    memory: MemoryPlan
    leaves: tuple[Any, ...]
    rebuild: Callable[[Any], ModelParams]
    pages: Any
    state: SlotState

    @property
    def dtype(self) -> str:
        """Of weights and activations."""
        return jnp.dtype(self.rebuild(self.leaves).top["embedding"].get_value().dtype).name

    def programs(self, counter: CompileCounter) -> Programs:
        """The programs, none compiled yet."""
        op, size = self.page_format.op, self.page_format.page_size
        context = ProgramContext(self.arch, op, self.rules, size, self.rebuild, traced_once(run_layer, 3))
        words = packed_row_size(self.arch.vocab_size)
        return Programs(context, self.sizes, self.leaves, self.pages, self.state, words, counter)


def lay_out(
    config: EngineConfig, arch: Architecture, params: ModelParams, rules: MeshRules, device_bytes: int | None = None
) -> Layout:
    """Works out all sizes.

    Args:
      params: arrays, or shapes with shardings from `abstract_model`.
      device_bytes: memory of a device that is not here; None asks the device.

    Raises:
      ConfigError: the configuration does not fit the model or the devices.
    """
    leaves, rebuild = _flatten(params)
    dtype = params.top["embedding"].get_value().dtype
    page_format, reason = _page_format(config, arch, dtype, rules)
    sizes, memory = _sizes(config, arch, leaves, page_format, rules, device_bytes)
    state = jax.eval_shape(lambda: SlotState.zeros(sizes.num_slots, sizes.max_model_len, arch.vocab_size))

    def page_shape(struct):
        sharding = rules.sharding(struct.shape, page_format.axes(len(struct.shape)))
        return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

    layer_pages = jax.tree.map(page_shape, page_format.layer_shapes(memory.num_pages))
    return Layout(
        arch=arch,
        rules=rules,
        page_format=page_format,
        attention_reason=reason,
        sizes=sizes,
        memory=memory,
        leaves=leaves,
        rebuild=rebuild,
        pages=(layer_pages,) * arch.num_layers,
        state=jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rules.replicated), state),
    )


def weight_dtype(name: str, rules: MeshRules) -> Any:
    """The dtype of weights and activations: `auto` is float32 on a CPU, bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if rules.mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def abstract_model(arch: Architecture, order: str, dtype: Any, rules: MeshRules) -> ModelParams:
    """The parameters as shapes with shardings; no memory is used.

    Args:
      order: weight order of `model.linear`.
    """
    abstract = abstract_params(functools.partial(_decoder, arch, order, dtype))

    def placed(leaf: nnx.Variable) -> nnx.Variable:
        struct = leaf.get_value()
        sharding = rules.sharding(struct.shape, leaf.get_metadata()["axes"])
        return leaf.replace(jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding))

    top, layers = jax.tree.map(
        placed, (abstract.top, abstract.layers), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    return abstract._replace(top=top, layers=layers)


def shard_bytes(array: Any) -> int:
    """Bytes of an array, or of a shape with a sharding, on one device."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def _page_format(config: EngineConfig, arch: Architecture, dtype, rules: MeshRules) -> tuple[PageFormat, str]:
    """The pages' format and why this attention shapes them."""
    kv_dtype = dtype if config.model.kv_cache_dtype == "auto" else jnp.dtype(config.model.kv_cache_dtype)
    needs = AttentionNeeds(
        platform=rules.mesh.devices.flat[0].platform,
        head_dim=arch.head_dim,
        group=arch.group_size,
        page_size=config.cache.page_size,
        dtype=jnp.dtype(dtype).name,
        kv_dtype=jnp.dtype(kv_dtype).name,
        native_folder=native_folder(),
    )
    try:
        choice = get_attention(config.compile.attention, needs)
    except NotImplementedError as why:
        raise ConfigError(str(why)) from why
    size = config.cache.page_size or choice.op.default_page_size
    return PageFormat(arch, choice.op, size, kv_dtype), choice.reason


def _sizes(
    config: EngineConfig,
    arch: Architecture,
    leaves,
    page_format: PageFormat,
    rules: MeshRules,
    device_bytes: int | None,
) -> tuple[ProgramSizes, MemoryPlan]:
    """Static sizes of the programs, and the memory they leave for pages."""
    device = rules.mesh.devices.flat[0]
    is_cpu = device.platform == "cpu"
    max_num_seqs = config.scheduler.max_num_seqs or _default_num_seqs(config, arch, page_format, is_cpu)
    max_tokens = config.scheduler.max_num_batched_tokens or max(512 if is_cpu else 2048, max_num_seqs)
    if max_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {max_tokens}; it must be at least max_num_seqs ({max_num_seqs}): "
            "every running sequence takes a token a step"
        )
    memory = plan_memory(
        device=device,
        device_bytes=device_bytes,
        page_format=page_format,
        weight_bytes=sum(shard_bytes(a) for a in leaves),
        temporary_bytes=_temporary_bytes(arch, rules, max_num_seqs, max_tokens, leaves[0].dtype.itemsize),
        memory_utilization=config.cache.memory_utilization,
        num_pages=config.cache.num_pages,
        max_num_seqs=max_num_seqs,
        max_model_len=config.model.max_model_len,
        model_limit=arch.max_positions,
        devices_sharing_heads=page_format.num_head_shards(rules),
    )
    sizes = ProgramSizes(
        num_slots=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_rounds=config.scheduler.rounds_per_dispatch,
        max_model_len=memory.max_model_len,
        num_pages=memory.num_pages,
        table_width=-(-memory.max_model_len // page_format.page_size),
    )
    most = page_format.op.max_table_entries
    if most is not None and sizes.num_slots * sizes.table_width > most:
        raise ConfigError(
            f"{sizes.num_slots} sequences of {sizes.table_width} pages make a page table of "
            f"{sizes.num_slots * sizes.table_width:,} entries; {page_format.op.name} attention has room for {most:,}; "
            "lower max_num_seqs or max_model_len, or raise page_size"
        )
    return sizes, memory


def _default_num_seqs(config: EngineConfig, arch: Architecture, page_format: PageFormat, is_cpu: bool) -> int:
    """32 on a CPU, 256 elsewhere, or what the attention's page table has room for."""
    if is_cpu:
        return 32
    longest = min(config.model.max_model_len or arch.max_positions, arch.max_positions)
    most = page_format.op.max_table_entries
    return 256 if most is None else max(1, min(256, most // -(-longest // page_format.page_size)))


def _temporary_bytes(arch: Architecture, rules: MeshRules, num_slots: int, num_tokens: int, item_bytes: int) -> int:
    """Estimate of what slots and the hungriest program take on a device beside weights and pages.

    Logits three times over and each slot's counts, all float32 or int32 over the vocabulary; a step's hidden states,
    and the products of one layer, several of which live at once. `plan` has the compiled programs' true figures.
    """
    shards = rules.mesh.shape["model"]
    heads = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    per_token = 6 * arch.hidden_size + (2 * heads + 3 * arch.intermediate_size) // shards
    return HEAD_ROOM_BYTES + 4 * num_slots * arch.vocab_size * 4 + num_tokens * per_token * max(item_bytes, 4)


def _flatten(params: ModelParams):
    leaves, tree = jax.tree.flatten((params.top, params.layers))

    def rebuild(flat) -> ModelParams:
        top, layers = jax.tree.unflatten(tree, flat)
        return params._replace(top=top, layers=layers)

    return tuple(leaves), rebuild


def _decoder(arch: Architecture, order: str, dtype, rngs):
    return Decoder(arch, order=order, dtype=dtype, rngs=rngs)
