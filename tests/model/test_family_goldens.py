"""Each family beside transformers' logits (`goldens/`, made by `make_family_goldens.py`), at every position.

The weights go through the family's own map, so a wrong name, a transposed matrix or a head out of place shows here too.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from paged_model import PagedModel
from tiny import run_greedy, tiny_engine, tiny_mesh

from jaxinfer.model import Architecture, Decoder, Llama3RopeScaling, abstract_params, embed
from jaxinfer.model.families import huggingface_architecture, huggingface_weight
from jaxinfer.model.params import fill

FOLDER = Path(__file__).parent / "goldens"
NAMES = ("llama", "smollm2", "qwen2", "qwen3", "gemma2")
# Largest difference of a logit; logits have a standard deviation of 1.2 to 1.5.
TOLERANCES = {
    "float32": 5e-5,  # two float32 programs of up to four layers, sums in another order: measured 1.3e-5
    "bfloat16": 0.4,  # weights and every activation rounded to 8 bits: measured 0.18
}
NUM_DECODED = 12


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


def config(name: str) -> dict[str, Any]:
    return json.loads(str(golden(name)["config"]))


def architecture(name: str) -> Architecture:
    return huggingface_architecture(config(name), name)


def ids(name: str, sequence: int = 0) -> list[int]:
    return golden(name)[f"ids_{sequence}"].tolist()


@functools.cache
def model(
    name: str, arch: Architecture, *, op: str = "xla", dtype: str = "float32", order: str = "in_out", mesh=(1, 1)
) -> PagedModel:
    """The golden's weights in a decoder of `arch`, which is the file's own unless a test plants a fault."""
    rules = tiny_mesh(*mesh)
    abstract = abstract_params(lambda rngs: Decoder(arch, order=order, dtype=jnp.dtype(dtype), rngs=rngs))

    def value_of(path: str, struct: Any) -> np.ndarray:
        return huggingface_weight(arch, path, golden(name).__getitem__, order, name).astype(struct.dtype)

    return PagedModel(arch, fill(abstract, rules, value_of), rules, op=op)


def largest_difference(m: PagedModel, name: str) -> float:
    """Over all positions of the first sequence, prefilled in one go."""
    m.clear()
    (got_TV,) = m.step([(0, 0, ids(name))])
    return float(np.abs(got_TV - golden(name)["logits_0"]).max())


VARIANTS: dict[str, dict[str, Any]] = {
    "xla": {},
    "reference": {"op": "reference"},
    "out_in": {"order": "out_in"},
    "2x2 mesh": {"mesh": (2, 2)},
    "bfloat16": {"dtype": "bfloat16"},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_prefill_equals_transformers(name, variant):
    options = VARIANTS[variant]
    m = model(name, architecture(name), **options)
    assert largest_difference(m, name) <= TOLERANCES[options.get("dtype", "float32")]


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_decode_through_the_cache_equal_transformers(name):
    """Two sequences in four rows: prefilled in chunks beside each other, then a token at a time together."""
    m = model(name, architecture(name))
    m.clear()
    sequences, want = [ids(name, i % 2) for i in range(4)], [golden(name)[f"logits_{i % 2}"] for i in range(4)]
    parts: list[list[np.ndarray]] = [[] for _ in sequences]

    def step(spans: dict[int, slice]) -> None:
        out = m.step([(row, span.start, sequences[row][span]) for row, span in spans.items()])
        for row, logits_TV in zip(spans, out, strict=True):
            parts[row].append(logits_TV)

    ends = [len(tokens) - NUM_DECODED for tokens in sequences]
    step({0: slice(0, 20), 1: slice(0, 7), 3: slice(0, 5)})
    step({0: slice(20, ends[0]), 1: slice(7, ends[1]), 3: slice(5, ends[3])})
    step({2: slice(0, ends[2])})
    for i in range(NUM_DECODED):
        step({row: slice(end + i, end + i + 1) for row, end in enumerate(ends)})
    for got, want_TV in zip(parts, want, strict=True):
        assert np.abs(np.concatenate(got) - want_TV).max() <= TOLERANCES["float32"]


MUTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no rotary scaling": ("llama", {"rope_scaling": None}),
    "another original context": (
        "llama",
        {"rope_scaling": Llama3RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)},
    ),
    "no biases into attention": ("llama", {"has_qkv_bias": False}),
    "no bias out of attention": ("llama", {"has_out_bias": False}),
    "no feed-forward biases": ("llama", {"has_mlp_bias": False}),
    "another base": ("smollm2", {"rope_theta": 10000.0}),
    "another epsilon": ("smollm2", {"rms_norm_eps": 1e-2}),
    "no linear scaling": ("qwen2", {"rope_scaling": None}),
    "a window in every layer": ("qwen2", {"layer_windows": (11, 11, 11)}),
    "a window one too long": ("qwen2", {"layer_windows": (None, 12, 12)}),
    "no norm of queries and keys": ("qwen3", {"has_qk_norm": False}),
    "windows in the other layers": ("gemma2", {"layer_windows": (None, 7, None, 7)}),
    "a window one too short": ("gemma2", {"layer_windows": (6, None, 6, None)}),
    "no cap of scores": ("gemma2", {"attention_soft_cap": None}),
    "no cap of logits": ("gemma2", {"logit_soft_cap": None}),
    "scale by head_dim": ("gemma2", {"query_scale": None}),
    "no embedding scale": ("gemma2", {"is_embedding_scaled": False}),
    "norms without the one": ("gemma2", {"norm_adds_one": False}),
    "no norms behind": ("gemma2", {"has_post_norms": False}),
    "SwiGLU": ("gemma2", {"activation": "silu"}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_exceed_the_tolerance(mutant):
    name, change = MUTANTS[mutant]
    arch = architecture(name)
    changed = dataclasses.replace(arch, **change)
    assert changed != arch
    assert largest_difference(model(name, changed), name) > 10 * TOLERANCES["float32"]


@pytest.mark.parametrize("name", ["gemma2", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n != "gemma2")])
def test_the_engine_writes_the_tokens_that_transformers_writes(name):
    """A prompt alone, and twice in one batch with longer ones that are prefilled in chunks."""
    arch, prompt, want = architecture(name), golden(name)["prompt"].tolist(), golden(name)["greedy"].tolist()
    loaded = tiny_engine(
        arch=arch, params=model(name, arch).params, page_size=8, max_num_batched_tokens=16, num_pages=64
    )
    alone = run_greedy(loaded, [prompt], max_tokens=len(want))
    assert alone[0].outputs[0].token_ids == want
    together = run_greedy(loaded, [ids(name), prompt, ids(name, 1), prompt], max_tokens=18)
    assert [together[i].outputs[0].token_ids for i in (1, 3)] == [want[:18]] * 2


def test_layers_that_differ_in_their_window_alone_share_one_graph():
    """So that a layer is traced once for each window, not once for each layer."""
    m = model("gemma2", architecture("gemma2"))
    assert len(set(m.params.layer_graphs)) == 1
    assert m.arch.windows == (7, None)


def test_the_embedding_scale_is_rounded_to_the_models_dtype():
    """bfloat16 keeps 8 bits: sqrt(36) is exact, sqrt(3072) is not (55.43 becomes 55.5)."""
    arch = dataclasses.replace(architecture("gemma2"), num_layers=1, layer_windows=(), hidden_size=3072)
    abstract = abstract_params(lambda rngs: Decoder(arch, dtype=jnp.bfloat16, rngs=rngs))
    rules = tiny_mesh()
    params = fill(abstract, rules, lambda _, struct: np.ones(struct.shape, struct.dtype))
    from_ones_TD = embed(params, rules, jnp.array([4], jnp.int32))
    assert from_ones_TD.dtype == jnp.bfloat16
    assert np.array_equal(from_ones_TD.astype(jnp.float32), np.full((1, 3072), 55.5, np.float32))
