"""Command line of `python -m jaxinfer.plan`; the engine's options are the engine's own. No jax: `--help` is quick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.flags import Group, engine_flags, flags_of, parse_flags

PROG = "python -m jaxinfer.plan"
DESCRIPTION = """Compiles every program that serves a model for a chip that need not be here, and says what fits in its
memory, how fast it can be, and why. No weights are read: a config.json is enough.

Exit code 0 when all programs compile and fit, 1 when not or after an error that names its cause, 2 for a wrong command
line."""
MODEL_TEXT = (
    "`builtin`, the path of a GGUF file or of a Hugging Face folder, or of its config.json alone: no weights are read."
)
# What changes a program, its memory or its speed.
ENGINE_FIELDS = (
    "model",
    "dtype",
    "kv_cache_dtype",
    "max_model_len",
    "page_size",
    "num_pages",
    "memory_utilization",
    "max_num_seqs",
    "max_num_batched_tokens",
    "rounds_per_dispatch",
    "tensor_parallel_size",
    "attention",
)


@dataclass(frozen=True, kw_only=True)
class Command:
    """What is planned, and what is shown of it.

    Attributes:
      target: chip to compile for: v4, v5e, v5p, v6e, tpu7x, h100, h200 or cpu, with a topology (v5e:2x4) or a number of
        GPUs (h200:8) if wanted; None is this machine.
      programs: which to compile: `all`, `none`, or names with commas between, as decode:32,mixed:512.
      rows: sequences that decode at once, for the predicted steps; may be repeated. None takes some that fit.
      contexts: positions of each of them; may be repeated. None takes some that fit.
      threads: programs compiled at the same time.
      json: print one JSON object and nothing else.
    """

    target: str | None = None
    programs: str = "all"
    rows: tuple[int, ...] | None = None
    contexts: tuple[int, ...] | None = None
    threads: int = 2
    json: bool = False

    def __post_init__(self):
        for name in ("rows", "contexts"):
            for value in getattr(self, name) or ():
                if value < 1:
                    raise ConfigError(f"{name} has {value}; each must be at least 1")
        if self.threads < 1:
            raise ConfigError(f"threads is {self.threads}; it must be at least 1")


def parse(arguments: Sequence[str] | None = None) -> tuple[Command, EngineConfig]:
    """Parses `arguments` (None: the process's own).

    Raises:
      ConfigError: a value is not allowed.
      SystemExit: with code 0 after --help, 2 after a usage error, which has been explained on the standard error.
    """
    engine = [
        flag._replace(text=MODEL_TEXT) if flag.name == "model" else flag for flag in engine_flags(only=ENGINE_FIELDS)
    ]
    groups = [Group("engine", "Engine", "The model and how it runs.", engine)]
    command, options = parse_flags(PROG, DESCRIPTION, flags_of(Command), groups, arguments)
    return Command(**command), EngineConfig.from_flat(**options)
