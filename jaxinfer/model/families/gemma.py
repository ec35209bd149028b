"""Gemma 2: norms on both sides of each block, soft caps, and a sliding window in every second layer."""

from __future__ import annotations

from jaxinfer.model.architecture import Architecture
from jaxinfer.model.families.config_fields import WINDOW_TYPES, ConfigFields, common_fields
from jaxinfer.model.families.layer_weights import HUGGINGFACE_NAMES

# The name of the norm in front of Llama's feed-forward block means the one behind attention here.
GEMMA2_NAMES = HUGGINGFACE_NAMES | {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}


def gemma2_architecture(fields: ConfigFields) -> Architecture:
    """From `config.json` of model type `gemma2`."""
    common = common_fields(fields, head_dim=256, is_tied=True)
    full, sliding = WINDOW_TYPES
    layer_types = tuple(full if i % 2 else sliding for i in range(common["num_layers"]))
    has_bias = fields.flag("attention_bias", False)
    return Architecture(
        **common,
        family="gemma2",
        activation=fields.activation("hidden_activation", "gelu_pytorch_tanh"),
        layer_windows=fields.windows(common["num_layers"], layer_types),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        has_post_norms=True,
        norm_adds_one=True,
        is_embedding_scaled=True,
        query_scale=fields.number("query_pre_attn_scalar", 256.0),
        attention_soft_cap=fields.cap("attn_logit_softcapping", 50.0),
        logit_soft_cap=fields.cap("final_logit_softcapping", 30.0),
    )
