"""Qwen2 and Qwen2.5 (biases of queries, keys and values) and Qwen3 (norms of queries and keys), dense models."""

from __future__ import annotations

from jaxinfer.model.architecture import Architecture
from jaxinfer.model.families.config_fields import WINDOW_TYPES, ConfigFields, common_fields


def qwen2_architecture(fields: ConfigFields) -> Architecture:
    """From `config.json` of model type `qwen2`."""
    common = common_fields(fields)
    return Architecture(
        **common,
        family="qwen2",
        activation=fields.activation("hidden_act", "silu"),
        layer_windows=_windows(fields, common["num_layers"]),
        has_qkv_bias=True,
    )


def qwen3_architecture(fields: ConfigFields) -> Architecture:
    """From `config.json` of model type `qwen3`."""
    common = common_fields(fields, head_dim=128)
    has_bias = fields.flag("attention_bias", False)
    return Architecture(
        **common,
        family="qwen3",
        activation=fields.activation("hidden_act", "silu"),
        layer_windows=_windows(fields, common["num_layers"]),
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        has_qk_norm=True,
    )


def _windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """No layer has a window unless `use_sliding_window`; then those from `max_window_layers` on have."""
    full, sliding = WINDOW_TYPES
    if not fields.flag("use_sliding_window", False):
        if any(kind != full for kind in fields.get("layer_types") or ()):
            raise fields.error("layer_types", f"only {full} goes with use_sliding_window false")
        return ()
    # 0 is a value here: a window in every layer.
    first = 0 if fields.get("max_window_layers") == 0 else fields.size("max_window_layers", 28)
    return fields.windows(num_layers, tuple(sliding if i >= first else full for i in range(num_layers)))
