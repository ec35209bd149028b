"""The plain loop every engine test is measured by: numpy float64, one sequence, the whole context anew for every token.

No pages, no cache, no batch, no jax: it shares nothing with the product but the weights' layout, read by name:

    layers.<i>.attention.qkv.weight   [D, K * (G + 2) * H]   queries, key and value of each KV head
    layers.<i>.attention.out.weight   [K * G * H, D]
    layers.<i>.mlp.gate_up.weight     [D, 2 * F]             the gate, then `up`
    layers.<i>.mlp.down.weight        [F, D]

That is order `in_out` on one device; `out_in` has the transposes, and each of several devices its share of the gate,
then of `up`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from flax import nnx

from jaxinfer.model import Architecture, ModelParams


@dataclass(frozen=True)
class Oracle:
    """A model as float64 arrays, all matrices [in, out].

    Attributes:
      weights: {name: array}, names as above.
    """

    arch: Architecture
    weights: dict[str, np.ndarray]

    @staticmethod
    def of(params: ModelParams, arch: Architecture, order: str = "in_out") -> Oracle:
        """Copies the parameters to the host."""
        weights = {}
        for prefix, state in [("top", params.top), *((f"layers.{i}", s) for i, s in enumerate(params.layers))]:
            for path, leaf in nnx.to_flat_state(state):
                name = ".".join((prefix, *map(str, path)))
                array = leaf.get_value()
                value = _in_first(name, np.asarray(array).astype(np.float64), order)
                if name.endswith("mlp.gate_up.weight"):
                    num_shares = array.size // math.prod(array.sharding.shard_shape(array.shape))
                    value = _gate_first(value, num_shares)
                weights[name] = value
        return Oracle(arch, weights)

    def heads_of(self, layer: int) -> np.ndarray:
        """[K, G + 2, D, H]: the matrices of each KV head's queries, of its key and of its value."""
        arch = self.arch
        shape = (arch.hidden_size, arch.num_kv_heads, arch.group_size + 2, arch.head_dim)
        return self.weights[f"layers.{layer}.attention.qkv.weight"].reshape(shape).transpose(1, 2, 0, 3)

    def gate_and_up_of(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Both [D, F]."""
        both_DX, size = self.weights[f"layers.{layer}.mlp.gate_up.weight"], self.arch.intermediate_size
        return both_DX[:, :size], both_DX[:, size:]

    def hidden(self, token_ids: Sequence[int]) -> np.ndarray:
        """float64 [T, D] in front of the final norm."""
        arch = self.arch
        x_TD = self.weights["top.embedding"][np.asarray(token_ids)]
        for i in range(arch.num_layers):
            layer = f"layers.{i}."
            normed_TD = _norm(x_TD, self.weights[layer + "attention_norm.weight"], arch.rms_norm_eps)
            x_TD = x_TD + self._attention(normed_TD, i)
            normed_TD = _norm(x_TD, self.weights[layer + "mlp_norm.weight"], arch.rms_norm_eps)
            gate_TF, up_TF = (normed_TD @ weight_DF for weight_DF in self.gate_and_up_of(i))
            x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ self.weights[layer + "mlp.down.weight"]
        return x_TD

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """float64 [T, V], one row per token of the sequence."""
        normed_TD = _norm(self.hidden(token_ids), self.weights["top.norm.weight"], self.arch.rms_norm_eps)
        head_VD = self.weights["top.embedding" if self.arch.is_tied else "top.head"]
        return normed_TD @ head_VD.T

    def logprobs(self, token_ids: Sequence[int]) -> np.ndarray:
        """`logits`, normalised."""
        logits_TV = self.logits(token_ids)
        logits_TV = logits_TV - logits_TV.max(-1, keepdims=True)
        return logits_TV - np.log(np.exp(logits_TV).sum(-1, keepdims=True))

    def greedy(self, prompt: Sequence[int], max_tokens: int, end_ids: Sequence[int] = ()) -> GreedyText:
        """The likeliest token, `max_tokens` times or up to an end id (which is kept)."""
        ids, logprobs, gaps = list(prompt), [], []
        for _ in range(max_tokens):
            last_V = self.logprobs(ids)[-1]
            second, best = np.partition(last_V, -2)[-2:]
            ids.append(int(last_V.argmax()))
            logprobs.append(float(best))
            gaps.append(float(best - second))
            if ids[-1] in end_ids:
                break
        return GreedyText(tuple(ids[len(prompt) :]), tuple(logprobs), min(gaps))

    def _attention(self, x_TD: np.ndarray, layer: int) -> np.ndarray:
        num_tokens, group, head_dim = len(x_TD), self.arch.group_size, self.arch.head_dim
        window = self.arch.window(layer)
        qkv = x_TD @ self.heads_of(layer)
        out_NHD = self.weights[f"layers.{layer}.attention.out.weight"].reshape(-1, head_dim, x_TD.shape[1])
        age_TS = np.arange(num_tokens)[:, None] - np.arange(num_tokens)[None, :]
        sees_TS = (age_TS >= 0) & (age_TS < (window or num_tokens))
        out_TD = np.zeros_like(x_TD)
        for kv_head in range(self.arch.num_kv_heads):
            k_SH, v_SH = _rotated(qkv[kv_head, group], self.arch), qkv[kv_head, group + 1]
            for g in range(group):
                score_TS = _rotated(qkv[kv_head, g], self.arch) @ k_SH.T / np.sqrt(head_dim)
                weight_TS = np.where(sees_TS, np.exp(score_TS - score_TS.max(-1, keepdims=True)), 0.0)
                weight_TS /= weight_TS.sum(-1, keepdims=True)
                out_TD += weight_TS @ v_SH @ out_NHD[kv_head * group + g]
        return out_TD


@dataclass(frozen=True)
class GreedyText:
    """What the plain loop wrote.

    Attributes:
      token_ids, logprobs: one per token.
      smallest_gap: least difference of the two largest logits met; float32 cannot be asked to decide below about 1e-4.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    smallest_gap: float


def _rotated(x_TH: np.ndarray, arch: Architecture) -> np.ndarray:
    """Rotary embedding of one head at positions 0, 1, ...: component i turns with component i + H / 2."""
    assert arch.rope_scaling is None, "the oracle knows plain rotary embedding only"
    half = arch.head_dim // 2
    turn_TI = np.arange(len(x_TH))[:, None] * arch.rope_theta ** (-2 * np.arange(half)[None, :] / arch.head_dim)
    # As complex numbers, a + bi: turning by an angle is one product.
    turned_TI = (x_TH[:, :half] + 1j * x_TH[:, half:]) * np.exp(1j * turn_TI)
    return np.concatenate([turned_TI.real, turned_TI.imag], axis=1)


def _norm(x_TD: np.ndarray, weight_D: np.ndarray, eps: float) -> np.ndarray:
    return x_TD / np.sqrt((x_TD * x_TD).mean(-1, keepdims=True) + eps) * weight_D


def _in_first(name: str, value: np.ndarray, order: str) -> np.ndarray:
    """[out, in] turned into [in, out]; biases, norms and tables as they are."""
    is_matrix = name.startswith("layers.") and value.ndim == 2
    return value.T if is_matrix and order == "out_in" else value


def _gate_first(both_DX: np.ndarray, num_shares: int) -> np.ndarray:
    """The columns of all shares of the gate, then those of `up`."""
    shares = np.split(both_DX, 2 * num_shares, axis=1)
    return np.concatenate(shares[::2] + shares[1::2], axis=1)
