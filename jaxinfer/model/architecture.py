"""What a decoder looks like, as numbers. One frozen record; a family maps its own configuration on to it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Llama3RopeScaling:
    """Llama 3.1's rescaling of rotary frequencies.

    Source: Llama 3.1 reference code, `apply_scaling`; transformers `_compute_llama3_parameters`.

    Attributes:
      factor: how much longer the new context is.
      low_freq_factor, high_freq_factor: wavelengths beyond original_context / low are divided by `factor`, those under
        original_context / high are kept, those between are interpolated.
      original_context: positions the model was first trained on.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and constants of a decoder.

    Attributes:
      num_heads, num_kv_heads: N and K; N is a multiple of K.
      max_positions: longest context the model was trained for.
      rope_theta: base of the rotary frequencies.
      rope_scaling: None for plain rotary embedding.
      is_tied: the output head is the embedding table.
      layer_windows: per layer, positions a query sees (sliding window), or None for all. An empty tuple means None
        everywhere.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Llama3RopeScaling | None = None
    is_tied: bool = True
    layer_windows: tuple[int | None, ...] = field(default=())

    def __post_init__(self):
        assert self.num_heads % self.num_kv_heads == 0, "query heads must be a multiple of KV heads"
        assert self.head_dim % 2 == 0, "rotary embedding needs an even head_dim"
        assert len(self.layer_windows) in (0, self.num_layers), "one window per layer, or none at all"

    @property
    def group_size(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def window(self, layer: int) -> int | None:
        """Positions a query of this layer sees, or None for all."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows, in order of first use."""
        return tuple(dict.fromkeys(self.window(i) for i in range(self.num_layers)))
