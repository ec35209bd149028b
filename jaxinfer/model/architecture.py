"""What a decoder looks like, as numbers. One frozen record; a family maps its own configuration on to it."""

from __future__ import annotations

from dataclasses import dataclass, field

ACTIVATIONS = ("silu", "gelu_tanh")


@dataclass(frozen=True, kw_only=True)
class LinearRopeScaling:
    """Every rotary frequency divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float


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
    """Sizes and constants of a decoder, and which parts it has. The defaults are Llama's.

    Attributes:
      family: whose weight names the model's files use; a key of `families.FAMILIES`.
      num_heads, num_kv_heads: N and K; N is a multiple of K.
      max_positions: longest context the model was trained for.
      rope_theta: base of the rotary frequencies.
      rope_scaling: None for plain rotary embedding.
      is_tied: the output head is the embedding table.
      layer_windows: per layer, positions a query sees (sliding window), or None for all. An empty tuple means None
        everywhere.
      activation: of the feed-forward gate, one of ACTIVATIONS.
      has_qkv_bias, has_out_bias, has_mlp_bias: biases of the projections into and out of attention, and of the
        feed-forward block.
      has_qk_norm: each head's queries and keys are normalised in front of the rotation.
      has_post_norms: the outputs of attention and of the feed-forward block are normalised too.
      norm_adds_one: norms multiply by 1 + weight.
      is_embedding_scaled: embeddings are multiplied by sqrt(hidden_size), rounded to their dtype.
      query_scale: scores are multiplied by query_scale ** -0.5; None for head_dim.
      attention_soft_cap, logit_soft_cap: c in c * tanh(x / c), of attention scores and of logits; None for no cap.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    family: str = "llama"
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: LinearRopeScaling | Llama3RopeScaling | None = None
    is_tied: bool = True
    layer_windows: tuple[int | None, ...] = field(default=())
    activation: str = "silu"
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    has_mlp_bias: bool = False
    has_qk_norm: bool = False
    has_post_norms: bool = False
    norm_adds_one: bool = False
    is_embedding_scaled: bool = False
    query_scale: float | None = None
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None

    def __post_init__(self):
        assert self.num_heads % self.num_kv_heads == 0, "query heads must be a multiple of KV heads"
        assert self.head_dim % 2 == 0, "rotary embedding needs an even head_dim"
        assert len(self.layer_windows) in (0, self.num_layers), "one window per layer, or none at all"
        assert self.activation in ACTIVATIONS, self.activation

    @property
    def group_size(self) -> int:
        """G: query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def attention_scale(self) -> float:
        """What scores are multiplied by."""
        return (self.head_dim if self.query_scale is None else self.query_scale) ** -0.5

    def window(self, layer: int) -> int | None:
        """Positions a query of this layer sees, or None for all."""
        return self.layer_windows[layer] if self.layer_windows else None

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct windows, in order of first use."""
        return tuple(dict.fromkeys(self.window(i) for i in range(self.num_layers)))
