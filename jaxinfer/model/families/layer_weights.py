"""A layer's parameters put together from a file's tensors, whatever the file calls them.

A part is one tensor of the file, [out, in] as in PyTorch: `q`, `k`, `v`, `out`, `gate`, `up`, `down` (each with
`.weight` and, where there is one, `.bias`) and the norms. Ours are fused, by KV head and one after the other:

    attention.qkv.weight   [K * (G + 2) * H, D]  of  q [K * G * H, D], k and v [K * H, D]
    mlp.gate_up.weight     [2 * F, D]            of  gate and up [F, D]

`attention.out` [D, K * G * H] and `mlp.down` [D, F] are the files' own.
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
        value = np.concatenate([q, *k_and_v], axis=1).reshape(-1, *rest)
    elif module == "mlp.gate_up":
        value = np.concatenate([part(f"{name}.{kind}", f, *rest) for name in ("gate", "up")])
    elif module == "attention.out":
        value = part(f"out.{kind}", d, *width)
    elif module == "mlp.down":
        value = part(f"down.{kind}", d, *hidden)
    else:  # a norm: of a head's values inside attention, of the whole width elsewhere
        owner, _, name = module.rpartition(".")
        return part(f"{name}.weight", h if owner else d)
    return value if is_bias else np.ascontiguousarray(value if order == "out_in" else value.T)
