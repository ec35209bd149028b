"""Builds an engine from a configuration: file, tokenizer, parameters, pages, programs."""

from __future__ import annotations

import functools
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from checkpoints import GGUFError, GGUFFile
from checkpoints.builtin import find_builtin
from jaxinfer.config import EngineConfig, cache_folder
from jaxinfer.engine.loop import Engine
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.model import Architecture, Decoder, MeshRules, ModelParams, PageFormat, abstract_params, pages_for_layers
from jaxinfer.model.decoder import run_layer
from jaxinfer.model.families import gguf_architecture, gguf_weight
from jaxinfer.model.params import fill
from jaxinfer.sampling import packed_row_size
from jaxinfer.schedule.scheduler import Scheduler
from jaxinfer.step import CompileCounter, MemoryPlan, Programs, ProgramSizes, Runner, plan_memory
from jaxinfer.step.compiled import traced_once
from jaxinfer.step.programs import ProgramContext
from jaxinfer.step.slot_state import SlotState
from jaxinfer.step.weight_order import choose_weight_order
from jaxinfer.text import ChatTemplate, Tokenizer
from pallas_kernels.ragged_paged_attention import AttentionNeeds, get_attention

HEAD_ROOM_BYTES = 64 << 20  # for temporaries of programs, beside the logits


@dataclass
class LoadedEngine:
    """An engine and what it was made from.

    Attributes:
      engine: the loop.
      memory: what was allocated.
      compile_counter: what this process traces.
      seconds: time of each part of the start.
    """

    engine: Engine
    config: EngineConfig
    arch: Architecture
    tokenizer: Tokenizer
    chat_template_text: str | None
    source: str
    dtype: str
    memory: MemoryPlan
    programs: Programs
    rules: MeshRules
    compile_counter: CompileCounter
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def num_recompiles(self) -> int:
        """Traces after warm-up: 0, or a bug."""
        return self.programs.num_recompiles

    def chat_template(self) -> ChatTemplate:
        """The configured template, else the model's own.

        Raises:
          CheckpointError: there is none.
        """
        return ChatTemplate(self.chat_template_text, self.tokenizer, self.source)


def load_engine(config: EngineConfig, on_progress: Callable[[str, int, int], None] | None = None) -> LoadedEngine:
    """Loads the model and compiles every program.

    Args:
      on_progress: called with (what, done, total).

    Raises:
      CheckpointError: the model is missing or damaged.
      ConfigError: the configuration does not fit the model or the machine.
    """
    tell = on_progress or (lambda what, done, total: None)
    clock = time.perf_counter
    started = clock()
    gguf, source = open_model(config.model.model)
    tokenizer = Tokenizer.from_gguf_metadata(gguf.metadata, source)
    if config.model.tokenizer is not None:
        other, other_source = open_model(config.model.tokenizer)
        tokenizer = Tokenizer.from_gguf_metadata(other.metadata, other_source)
    arch = _translate(lambda: gguf_architecture(gguf.require, gguf.find, gguf.tensors, source))
    if tokenizer.vocab_size > arch.vocab_size:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} tokens; the model {arch.vocab_size}")
    rules = MeshRules(make_mesh(config))
    use_compilation_cache(config.compile.compilation_cache)
    dtype = _dtype(config.model.dtype, rules)
    order = choose_weight_order(arch, dtype, cache_folder() / "weight_order.json")
    seconds = {"open": clock() - started}

    started = clock()
    template = None if config.model.chat_template is None else _read_template(Path(config.model.chat_template))
    abstract = abstract_params(functools.partial(_decoder, arch, order, dtype))
    total = len(jax.tree.leaves((abstract.top, abstract.layers)))
    done = 0

    def value_of(name: str, struct: Any) -> np.ndarray:
        nonlocal done
        done += 1
        tell("loading weights", done, total)
        value = _translate(lambda: gguf_weight(arch, name, gguf.load, order, source))
        if value.shape != struct.shape:
            raise CheckpointError(
                f"{source}: parameter {name} has shape {value.shape}; the architecture needs {struct.shape}"
            )
        return value.astype(struct.dtype)

    params = fill(abstract, rules, value_of)
    seconds["weights"] = clock() - started
    loaded = build_engine(config, arch, params, tokenizer, rules, source=source, on_progress=tell)
    loaded.chat_template_text = template if template is not None else tokenizer.chat_template
    loaded.seconds = {**seconds, **loaded.seconds}
    return loaded


