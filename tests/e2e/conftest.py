"""The real model, started at most once per configuration, and the stored answers it is compared with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints.builtin import find_builtin
from jaxinfer import LLM
from jaxinfer.config import cache_folder


@pytest.fixture(scope="session")
def has_builtin() -> None:
    """Skips where the built-in model was not fetched."""
    if find_builtin(cache_folder()) is None:
        pytest.skip("the built-in model is not here; python -m jaxinfer.fetch gets it")


@pytest.fixture(scope="session")
def real(has_builtin: None) -> LLM:
    """The built-in model with every default; tests that ask for it are marked `weights`."""
    return LLM("builtin", use_tqdm=False)


@pytest.fixture(scope="session")
def golden(shared: Path) -> list[dict[str, Any]]:
    """Greedy answers of transformers in float32, made by shared/data/make_data.py."""
    return json.loads((shared / "data" / "golden_smollm2.json").read_text(encoding="utf-8"))["cases"]
