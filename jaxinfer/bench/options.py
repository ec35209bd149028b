"""The benchmark's commands as dataclasses; the command line is made from them. No jax here: `--help` must be quick."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Offline:
    """A whole workload, all requests at once, greedy: throughput, latencies, memory, and whether the tokens are right.

    Attributes:
      workload: JSON list of {"id", "prompt_token_ids", "max_tokens", "ignore_eos"}; None takes a small synthetic one.
      limit: only the first so many requests.
      baseline: also do the same work one request after another, and print the ratio.
      other_attention: also do the same work, all at once, with this implementation of attention, and print the ratio.
      expect_ids: JSON object {id: [token ids]} to compare the answers with; exit code 1 when any differs.
      repeat: runs of each kind, in turn; figures are medians.
      measure_machine: measure memory bandwidth and GFLOP/s afterwards (1 GB, some seconds); print the parts reached.
      json: file for everything measured.
      engine: options of the engine. `max_num_seqs` defaults to the number of requests, at most 32.
    """

    workload: Path | None = None
    limit: int | None = None
    baseline: bool = False
    other_attention: str | None = None
    expect_ids: Path | None = None
    repeat: int = 1
    measure_machine: bool = True
    json: Path | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self):
        _at_least("limit", self.limit, 1)
        _at_least("repeat", self.repeat, 1)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Single dispatches of the engine beside the time of the model's matrix products alone, measured in turn.

    Attributes:
      rows: sequences decoding at once.
      prompts: lengths of prompts to prefill, one at a time.
      context: mean positions that a decoding sequence attends to; scattered from half to 1.5 times it.
      dispatches: decode dispatches timed in each repetition.
      repeat: repetitions; the least time of each part counts.
      json: file for everything measured.
      engine: options of the engine. `max_num_seqs` defaults to the largest of `rows`.
    """

    rows: tuple[int, ...] = (1, 32)
    prompts: tuple[int, ...] = (512,)
    context: int = 160
    dispatches: int = 4
    repeat: int = 5
    json: Path | None = None
    engine: EngineConfig = field(default_factory=EngineConfig)

    def __post_init__(self):
        for name in ("rows", "prompts"):
            for count in getattr(self, name):
                _at_least(name, count, 1)
        _at_least("context", self.context, 8)
        _at_least("dispatches", self.dispatches, 1)
        _at_least("repeat", self.repeat, 1)
        if not self.rows and not self.prompts:
            raise ConfigError("rows and prompts are both empty; give at least one of them")


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention op alone: every implementation that runs here, in turn, beside the time to read its pages.

    Attributes:
      implementations: names; none takes all that run here, except the slow reference.
      rows: sequences decoding at once, one query token each.
      context: mean positions they attend to; scattered from half to 1.5 times it.
      prompt: length of a prompt to prefill.
      long_context: positions of a single decoding sequence.
      draft_tokens: query tokens of each of 8 rows that verify a draft.
      num_kv_heads, group, head_dim: K, G and H; the defaults are the built-in model's.
      page_size: Z; None takes each implementation's own.
      kv_dtype: of the pages.
      layers: page pools visited in turn, so that none is still in a cache.
      repeat: repetitions; the least time counts.
      json: file for everything measured.
    """

    implementations: tuple[str, ...] = ()
    rows: int = 32
    context: int = 160
    prompt: int = 512
    long_context: int = 4000
    draft_tokens: int = 5
    num_kv_heads: int = 3
    group: int = 3
    head_dim: int = 64
    page_size: int | None = None
    kv_dtype: str = "float32"
    layers: int = 10
    repeat: int = 10
    json: Path | None = None

    def __post_init__(self):
        for name in ("rows", "prompt", "long_context", "draft_tokens", "num_kv_heads", "group", "layers", "repeat"):
            _at_least(name, getattr(self, name), 1)
        _at_least("context", self.context, 8)


@dataclass(frozen=True, kw_only=True)
class Start:
    """Time from the start of `python -m jaxinfer.generate` to the first byte it prints.

    Attributes:
      cold: also start with an empty compilation cache (a temporary folder).
      repeat: starts with a warm cache, after one that is not counted.
      prompt: text to continue.
      model: model name or path.
      timeout_s: longest that one start may take.
      json: file for everything measured.
    """

    cold: bool = False
    repeat: int = 3
    prompt: str = "The capital of France is"
    model: str = "builtin"
    timeout_s: float = 600.0
    json: Path | None = None

    def __post_init__(self):
        _at_least("repeat", self.repeat, 1)


def flat_options(config: EngineConfig, **defaults: Any) -> dict[str, Any]:
    """The options of `LLM` that make this configuration; `defaults` replace those that are None."""
    options: dict[str, Any] = {"seed": config.seed}
    for part in (config.model, config.cache, config.scheduler, config.parallel, config.compile):
        options.update({f.name: getattr(part, f.name) for f in fields(part)})
    for name, value in defaults.items():
        if options[name] is None:
            options[name] = value
    return options


def _at_least(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise ConfigError(f"{name} is {value}; it must be at least {low}")
