"""The engine's own programs, whole, compiled for real chips: two layers of each architecture, a cut vocabulary."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.engine.layout import abstract_model, lay_out
from jaxinfer.model import MeshRules
from jaxinfer.plan.model_sizes import read_architecture
from jaxinfer.step import CompileCounter

pytestmark = pytest.mark.aot

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
NUM_LAYERS = 2  # of Gemma 2: one with a window and one without
MAX_MODEL_LEN, ROWS, TOKENS = 8192, 16, 256
MAX_VOCABULARY = 32768  # the rest of it only makes the TPU compiler slow, over sampling: 46 s of CPU for 128,256 tokens
# Every architecture for one TPU and one GPU; the other TPUs differ from it in the chip alone.
EVERY = [(target, model) for target in ("v6e", "h200") for model in ("llama-3.1-8b", "qwen3-8b", "gemma-2-9b")]
CASES = [
    *EVERY,
    ("v6e", "smollm2-135m-instruct"),
    ("h200", "smollm2-135m-instruct"),
    *((target, "llama-3.1-8b") for target in ("v5e", "v5p", "tpu7x")),
]


def programs_of(target, model: str):
    """(the op, the programs) of the first layers of a model."""
    arch, _ = read_architecture(str(CONFIGS / f"{model}.json"))
    arch = dataclasses.replace(
        arch,
        num_layers=NUM_LAYERS,
        layer_windows=arch.layer_windows[:NUM_LAYERS],
        vocab_size=min(arch.vocab_size, MAX_VOCABULARY),
    )
    rules = MeshRules(target.mesh())
    config = EngineConfig.from_flat(
        max_num_seqs=ROWS, max_num_batched_tokens=TOKENS, max_model_len=MAX_MODEL_LEN, num_pages=4096
    )
    params = abstract_model(arch, "in_out", jnp.bfloat16, rules)
    layout = lay_out(config, arch, params, rules, target.usable_bytes())
    return layout.page_format.op, layout.programs(CompileCounter())


@pytest.mark.parametrize("key", [("decode", ROWS), ("mixed", TOKENS)], ids=["decode", "mixed"])
@pytest.mark.parametrize(("target", "model"), CASES, indirect=["target"])
def test_whole_programs_compile_with_the_kernel_of_the_chip(target, model, key):
    op, programs = programs_of(target, model)
    assert op.name == target.chip.platform
    compiled = programs.lower(key).compile()
    assert f"ragged_paged_attention_{op.name}" in compiled.as_text()
