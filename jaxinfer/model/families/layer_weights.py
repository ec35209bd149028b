"""A layer's parameters put together from a file's tensors, whatever the file calls them.

A part is one tensor of the file, [out, in] as in PyTorch: `q`, `k`, `v`, `out`, `gate`, `up`, `down` (each with
`.weight` and, where there is one, `.bias`) and the norms. Ours are fused, and laid out by KV head:

    attention.qkv.weight   [K, G + 2, H, D]  of  q [K * G * H, D], k and v [K * H, D]
    attention.out.weight   [D, K, G, H]      of  out [D, K * G * H]
    mlp.gate_up.weight     [2, F, D]         of  gate and up [F, D]
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from jaxinfer.model.architecture import Architecture

# Part -> Hugging Face's name of it in a layer of Llama, and of most families since.
HUGGINGFACE_NAMES = {
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


def layer_parameter(arch: Architecture, path: str, part: Callable[..., np.ndarray], order: str) -> np.ndarray:
    """One parameter of a layer.

    Args:
      path: as in `model.params.fill`, without the layer: `attention.qkv.weight`.
      part: (name, *shape) -> the tensor, of that shape.
      order: weight order of `model.linear`.
    """
    k, g, h, d, f = arch.num_kv_heads, arch.group_size, arch.head_dim, arch.hidden_size, arch.intermediate_size
    n = k * g
    module, _, kind = path.rpartition(".")
    is_bias = kind == "bias"
    rest, width, hidden = ((), (), ()) if is_bias else ((d,), (n * h,), (f,))
    if module == "attention.qkv":
        q = part(f"q.{kind}", n * h, *rest).reshape(k, g, h, *rest)
        k_and_v = [part(f"{name}.{kind}", k * h, *rest).reshape(k, 1, h, *rest) for name in ("k", "v")]
        value, num_in_axes = np.concatenate([q, *k_and_v], axis=1), 1
    elif module == "mlp.gate_up":
        value, num_in_axes = np.stack([part(f"{name}.{kind}", f, *rest) for name in ("gate", "up")]), 1
    elif module == "attention.out":
        value, num_in_axes = part(f"out.{kind}", d, *width), 3
        value = value if is_bias else value.reshape(d, k, g, h)
    elif module == "mlp.down":
        value, num_in_axes = part(f"down.{kind}", d, *hidden), 1
    else:  # a norm: of a head's values inside attention, of the whole width elsewhere
        owner, _, name = module.rpartition(".")
        return part(f"{name}.weight", h if owner else d)
    return value if is_bias else _ordered(value, num_in_axes, order)


def _ordered(weight: np.ndarray, num_in_axes: int, order: str) -> np.ndarray:
    """[out..., in...] as it is, or as [in..., out...]."""
    if order == "out_in":
        return np.ascontiguousarray(weight)
    num_out = weight.ndim - num_in_axes
    return np.ascontiguousarray(weight.transpose(*range(num_out, weight.ndim), *range(num_out)))
