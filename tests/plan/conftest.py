"""A small model given by its config.json alone, and its layout. Broadcasts and casts must be spelt out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.layout import Layout, abstract_model, lay_out, weight_dtype
from jaxinfer.model import MeshRules
from jaxinfer.model.families import huggingface_architecture
from jaxinfer.plan.targets import find_target

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
OPTIONS = {"page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32, "attention": "xla", "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def small_model(tmp_path: Path) -> Path:
    """Its config.json; two layers of width 64, a vocabulary of 512."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


@pytest.fixture
def make_layout() -> Callable[..., Layout]:
    """(tensor_parallel, device_bytes, fields of config.json, **options) -> the small model's layout on this machine."""

    def make(
        tensor_parallel: int = 1, device_bytes: int | None = None, fields: dict[str, Any] | None = None, **options: Any
    ) -> Layout:
        config = EngineConfig.from_flat(tensor_parallel_size=tensor_parallel, **(OPTIONS | options))
        arch = huggingface_architecture(SMALL | (fields or {}), "config.json")
        rules = MeshRules(find_target("cpu").mesh(tensor_parallel))
        params = abstract_model(arch, "in_out", weight_dtype(config.model.dtype, rules), rules)
        return lay_out(config, arch, params, rules, device_bytes)

    return make
