"""`config.json` to sizes: the public files of five models, both spellings of the rotary fields, every refusal."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.errors import CheckpointError
from jaxinfer.model import Architecture, Decoder, LinearRopeScaling, Llama3RopeScaling, abstract_params
from jaxinfer.model.families import huggingface_architecture, huggingface_weight

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# Parameters of the published checkpoints, heads that are tied counted once.
NUM_PARAMETERS = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "qwen3-8b": 8_190_735_360,
    "gemma-2-9b": 9_241_705_984,
    "smollm2-135m-instruct": 134_515_008,
}
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SCALED = Llama3RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)


def read(model_type: str = "llama", **changes: Any) -> Architecture:
    return read_config({"model_type": model_type, **SIZES, **changes})


def read_config(config: dict[str, Any]) -> Architecture:
    return huggingface_architecture(config, "some/config.json")


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_public_configurations_declare_the_published_number_of_parameters(name):
    arch = huggingface_architecture(json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")), name)
    abstract = abstract_params(lambda rngs: Decoder(arch, dtype=jnp.bfloat16, rngs=rngs))
    assert sum(math.prod(a.shape) for a in jax.tree.leaves((abstract.top, abstract.layers))) == NUM_PARAMETERS[name]
    assert len(set(abstract.layer_graphs)) == 1


def test_the_public_configurations_constants_are_applied():
    def of(name: str) -> Architecture:
        return huggingface_architecture(json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")), name)

    llama, qwen, gemma, smol = map(of, ("llama-3.1-70b", "qwen3-8b", "gemma-2-9b", "smollm2-135m-instruct"))
    assert llama.rope_scaling == Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )
    assert (llama.rope_theta, llama.rms_norm_eps, llama.head_dim, llama.is_tied) == (500000.0, 1e-5, 128, False)
    assert (qwen.has_qk_norm, qwen.has_qkv_bias, qwen.rms_norm_eps, qwen.windows) == (True, False, 1e-6, (None,))
    assert gemma.layer_windows == (4096, None) * 21
    assert (gemma.attention_soft_cap, gemma.logit_soft_cap, gemma.attention_scale) == (50.0, 30.0, 1 / 16)
    assert (gemma.is_tied, gemma.activation, gemma.max_positions) == (True, "gelu_tanh", 8192)
    assert (smol.head_dim, smol.group_size, smol.rope_theta, smol.rope_scaling, smol.is_tied) == (
        64,
        3,
        1e5,
        None,
        True,
    )


def test_absent_and_null_fields_have_transformers_defaults():
    got = read(head_dim=None, num_key_value_heads=None, rope_scaling=None, rms_norm_eps=None)
    assert got == read(rope_theta=10000.0, num_key_value_heads=6, rms_norm_eps=1e-6, tie_word_embeddings=False)
    assert (got.num_kv_heads, got.head_dim, got.family) == (6, 8, "llama")
    assert read("qwen3").head_dim == 128
    gemma = read("gemma2")
    assert (gemma.head_dim, gemma.is_tied, gemma.query_scale, gemma.activation) == (256, True, 256.0, "gelu_tanh")
    assert (gemma.attention_soft_cap, gemma.logit_soft_cap) == (50.0, 30.0)
    assert gemma.layer_windows == (4096, None, 4096, None)


def test_a_null_soft_cap_is_no_soft_cap():
    got = read("gemma2", sliding_window=64, attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (got.attention_soft_cap, got.logit_soft_cap) == (None, None)


def test_biases_are_where_each_family_has_them():
    def biases(arch: Architecture) -> tuple[bool, bool, bool]:
        return arch.has_qkv_bias, arch.has_out_bias, arch.has_mlp_bias

    assert biases(read(attention_bias=True)) == (True, True, False)
    assert biases(read(mlp_bias=True)) == (False, False, True)
    assert biases(read("qwen2")) == (True, False, False)
    assert biases(read("qwen3", attention_bias=True)) == (True, True, False)
    assert biases(read("gemma2", attention_bias=True, sliding_window=64)) == (True, True, False)


@pytest.mark.parametrize(
    ("changes", "theta", "scaling"),
    [
        ({"rope_theta": 500.0}, 500.0, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, 500.0, None),
        ({"rope_theta": 500.0, "rope_scaling": LLAMA3}, 500.0, SCALED),
        ({"rope_parameters": {"rope_theta": 500.0, **LLAMA3}}, 500.0, SCALED),
        ({"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2}}, 500.0, LinearRopeScaling(factor=2.0)),
        ({"rope_scaling": LLAMA3, "rope_parameters": LLAMA3}, 10000.0, SCALED),
    ],
)
def test_rotary_fields_are_read_in_both_spellings(changes, theta, scaling):
    got = read(**changes)
    assert (got.rope_theta, got.rope_scaling) == (theta, scaling)


def test_an_original_context_that_is_not_given_is_the_context():
    without = {key: value for key, value in LLAMA3.items() if not key.startswith("original")}
    assert read(rope_scaling=without).rope_scaling.original_context == 128
    assert read(rope_scaling=without, original_max_position_embeddings=32).rope_scaling.original_context == 32


def test_windows_follow_the_families_own_rules():
    sliding, full = "sliding_attention", "full_attention"
    assert read("qwen2", sliding_window=16, max_window_layers=2).layer_windows == ()
    used = {"sliding_window": 16, "use_sliding_window": True}
    assert read("qwen2", **used, max_window_layers=1).layer_windows == (None, 16, 16, 16)
    assert read("qwen3", **used, max_window_layers=0).layer_windows == (16,) * 4
    assert read("qwen3", **used).layer_windows == (), "the default is 28 layers without"
    assert read("qwen3", **used, layer_types=[full, full, full, sliding]).layer_windows == (None, None, None, 16)
    assert read("gemma2", sliding_window=16).layer_windows == (16, None, 16, None)
    assert read("gemma2", sliding_window=16, layer_types=[full] * 4).layer_windows == ()


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", {"model_type": "lama"}, "model_type is 'lama'; this version runs: llama, .*; the nearest is llama"),
        ("llama", {"model_type": None}, "model_type: missing; this version runs: llama"),
        ("llama", {"model_type": None, "architectures": ["Qwen3MoeForCausalLM"]}, "the nearest is Qwen3ForCausalLM"),
        ("llama", {"model_type": 7}, "model_type is '7'"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "only LlamaForCausalLM of llama is run"),
        ("llama", {"architectures": "LlamaForCausalLM"}, "architectures: must be a list of one name"),
        ("llama", {"architectures": [{}]}, "architectures: must be a list of one name"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: quantized"),
        ("llama", {"auto_map": {"AutoModel": "x.Y"}}, "auto_map: .* never run"),
        ("llama", {"num_local_experts": 8}, "num_local_experts: mixtures of experts"),
        ("qwen3", {"num_experts": 128}, "num_experts: mixtures of experts"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: only whole heads"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, r"rope_parameters\.partial_rotary_factor"),
        (
            "llama",
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            r"rope_scaling\.rope_type: 'yarn' is not supported",
        ),
        ("llama", {"rope_scaling": {"type": "dynamic"}}, r"rope_scaling\.rope_type: 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor: missing"),
        ("llama", {"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor: must be below"),
        ("llama", {"rope_scaling": 8.0}, "rope_scaling: 8.0; it must be an object"),
        ("llama", {"rope_scaling": LLAMA3, "rope_parameters": {}}, "rope_scaling: differs from rope_parameters"),
        ("gemma2", {"rope_parameters": {"full_attention": {}}}, "values by type of layer"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not supported; supported: silu"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: 'gelu' is not supported"),
        ("llama", {"hidden_act": ["silu"]}, "hidden_act: "),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention: only causal"),
        ("gemma2", {"sliding_window": None}, "sliding_window: missing"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types: must be a list of 4 names"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "layer_types: only full_attention"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 4}, "layer_types: 'chunked_attention' is not supported"),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads: 4 does not divide num_attention_heads, 6"),
        ("llama", {"num_attention_heads": 10}, "num_attention_heads: 10 does not divide hidden_size, 48"),
        ("llama", {"head_dim": 7}, "head_dim: 7; .* even"),
        ("llama", {"head_dim": 0}, "head_dim: 0; it must be a whole number"),
        ("llama", {"vocab_size": 96.0}, "vocab_size: 96.0; it must be a whole number"),
        ("llama", {"hidden_size": True}, "hidden_size: True"),
        ("llama", {"intermediate_size": 1 << 40}, "intermediate_size: 1099511627776; it must be .* 1073741824"),
        ("qwen2", {"num_hidden_layers": 1 << 29, "use_sliding_window": True}, "num_hidden_layers: .* from 1 to 4096"),
        ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps: nan; it must be a finite number above 0"),
        ("llama", {"rms_norm_eps": 10**400}, r"rms_norm_eps: 10+\.\.\.; it must be a finite number"),
        ("llama", {"rope_theta": -1}, "rope_theta: -1; it must be"),
        ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes'; it must be true or false"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping: 0; it must be"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(model_type, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config({"model_type": model_type, "sliding_window": 16, **SIZES, **changes})
    assert str(caught.value).startswith("some/config.json: ")


@pytest.mark.parametrize(
    "key",
    [key for key in SIZES if key != "num_key_value_heads"],
)
def test_a_missing_size_is_named(key):
    with pytest.raises(CheckpointError, match=f"{key}: missing"):
        read(**{key: None})


def test_fields_without_effect_are_ignored():
    noise = {"torch_dtype": "bfloat16", "use_cache": True, "attention_dropout": 0.1, "a_new_field": {"x": 1}}
    assert read(**noise, architectures=["LlamaForCausalLM"], sliding_window=16) == read()


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("top.head", "lm_head.weight"),
        ("layers.3.attention.qkv.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("layers.0.mlp_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ],
)
def test_a_tensor_of_another_shape_is_named(name, tensor):
    with pytest.raises(CheckpointError, match=rf"folder: {tensor} has shape \(3,\); config.json needs \("):
        huggingface_weight(read(), name, lambda _: np.zeros(3, np.float32), "in_out", "folder")