def build_engine(
    config: EngineConfig,
    arch: Architecture,
    params: ModelParams,
    tokenizer: Tokenizer,
    rules: MeshRules,
    *,
    source: str = "memory",
    on_progress: Callable[[str, int, int], None] = lambda what, done, total: None,
    max_in_flight: int = 2,
) -> LoadedEngine:
    """Pages, slots, programs, scheduler and loop around loaded parameters.

    Raises:
      ConfigError: the configuration does not fit the model or the machine.
    """
    counter = CompileCounter()
    started = time.perf_counter()
    leaves, rebuild = _flatten(params)
    dtype = params.top["embedding"].get_value().dtype
    page_format = _page_format(config, arch, dtype, rules)
    sizes, memory = _sizes(config, arch, leaves, page_format, rules)
    pages = pages_for_layers(page_format, memory.num_pages, rules)
    state = jax.device_put(SlotState.zeros(sizes.num_slots, sizes.max_model_len, arch.vocab_size), rules.replicated)
    seconds = {"pages": time.perf_counter() - started}
    started = time.perf_counter()
    context = ProgramContext(arch, page_format.op, rules, page_format.page_size, rebuild, traced_once(run_layer, 3))
    programs = Programs(context, sizes, leaves, pages, state, packed_row_size(arch.vocab_size), counter)
    if config.compile.warm_up:
        total = len(programs.keys())
        programs.warm_up(lambda key: on_progress("compiling programs", programs.num_compiled, total))
    seconds["compile"] = time.perf_counter() - started
    scheduler = _scheduler(config, sizes, page_format, tokenizer.eos_token_ids)
    runner = Runner(programs, leaves, pages, state, vocab_size=arch.vocab_size, eos_token_ids=tokenizer.eos_token_ids)
    return LoadedEngine(
        engine=Engine(scheduler, runner, tokenizer, max_in_flight=max_in_flight),
        config=config,
        arch=arch,
        tokenizer=tokenizer,
        chat_template_text=tokenizer.chat_template,
        source=source,
        dtype=jnp.dtype(dtype).name,
        memory=memory,
        programs=programs,
        rules=rules,
        compile_counter=counter,
        seconds=seconds,
    )


def _page_format(config: EngineConfig, arch: Architecture, dtype, rules: MeshRules) -> PageFormat:
    kv_dtype = dtype if config.model.kv_cache_dtype == "auto" else jnp.dtype(config.model.kv_cache_dtype)
    needs = AttentionNeeds(
        platform=rules.mesh.devices.flat[0].platform,
        head_dim=arch.head_dim,
        group=arch.group_size,
        page_size=config.cache.page_size,
        dtype=jnp.dtype(dtype).name,
        kv_dtype=jnp.dtype(kv_dtype).name,
    )
    try:
        op = get_attention(config.compile.attention, needs).op
    except NotImplementedError as why:
        raise ConfigError(str(why)) from why
    return PageFormat(arch, op, config.cache.page_size or op.default_page_size, kv_dtype)


