"""Tokenizers and stored answers for the tests of `jaxinfer.text`."""

import json
from pathlib import Path
from typing import Any

import pytest
from text.small_vocabulary import small_tokenizer

from checkpoints.builtin import find_builtin
from checkpoints.gguf import GGUFFile
from jaxinfer.config import cache_folder
from jaxinfer.text import Tokenizer


@pytest.fixture(scope="session")
def small() -> Tokenizer:
    """The hand-made vocabulary of `small_vocabulary.py`."""
    return small_tokenizer()


@pytest.fixture(scope="session")
def builtin() -> Tokenizer:
    """The built-in model's tokenizer; tests that ask for it are marked `weights`."""
    path = find_builtin(cache_folder())
    if path is None:
        pytest.skip("the built-in model is not here; python -m jaxinfer.fetch gets it")
    return Tokenizer.from_gguf_metadata(GGUFFile.open(path).metadata, path.name)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Stored answers of transformers, made by scripts/make_tokenizer_golden.py."""
    return json.loads((Path(__file__).parent / "golden_tokenizer.json").read_text(encoding="utf-8"))
