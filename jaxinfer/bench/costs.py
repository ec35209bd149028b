"""What work costs at least: floating-point operations and bytes, counted from the architecture.

    flops = 2 x parameters of the products x tokens  +  4 x N x H x positions attended to, per layer
    bytes = every weight once a pass  +  keys and values of the context once a decoded token

Norms, rotations, sampling and the writes of new keys and values are left out: they are below one percent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp

from jaxinfer.model import Architecture


@dataclass(frozen=True)
class Cost:
    """Least work of something.

    Attributes:
      flops: floating-point operations.
      bytes: read from memory.
    """

    flops: int
    bytes: int


def layer_weights(arch: Architecture) -> int:
    """Parameters of one layer's products: queries, keys and values; output; gate and up; down."""
    d, n, k, h, f = arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.intermediate_size
    return d * (n + 2 * k) * h + n * h * d + 3 * d * f


def head_weights(arch: Architecture) -> int:
    """Parameters of the output head."""
    return arch.vocab_size * arch.hidden_size


def product_weights(arch: Architecture) -> int:
    """Parameters that one decode step reads."""
    return arch.num_layers * layer_weights(arch) + head_weights(arch)


def product_flops(arch: Architecture, num_tokens: int, num_head_rows: int) -> int:
    """Operations of the matrix products of `num_tokens` tokens, the head for `num_head_rows` of them."""
    return 2 * (num_tokens * arch.num_layers * layer_weights(arch) + num_head_rows * head_weights(arch))


def attended(arch: Architecture, positions: Iterable[int]) -> int:
    """Positions attended to by tokens at these positions, summed over the layers; a window cuts them."""
    windows = [arch.window(i) for i in range(arch.num_layers)]
    return sum(p + 1 if w is None else min(p + 1, w) for p in positions for w in windows)


def attention_flops(arch: Architecture, num_attended: int) -> int:
    """Operations of scores and weighted sums."""
    return 4 * arch.num_heads * arch.head_dim * num_attended


def kv_item_bytes(arch: Architecture, kv_dtype: str) -> float:
    """Bytes of one number of a key or value; in 8 bits with its part of the head's float32 scale."""
    item_bytes = jnp.dtype(kv_dtype).itemsize
    return item_bytes + (4 / arch.head_dim if item_bytes == 1 else 0)


def kv_bytes(arch: Architecture, num_attended: int, item_bytes: float) -> int:
    """Bytes of the keys and values of `num_attended` positions."""
    return round(2 * arch.num_kv_heads * arch.head_dim * num_attended * item_bytes)


@dataclass(frozen=True)
class Answered:
    """Lengths of one finished request: prompt tokens, how many of them came from the prefix cache, output tokens."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def workload_cost(
    arch: Architecture, answers: Iterable[Answered], num_passes: int, weight_item_bytes: int, kv_item_bytes: float
) -> Cost:
    """Least work of finished requests.

    The last output token is never computed on. A prefill counts its context's bytes once, however many chunks it took.

    Args:
      num_passes: passes over all weights (mixed steps and decode rounds).
    """
    flops, num_bytes = 0, num_passes * product_weights(arch) * weight_item_bytes
    for a in answers:
        prefill = range(a.cached_tokens, a.prompt_tokens)
        decode = range(a.prompt_tokens, a.prompt_tokens + a.output_tokens - 1)
        flops += product_flops(arch, len(prefill) + len(decode), a.output_tokens)
        flops += attention_flops(arch, attended(arch, prefill) + attended(arch, decode))
        num_bytes += kv_bytes(arch, attended(arch, prefill[-1:]) + attended(arch, decode), kv_item_bytes)
    return Cost(flops, num_bytes)
