"""Llama 2 to 3.2 and what is stored as one (SmolLM2 among them), in Hugging Face's form and in GGUF's.

GGUF stores query and key rows so that neighbours are rotated against each other; ours, like the original checkpoints,
rotates halves, so those rows are put back in order here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxinfer.errors import CheckpointError
from jaxinfer.model.architecture import Architecture
from jaxinfer.model.families.config_fields import ConfigFields, common_fields
from jaxinfer.model.families.layer_weights import layer_parameter

NAME = "llama"


def llama_architecture(fields: ConfigFields) -> Architecture:
    """From `config.json` of model type `llama`."""
    has_bias = fields.flag("attention_bias", False)
    return Architecture(
        **common_fields(fields),
        activation=fields.activation("hidden_act", "silu"),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        has_mlp_bias=fields.flag("mlp_bias", False),
    )


def gguf_architecture(require: Callable, find: Callable, tensor_names, source: str) -> Architecture:
    """Reads sizes from GGUF metadata.

    Args:
      require: (key, type) -> value, raising when absent or of another type.
      find: (key, type) -> value or None.
      tensor_names: names of the tensors in the file.
      source: the file, for errors.

    Raises:
      CheckpointError: another architecture, or sizes that cannot be.
    """
    name = require("general.architecture", str)
    if name != NAME:
        raise CheckpointError(f"{source}: general.architecture is {name!r}; this version runs: {NAME}")
    num_heads = require("llama.attention.head_count", int)
    hidden = require("llama.embedding_length", int)
    num_kv = find("llama.attention.head_count_kv", int) or num_heads
    vocab_size = len(require("tokenizer.ggml.tokens", list))
    head_dim = find("llama.attention.key_length", int) or hidden // max(1, num_heads)
    num_layers = require("llama.block_count", int)
    if num_layers < 1:
        raise CheckpointError(f"{source}: llama.block_count is {num_layers}; a model has at least one layer")
    if head_dim % 2:
        raise CheckpointError(f"{source}: heads of {head_dim} values; rotary embedding needs an even number")
    if (find("llama.rope.dimension_count", int) or head_dim) != head_dim:
        raise CheckpointError(
            f"{source}: llama.rope.dimension_count is not the heads' {head_dim}: not supported by this version"
        )
    if (find("llama.rope.scale_linear", float) or 1.0) != 1.0:
        raise CheckpointError(f"{source}: llama.rope.scale_linear: rotary scaling is not supported by this version")
    if min(num_heads, num_kv, hidden) < 1 or num_heads % num_kv or hidden % num_heads:
        raise CheckpointError(f"{source}: {num_heads} heads, {num_kv} KV heads and width {hidden} do not fit together")
    if find("llama.expert_count", int):
        raise CheckpointError(f"{source}: llama.expert_count: mixtures of experts are not supported by this version")
    for key in ("llama.rope.scaling.type", "rope_freqs.weight"):
        if key in tensor_names or (find(key, str) or "none") != "none":
            raise CheckpointError(f"{source}: {key}: rotary scaling from GGUF files is not supported by this version")
    return Architecture(
        vocab_size=vocab_size,
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv,
        head_dim=head_dim,
        intermediate_size=require("llama.feed_forward_length", int),
        max_positions=require("llama.context_length", int),
        rms_norm_eps=float(require("llama.attention.layer_norm_rms_epsilon", float)),
        rope_theta=float(find("llama.rope.freq_base", float) or 10000.0),
        is_tied="output.weight" not in tensor_names,
    )


def gguf_weight(
    arch: Architecture, name: str, load: Callable[[str], np.ndarray], order: str, source: str = "memory"
) -> np.ndarray:
    """One parameter as float32, from the file's tensors.

    Args:
      name: `top.<path>` or `layers.<i>.<path>`, as in `model.params.fill`.
      load: tensor name -> float32 array in [out, in] order.
      order: weight order of `model.linear`.
      source: the file, for errors.

    Raises:
      CheckpointError: a layer's tensor has another shape than the file's sizes say.
    """
    if name in _TOP:
        return load(_TOP[name])
    _, layer, path = name.split(".", 2)

    def part(part_name: str, *shape: int) -> np.ndarray:
        module, _, kind = part_name.partition(".")
        full_name = f"blk.{layer}.{_LAYER[module]}.{kind}"
        found = load(full_name)
        if found.shape != shape:
            raise CheckpointError(f"{source}: {full_name} has shape {found.shape}; the file's own sizes need {shape}")
        return _halves(found, arch.head_dim) if module in ("q", "k") else found

    return layer_parameter(arch, path, part, order)


_TOP = {"top.embedding": "token_embd.weight", "top.norm.weight": "output_norm.weight", "top.head": "output.weight"}
_LAYER = {
    "attention_norm": "attn_norm",
    "mlp_norm": "ffn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "out": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def _halves(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of each head from (pair, half) to (half, pair) order."""
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)
