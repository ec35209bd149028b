"""jaxinfer: LLM inference in JAX. `LLM` generates, `SamplingParams` says how, `RequestOutput` is what comes back.

Names are loaded when first used, so that a command answers `--help` without importing jax.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.version import __version__

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from jaxinfer.engine.llm import LLM

        return LLM
    if name in ("SamplingParams", "RequestOutput", "CompletionOutput"):
        from jaxinfer import request

        return getattr(request, name)
    raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
