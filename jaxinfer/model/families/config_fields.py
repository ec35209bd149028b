"""Reads a Hugging Face `config.json` field by field: absent and null fields have defaults, wrong ones an error.

A field that changes the result is either read by the family, or refused by name here; all others are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import CheckpointError
from jaxinfer.model.architecture import LinearRopeScaling, Llama3RopeScaling

ACTIVATION_NAMES = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
WINDOW_TYPES = ("full_attention", "sliding_attention")
DEFAULT_WINDOW = 4096
LARGEST_SIZE = 1 << 30  # of any count: what is larger is damage
MAX_LAYERS = 1 << 12  # each is made as an object of its own: a damaged count would exhaust the host's memory
LARGEST_NUMBER = 1e38  # what float32 holds
WHOLE_HEADS = "only whole heads are rotated by this version"
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")


class ConfigFields:
    """A configuration and the name of its file, for errors."""

    def __init__(self, config: Mapping[str, Any], source: str):
        self._config = config
        self._source = source

    def error(self, name: str, problem: str) -> CheckpointError:
        """An error about one field; to be raised."""
        return CheckpointError(f"{self._source}: {name}: {problem}")

    def get(self, name: str) -> Any:
        """The raw value; None when absent or null."""
        return self._config.get(name)

    def size(self, name: str, default: int | None = None, largest: int = LARGEST_SIZE) -> int:
        """A whole number from 1 to `largest`; without a default it must be there."""
        value = self.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "missing")
        if type(value) is not int or not 1 <= value <= largest:
            raise self.error(name, f"{_shown(value)}; it must be a whole number from 1 to {largest}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0; without a default it must be there."""
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "missing")
        # As comparisons, for int: a whole number too large for a float raises in math.isfinite.
        if type(value) not in (int, float) or not 0 < value < LARGEST_NUMBER:
            raise self.error(name, f"{_shown(value)}; it must be a finite number above 0")
        return float(value)

    def cap(self, name: str, default: float | None) -> float | None:
        """A finite number above 0, or None where the file says null: for fields whose null means `off`."""
        if name not in self._config:
            return default
        return None if self.get(name) is None else self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            raise self.error(name, f"{_shown(value)}; it must be true or false")
        return value

    def activation(self, name: str, default: str) -> str:
        """One of `architecture.ACTIVATIONS`."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value not in ACTIVATION_NAMES:
            raise self.error(name, f"{_shown(value)} is not supported; supported: {', '.join(ACTIVATION_NAMES)}")
        return ACTIVATION_NAMES[value]

    def windows(self, num_layers: int, default_types: tuple[str, ...]) -> tuple[int | None, ...]:
        """`layer_types` with `sliding_window` applied, as `Architecture.layer_windows`.

        Args:
          default_types: for a file without `layer_types`.
        """
        types = self.get("layer_types")
        types = list(default_types) if types is None else types
        if not isinstance(types, list) or len(types) != num_layers:
            raise self.error("layer_types", f"must be a list of {num_layers} names, one for each layer")
        for kind in types:
            if kind not in WINDOW_TYPES:
                raise self.error(
                    "layer_types", f"{_shown(kind)} is not supported; supported: {', '.join(WINDOW_TYPES)}"
                )
        if WINDOW_TYPES[1] not in types:
            return ()
        # Null means no window, which contradicts the layers; absent, every family's classes have the same default.
        window = self.size("sliding_window") if "sliding_window" in self._config else DEFAULT_WINDOW
        return tuple(window if kind == WINDOW_TYPES[1] else None for kind in types)

    def rope(self, max_positions: int) -> tuple[float, LinearRopeScaling | Llama3RopeScaling | None]:
        """Base and scaling of the rotary embedding.

        Args:
          max_positions: what Llama 3's scaling takes for an original context that is not given.
        """
        name, values = self._rope_values()
        inner = ConfigFields({f"{name}.{key}": value for key, value in values.items()}, self._source)
        theta = inner.number(f"{name}.rope_theta", self.number("rope_theta", 10000.0))
        if inner.number(f"{name}.partial_rotary_factor", 1.0) != 1.0:
            raise self.error(f"{name}.partial_rotary_factor", WHOLE_HEADS)
        kind = values.get("rope_type", values.get("type", "default"))
        if kind == "default":
            return theta, None
        if kind == "linear":
            return theta, LinearRopeScaling(factor=inner.number(f"{name}.factor"))
        if kind != "llama3":
            raise self.error(
                f"{name}.rope_type", f"{_shown(kind)} is not supported; supported: default, linear, llama3"
            )
        original = inner.size(f"{name}.original_max_position_embeddings", max_positions)
        scaling = Llama3RopeScaling(
            factor=inner.number(f"{name}.factor"),
            low_freq_factor=inner.number(f"{name}.low_freq_factor"),
            high_freq_factor=inner.number(f"{name}.high_freq_factor"),
            original_context=self.size("original_max_position_embeddings", original),
        )
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise self.error(f"{name}.low_freq_factor", f"must be below high_freq_factor, {scaling.high_freq_factor}")
        return theta, scaling

    def _rope_values(self) -> tuple[str, dict[str, Any]]:
        """`rope_parameters` as transformers 5 writes it, or `rope_scaling` as versions before did; by name."""
        new, old = self.get("rope_parameters"), self.get("rope_scaling")
        if new is not None and old is not None and new != old:
            raise self.error("rope_scaling", "differs from rope_parameters; remove one of them")
        name, values = ("rope_scaling", old) if new is None else ("rope_parameters", new)
        if values is None:
            return name, {}
        if not isinstance(values, dict):
            raise self.error(name, f"{_shown(values)}; it must be an object")
        if any(isinstance(value, dict) for value in values.values()):
            raise self.error(name, "values by type of layer are not supported by this version")
        return name, values

    def refuse_what_is_never_run(self) -> None:
        """Raises for fields that no family here applies, when they would change the result."""
        if self.get("quantization_config") is not None:
            raise self.error("quantization_config", "quantized checkpoints are not supported by this version")
        if self.get("auto_map") is not None:
            raise self.error("auto_map", "the model brings code of its own, which is never run")
        for name in _EXPERT_FIELDS:
            if self.get(name):
                raise self.error(name, "mixtures of experts are not supported by this version")
        if self.number("partial_rotary_factor", 1.0) != 1.0:
            raise self.error("partial_rotary_factor", WHOLE_HEADS)
        if self.flag("use_bidirectional_attention", False):
            raise self.error("use_bidirectional_attention", "only causal attention is supported")


def common_fields(fields: ConfigFields, *, head_dim: int | None = None, is_tied: bool = False) -> dict[str, Any]:
    """What every family's file has, as arguments of `Architecture`.

    Args:
      head_dim: default; None for width / heads.
      is_tied: default.
    """
    hidden, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv = fields.size("num_key_value_heads", num_heads)
    if num_heads % num_kv:
        raise fields.error("num_key_value_heads", f"{num_kv} does not divide num_attention_heads, {num_heads}")
    if head_dim is None and fields.get("head_dim") is None and hidden % num_heads:
        raise fields.error("num_attention_heads", f"{num_heads} does not divide hidden_size, {hidden}")
    head_dim = fields.size("head_dim", head_dim or max(1, hidden // num_heads))
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim}; rotary embedding needs an even number")
    max_positions = fields.size("max_position_embeddings")
    theta, scaling = fields.rope(max_positions)
    return {
        "vocab_size": fields.size("vocab_size"),
        "num_layers": fields.size("num_hidden_layers", largest=MAX_LAYERS),
        "hidden_size": hidden,
        "num_heads": num_heads,
        "num_kv_heads": num_kv,
        "head_dim": head_dim,
        "intermediate_size": fields.size("intermediate_size"),
        "max_positions": max_positions,
        "rms_norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "is_tied": fields.flag("tie_word_embeddings", is_tied),
    }


def _shown(value: Any) -> str:
    """A value for an error message, cut when it is long, for it comes from an untrusted file."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