def _sizes(
    config: EngineConfig, arch: Architecture, leaves, page_format: PageFormat, rules: MeshRules
) -> tuple[ProgramSizes, MemoryPlan]:
    """Static sizes of the programs, and the memory they leave for pages."""
    device = rules.mesh.devices.flat[0]
    is_cpu = device.platform == "cpu"
    max_num_seqs = config.scheduler.max_num_seqs or (32 if is_cpu else 256)
    max_tokens = config.scheduler.max_num_batched_tokens or max(512 if is_cpu else 2048, max_num_seqs)
    if max_tokens < max_num_seqs:
        raise ConfigError(
            f"max_num_batched_tokens is {max_tokens}; it must be at least max_num_seqs ({max_num_seqs}): "
            "every running sequence takes a token a step"
        )
    memory = plan_memory(
        device=device,
        page_format=page_format,
        weight_bytes=sum(shard_bytes(a) for a in leaves),
        temporary_bytes=HEAD_ROOM_BYTES + 3 * max_num_seqs * arch.vocab_size * 4,
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
    return sizes, memory


def _scheduler(
    config: EngineConfig, sizes: ProgramSizes, page_format: PageFormat, eos_token_ids: tuple[int, ...]
) -> Scheduler:
    return Scheduler(
        num_pages=sizes.num_pages,
        page_size=page_format.page_size,
        max_num_seqs=sizes.num_slots,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        max_model_len=sizes.max_model_len,
        eos_token_ids=eos_token_ids,
        rounds_per_dispatch=sizes.max_rounds,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        eviction_policy=config.cache.eviction_policy,
        preemption_mode=config.cache.preemption_mode,
        swap_capacity_pages=config.cache.swap_bytes // page_format.page_bytes,
        max_queued_requests=config.scheduler.max_queued_requests,
        max_queued_tokens=config.scheduler.max_queued_tokens,
        token_buckets=sizes.token_buckets,
    )


def shard_bytes(array: jax.Array) -> int:
    """Bytes of an array on one device."""
    return math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize


def open_model(model: str) -> tuple[GGUFFile, str]:
    """The checked file of a model name, and its name for errors.

    Raises:
      CheckpointError: absent, damaged, or of a kind this version does not read.
    """
    if model == "builtin":
        path = find_builtin(cache_folder())
        if path is None:
            raise CheckpointError(f"the built-in model is not in {cache_folder()}; run: python -m jaxinfer.fetch")
    else:
        path = Path(model)
        if not path.exists():
            raise CheckpointError(f"model {model!r}: no such file; give `builtin` or the path of a .gguf file")
        if path.is_dir() or path.suffix != ".gguf":
            raise CheckpointError(f"model {model!r}: this version reads .gguf files only")
    return _translate(lambda: GGUFFile.open(path)), path.name


def make_mesh(config: EngineConfig) -> Mesh:
    """The device mesh ("data", "model").

    Raises:
      ConfigError: fewer devices than asked for.
    """
    data, model = config.parallel.data_parallel_size, config.parallel.tensor_parallel_size
    devices = jax.devices()
    if data * model > len(devices):
        raise ConfigError(
            f"tensor_parallel_size {model} x data_parallel_size {data} needs {data * model} devices; "
            f"there are {len(devices)} ({devices[0].platform})"
        )
    return Mesh(np.array(devices[: data * model]).reshape(data, model), ("data", "model"))


def use_compilation_cache(folder: str | None) -> None:
    """Points jax's persistent cache at a folder; "" leaves jax's own setting alone."""
    if folder == "":
        return
    path = Path(folder) if folder is not None else cache_folder() / "programs"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def engine_seed(seed: int | None) -> int:
    """The seed itself, or one from the operating system."""
    return secrets.randbits(62) if seed is None else seed


def _decoder(arch: Architecture, order: str, dtype, rngs):
    return Decoder(arch, order=order, dtype=dtype, rngs=rngs)


def _dtype(name: str, rules: MeshRules):
    if name == "auto":
        name = "float32" if rules.mesh.devices.flat[0].platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def _flatten(params: ModelParams):
    leaves, tree = jax.tree.flatten((params.top, params.layers))

    def rebuild(flat) -> ModelParams:
        top, layers = jax.tree.unflatten(tree, flat)
        return params._replace(top=top, layers=layers)

    return tuple(leaves), rebuild


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as why:
        raise ConfigError(f"chat_template {path}: {why}") from why


def _translate(call: Callable[[], Any]) -> Any:
    """Runs a reader; its errors become the project's own."""
    try:
        return call()
    except GGUFError as why:
        raise CheckpointError(str(why)) from why
