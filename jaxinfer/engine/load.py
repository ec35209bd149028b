"""Builds an engine from a configuration: file, tokenizer, parameters, pages, programs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from checkpoints import GGUFError, GGUFFile
from checkpoints.builtin import find_builtin
from jaxinfer.config import EngineConfig, cache_folder
from jaxinfer.engine.layout import abstract_model, lay_out, weight_dtype
from jaxinfer.engine.loop import Engine
from jaxinfer.errors import CheckpointError, ConfigError
from jaxinfer.model import Architecture, MeshRules, ModelParams, PageFormat, pages_for_layers
from jaxinfer.model.families import gguf_architecture, gguf_weight
from jaxinfer.model.params import fill
from jaxinfer.schedule.scheduler import Scheduler
from jaxinfer.step import CompileCounter, MemoryPlan, Programs, ProgramSizes, Runner
from jaxinfer.step.slot_state import SlotState
from jaxinfer.step.weight_order import choose_weight_order
from jaxinfer.text import ChatTemplate, Tokenizer


@dataclass
class LoadedEngine:
    """An engine and what it was made from.

    Attributes:
      engine: the loop.
      memory: what was allocated.
      attention: name of the attention implementation that runs.
      attention_reason: why that one.
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
    attention: str
    attention_reason: str
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
    arch = gguf_model_architecture(gguf, source)
    if tokenizer.vocab_size > arch.vocab_size:
        raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} tokens; the model {arch.vocab_size}")
    rules = MeshRules(make_mesh(config))
    use_compilation_cache(config.compile.compilation_cache)
    dtype = weight_dtype(config.model.dtype, rules)
    order = choose_weight_order(arch, dtype, cache_folder() / "weight_order.json")
    seconds = {"open": clock() - started}

    started = clock()
    template = None if config.model.chat_template is None else _read_template(Path(config.model.chat_template))
    abstract = abstract_model(arch, order, dtype, rules)
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
    layout = lay_out(config, arch, params, rules)
    sizes, memory, page_format = layout.sizes, layout.memory, layout.page_format
    pages = pages_for_layers(page_format, memory.num_pages, rules)
    state = jax.device_put(SlotState.zeros(sizes.num_slots, sizes.max_model_len, arch.vocab_size), rules.replicated)
    seconds = {"pages": time.perf_counter() - started}
    started = time.perf_counter()
    programs = layout.programs(counter)
    if config.compile.warm_up:
        total = len(programs.keys())
        programs.warm_up(lambda key: on_progress("compiling programs", programs.num_compiled, total))
    seconds["compile"] = time.perf_counter() - started
    scheduler = _scheduler(config, sizes, page_format, tokenizer.eos_token_ids)
    runner = Runner(
        programs, layout.leaves, pages, state, vocab_size=arch.vocab_size, eos_token_ids=tokenizer.eos_token_ids
    )
    return LoadedEngine(
        engine=Engine(scheduler, runner, tokenizer, max_in_flight=max_in_flight),
        config=config,
        arch=arch,
        tokenizer=tokenizer,
        chat_template_text=tokenizer.chat_template,
        source=source,
        dtype=layout.dtype,
        memory=memory,
        attention=page_format.op.name,
        attention_reason=layout.attention_reason,
        programs=programs,
        rules=rules,
        compile_counter=counter,
        seconds=seconds,
    )


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


def gguf_model_architecture(gguf: GGUFFile, source: str) -> Architecture:
    """What an open file's metadata say of its decoder.

    Raises:
      CheckpointError: they are missing, or of a kind this version does not run.
    """
    return _translate(lambda: gguf_architecture(gguf.require, gguf.find, gguf.tensors, source))


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
