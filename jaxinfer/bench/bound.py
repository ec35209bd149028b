"""The benchmark's own bound: the time of the model's matrix products alone, in XLA, at the same sizes.

A step cannot be faster than its products, so (products' time / step's time) shows what the engine spends beside them:
attention, norms, sampling, copies and the host. The products are the model's own in shape, number and dtype, unrolled,
each with a matrix of its own so that nothing stays in a cache; the values are random. Each product's result feeds the
next, every column of it, so that XLA can leave nothing out.

    x ─ qkv ─ fold to N x H ─ out ─ gate_up ─ fold to F ─ down ─ x   for each layer, then the head

Each part is timed in every formulation below, and the least counts at each number of rows:

    layers    in_out  x @ W        out_in  x @ W.T, W stored [out, in]
    head      in_out  x @ W        out_in  x @ W.T        table_first  W @ x.T, W stored [V, D]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.machine import best_seconds
from jaxinfer.model import Architecture
from jaxinfer.model.linear import WEIGHT_ORDERS, dot
from jaxinfer.step.compiled import traced_once

HEAD_FORMS = (*WEIGHT_ORDERS, "table_first")
QUICK_ROWS = 64  # products of more rows are long enough to be timed singly
QUICK_TRIES = 2


def product_shapes(arch: Architecture) -> list[tuple[int, int]]:
    """[in, out] of one layer's matrices, in the order they are used."""
    d, n, k, h, f = arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.intermediate_size
    return [(d, (n + 2 * k) * h), (n * h, d), (d, 2 * f), (f, d)]


def products(arch: Architecture, part: str, form: str, x_TD, weights):
    """The products of all layers, or of the head. The first three arguments are static.

    Args:
      part: "layers" or "head".
      form: of `WEIGHT_ORDERS` or `HEAD_FORMS`.
      weights: per layer, its matrices in the form's order; or the head's matrix.

    Returns:
      x_TD; or logits [T, V], [V, T] with `table_first`.
    """
    if part == "head":
        return dot(weights, x_TD, 1) if form == "table_first" else dot(x_TD, weights, WEIGHT_ORDERS.index(form))
    contract = WEIGHT_ORDERS.index(form)
    for qkv, out, gate_up, down in weights:
        x_TD = dot(_fold(dot(x_TD, qkv, contract), arch.num_heads * arch.head_dim), out, contract)
        x_TD = dot(_fold(dot(x_TD, gate_up, contract), arch.intermediate_size), down, contract)
    return x_TD


def _fold(y_TO, width: int):
    """Adds up runs of `width` columns: every column is used, and linear, so that values keep their scale."""
    total = y_TO[:, :width]
    for first in range(width, y_TO.shape[1], width):
        rest = y_TO[:, first : first + width]
        total = total + jnp.pad(rest, ((0, 0), (0, width - rest.shape[1])))
    return total


@dataclass(frozen=True)
class ProductTimes:
    """Seconds of one visit, by formulation."""

    rows: int
    layers: dict[str, float]
    head: dict[str, float]


class ProductBound:
    """Random matrices of a model in every order, and the compiled products over them: twice the model's memory."""

    def __init__(self, arch: Architecture, dtype: Any, calls_per_try: int):
        """Takes how many calls in a row one time is the mean of, at few rows."""
        self._arch = arch
        self._dtype = jnp.dtype(dtype)
        self._calls_per_try = calls_per_try
        self._rng = np.random.default_rng(0)
        self._call = traced_once(products, 3)
        layers = [[self._matrix(*shape) for shape in product_shapes(arch)] for _ in range(arch.num_layers)]
        table_DV = self._matrix(arch.hidden_size, arch.vocab_size)
        table_VD = _transposed(table_DV)
        self._layers = {"in_out": layers, "out_in": [[_transposed(w) for w in layer] for layer in layers]}
        self._head = {"in_out": table_DV, "out_in": table_VD, "table_first": table_VD}

    def visit(self, rows: int) -> ProductTimes:
        """Times every formulation at a number of rows."""
        x_TD = self._matrix(rows, self._arch.hidden_size)
        layers = {form: self._seconds("layers", form, x_TD, w) for form, w in self._layers.items()}
        head = {form: self._seconds("head", form, x_TD, w) for form, w in self._head.items()}
        return ProductTimes(rows, layers, head)

    def _seconds(self, part: str, form: str, x_TD, weights) -> float:
        tries, calls = (QUICK_TRIES, self._calls_per_try) if x_TD.shape[0] <= QUICK_ROWS else (1, 1)
        return best_seconds(lambda: self._call(self._arch, part, form, x_TD, weights), tries, calls)

    def _matrix(self, rows: int, columns: int) -> jax.Array:
        values = self._rng.standard_normal((rows, columns), np.float32) / np.sqrt(rows)
        return jax.device_put(values.astype(self._dtype))


def _transposed(matrix: jax.Array) -> jax.Array:
    return jax.device_put(np.ascontiguousarray(np.asarray(matrix).T))


@dataclass(frozen=True)
class Bound:
    """Least time of a step's products.

    Attributes:
      seconds: layers and head, each in its best formulation.
      layers_form, head_form: which those were.
    """

    seconds: float
    layers_form: str
    head_form: str


def bound_of(layer_visits: Sequence[ProductTimes], head_visits: Sequence[ProductTimes]) -> Bound:
    """The bound from visits at the step's rows, and visits at the rows that need the head."""
    layers_s, layers_form = min((s, form) for visit in layer_visits for form, s in visit.layers.items())
    head_s, head_form = min((s, form) for visit in head_visits for form, s in visit.head.items())
    return Bound(layers_s + head_s, layers_form, head_form)
