"""jaxinfer: LLM inference in JAX. `LLM` generates, `SamplingParams` says how, `RequestOutput` is what comes back.

Names are loaded when first used, so that a command answers `--help` without importing jax. `__init__.pyi` beside this
file gives type checkers the same names.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.version import __version__

# Off in this file: `__getattr__` makes the names of `__all__`, and pyright looks for assignments.
# pyright: reportUnsupportedDunderAll=false
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from jaxinfer.engine.llm import LLM

        return LLM
    if name in ("SamplingParams", "RequestOutput", "CompletionOutput"):
        from jaxinfer import request

        return getattr(request, name)
    raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
