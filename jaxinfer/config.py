"""All configuration as frozen dataclasses, one documented default per field.

Values learnt at start-up (pages that fit, device kind) are not written here; see `step/memory.py`. The command line is
generated from these classes. This is the one place that reads environment variables.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxinfer.errors import ConfigError

DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "fp16": "bfloat16",
    "float16": "bfloat16",
    "half": "bfloat16",
}
KV_CACHE_DTYPES = DTYPES | {
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
}
EVICTION_POLICIES = ("lru", "lfu", "fifo", "cost")
PREEMPTION_MODES = ("recompute", "swap")
ATTENTION_IMPLEMENTATIONS = ("auto", "reference", "xla", "cpu", "tpu", "gpu")


def cache_folder() -> Path:
    """Folder for the built-in model and compiled programs.

    It is `JAXINFER_CACHE`, else `XDG_CACHE_HOME/jaxinfer`, else `~/.cache/jaxinfer`.
    """
    given = os.environ.get("JAXINFER_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfer"


def gpu_memory_ratio() -> float:
    """The part of a GPU's memory that jax's allocator takes: XLA_CLIENT_MEM_FRACTION, else jax's default."""
    given = os.environ.get("XLA_CLIENT_MEM_FRACTION") or os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or "0.75"
    try:
        ratio = float(given)
    except ValueError:
        ratio = 0.0
    if not 0.0 < ratio <= 1.0:
        raise ConfigError(f"XLA_CLIENT_MEM_FRACTION is {given!r}; it must be in (0, 1]")
    return ratio


def prepare_tpu_compiler() -> None:
    """Lets libtpu compile for TPUs that are not here, several processes at a time. Before its first use.

    Without these it asks a metadata server about this machine, takes a lock file that one process can hold, and warns.
    What the user has set is left alone.
    """
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")


def native_folder(cache: Path | None = None) -> Path:
    """Folder for native kernels built for this machine, in the cache folder given, or the usual one."""
    return (cache or cache_folder()) / "native"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model, and in which form.

    Attributes:
      model: `builtin`, or the path of a GGUF file.
      tokenizer: path of another GGUF file whose tokenizer to use; None takes the model's own.
      dtype: of weights and activations: `auto` (float32 on a CPU, bfloat16 elsewhere), `float32` or `bfloat16`;
        `float16` and `fp16` mean bfloat16.
      kv_cache_dtype: of cached keys and values: `auto` (as `dtype`), `float32`, `bfloat16`, or in 8 bits with a float32
        scale per position and KV head: `int8`, or `fp8` (e4m3), also written `fp8_e4m3` or `float8_e4m3fn`.
      max_model_len: most positions of a sequence; None takes the model's own limit, or what fits.
      chat_template: path of a jinja file; None takes the model's own.
    """

    model: str = "builtin"
    tokenizer: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    chat_template: str | None = None

    def __post_init__(self):
        for name, allowed in (("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES)):
            value = getattr(self, name)
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
            object.__setattr__(self, name, allowed[value])
        _at_least("max_model_len", self.max_model_len, 2)


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """The page pool and the prefix cache.

    Attributes:
      page_size: positions per page, a power of two in [8, 256]; None takes the attention implementation's best.
      num_pages: pages in the pool; None sizes it from `memory_utilization`.
      memory_utilization: share of the device's memory that weights, pages and temporaries may use, in (0, 1].
      enable_prefix_caching: find the pages of a prompt's beginning again.
      eviction_policy: which unreferenced cached page goes first: `lru`, `lfu`, `fifo` or `cost`.
      preemption_mode: `recompute`, or `swap` to host memory.
      swap_bytes: host memory for swapped pages; when it is full, preemption recomputes.
    """

    page_size: int | None = None
    num_pages: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    eviction_policy: str = "lru"
    preemption_mode: str = "recompute"
    swap_bytes: int = 1 << 30

    def __post_init__(self):
        _one_of("eviction_policy", self.eviction_policy, EVICTION_POLICIES)
        _one_of("preemption_mode", self.preemption_mode, PREEMPTION_MODES)
        size = self.page_size
        if size is not None and (size < 8 or size > 256 or size & (size - 1)):
            raise ConfigError(f"page_size is {size}; it must be a power of two from 8 to 256")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ConfigError(f"memory_utilization is {self.memory_utilization}; it must be in (0, 1]")
        _at_least("num_pages", self.num_pages, 2)
        _at_least("swap_bytes", self.swap_bytes, 0)


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """How requests share the device.

    Attributes:
      max_num_seqs: sequences that run at once (slots); None takes 32 on a CPU, 256 elsewhere.
      max_num_batched_tokens: most query tokens in one step; None takes 512 on a CPU, 2048 elsewhere.
      max_queued_requests: requests that may wait; one more is refused.
      max_queued_tokens: prompt tokens that may wait; more are refused.
      rounds_per_dispatch: most tokens per sequence in one decode dispatch.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_queued_requests: int = 1_000_000
    max_queued_tokens: int = 1_000_000_000
    rounds_per_dispatch: int = 8

    def __post_init__(self):
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queued_requests",
            "max_queued_tokens",
            "rounds_per_dispatch",
        ):
            _at_least(name, getattr(self, name), 1)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """The device mesh ("data", "model").

    Attributes:
      tensor_parallel_size: devices along "model"; heads, feed-forward width and vocabulary are divided where they
        divide.
      data_parallel_size: devices along "data"; the query tokens of a step are divided.
    """

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1

    def __post_init__(self):
        _at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        _at_least("data_parallel_size", self.data_parallel_size, 1)


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    """How programs are compiled.

    Attributes:
      attention: implementation by name: `tpu`, `gpu` or `cpu` (native), `xla` (anywhere), `reference` (slow); `auto`
        takes the platform's best that can run here, and `metrics()` says which and why.
      compilation_cache: folder of compiled programs; None takes one inside the cache folder, "" switches it off.
      warm_up: compile every program at start-up rather than at first use.
    """

    attention: str = "auto"
    compilation_cache: str | None = None
    warm_up: bool = True

    def __post_init__(self):
        _one_of("attention", self.attention, ATTENTION_IMPLEMENTATIONS)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything an engine is made from.

    Attributes:
      seed: of the engine: draws the seeds of requests that give none. None takes one from the operating system.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    seed: int | None = 0

    @staticmethod
    def from_flat(**options: Any) -> EngineConfig:
        """Builds a config from one flat set of names, as `LLM(...)` and the command line give them.

        Raises:
          ConfigError: an unknown name (the nearest known one is suggested) or a bad value.
        """
        groups = {
            "model": ModelConfig,
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "parallel": ParallelConfig,
            "compile": CompileConfig,
        }
        owner = {f.name: group for group, cls in groups.items() for f in fields(cls)}
        owner["seed"] = ""
        parts: dict[str, dict[str, Any]] = {group: {} for group in groups}
        top: dict[str, Any] = {}
        for name, value in options.items():
            if name not in owner:
                near = difflib.get_close_matches(name, owner, 1)
                raise ConfigError(f"unknown option {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
            if owner[name]:
                parts[owner[name]][name] = value
            else:
                top[name] = value
        return EngineConfig(**{group: cls(**parts[group]) for group, cls in groups.items()}, **top)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1)
        raise ConfigError(
            f"{name} is {value!r}; it must be one of {', '.join(allowed)}"
            + (f"; did you mean {near[0]!r}?" if near else "")
        )


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < low):
        raise ConfigError(f"{name} is {value!r}; it must be an integer of at least {low}")
