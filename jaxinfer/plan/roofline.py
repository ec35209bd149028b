"""The least time of a step: bytes over bandwidth or operations over peak, whichever is longer, then the links.

    memory  = (weights once + keys and values attended to + those written) / bandwidth
    compute = 2 x elements of the matrices x tokens / peak + 4 x heads x head_dim x positions attended to / peak
    links   = two all-reduces of the hidden states per layer, one all-gather of the logits, over the links' bandwidth
    step    = max(memory, compute) + links

All of one device. It is a lower bound that good programs come near: norms, rotations, sampling and the time to start a
program or a message are left out, and no machine keeps its published rates. Elements and bytes are those of the arrays
that the programs take, so a quantized or padded array counts as what it is.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from jaxinfer.engine.layout import Layout, shard_bytes
from jaxinfer.plan.targets import Chip


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one device does in a step.

    Attributes:
      flops: of matrix products and attention.
      memory_bytes: read and written.
      link_bytes: sent.
    """

    flops: float
    memory_bytes: float
    link_bytes: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The least time of something, in seconds.

    Attributes:
      memory_s, compute_s, link_s: its parts.
      seconds: of one step, the longer of the first two and the third; of several, the sum of theirs.
    """

    memory_s: float
    compute_s: float
    link_s: float
    seconds: float

    @property
    def bound_by(self) -> str:
        """`memory`, `compute` or `links`, whichever takes longest."""
        times = {"memory": self.memory_s, "compute": self.compute_s, "links": self.link_s}
        return max(times, key=lambda name: times[name])

    def __add__(self, other: Prediction) -> Prediction:
        return Prediction(
            memory_s=self.memory_s + other.memory_s,
            compute_s=self.compute_s + other.compute_s,
            link_s=self.link_s + other.link_s,
            seconds=self.seconds + other.seconds,
        )


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """What a step of a model costs on one of the devices it is divided over.

    Attributes:
      layer_elements, head_elements: of the matrices of all layers' products, and of the output head.
      weight_bytes: read by every step.
      heads_width: query heads x head_dim.
      position_bytes: of one layer's keys and values of one position, as the pool stores them.
      windows: positions each layer sees at most; None for all.
      hidden_bytes, logits_bytes: of one token's hidden state and logits.
      num_devices: that a layer's products are divided over.
      token_buckets: sizes that query tokens are padded to.
    """

    layer_elements: int
    head_elements: int
    weight_bytes: int
    heads_width: float
    position_bytes: float
    windows: tuple[int | None, ...]
    hidden_bytes: int
    logits_bytes: int
    num_devices: int
    token_buckets: tuple[int, ...]

    @staticmethod
    def of(layout: Layout) -> StepCosts:
        arch, params = layout.arch, layout.rebuild(layout.leaves)
        embedding = params.top["embedding"].get_value()
        head = embedding if arch.is_tied else params.top["head"].get_value()
        weight_bytes = sum(shard_bytes(a) for a in layout.leaves)
        if not arch.is_tied:
            weight_bytes -= shard_bytes(embedding)  # a row for each token, no more
        page_bytes = layout.memory.page_bytes / arch.num_layers
        return StepCosts(
            layer_elements=sum(_matrix_elements(layer) for layer in params.layers),
            head_elements=_shard_elements(head),
            weight_bytes=weight_bytes,
            heads_width=arch.num_heads * arch.head_dim / layout.page_format.num_head_shards(layout.rules),
            position_bytes=page_bytes / layout.page_format.page_size,
            windows=tuple(arch.window(i) for i in range(arch.num_layers)),
            hidden_bytes=arch.hidden_size * embedding.dtype.itemsize,
            logits_bytes=arch.vocab_size * jnp.dtype(jnp.float32).itemsize,
            num_devices=layout.rules.mesh.shape["model"],
            token_buckets=layout.sizes.token_buckets,
        )

    def decode(self, num_rows: int, context: int) -> Work:
        """One token for each of `num_rows` sequences that attend to `context` positions."""
        seen = num_rows * self._seen((context,))
        return self._step(num_rows, num_rows, seen, seen + num_rows * len(self.windows))

    def chunk(self, start: int, num_tokens: int) -> Work:
        """A chunk of one prompt, from position `start` on; its last token is sampled."""
        end = start + num_tokens
        padded = self.token_buckets[bisect.bisect_left(self.token_buckets, num_tokens)]
        read = sum(end if w is None else min(end, w + num_tokens) for w in self.windows)
        seen = self._seen(range(start + 1, end + 1))
        return self._step(padded, 1, seen, read + num_tokens * len(self.windows))

    def _step(self, num_tokens: int, num_sampled: int, seen: float, positions_moved: float) -> Work:
        """Args: padded query tokens; rows of the head; query-key pairs; positions read or written. Layers summed."""
        products = 2 * (num_tokens * self.layer_elements + num_sampled * self.head_elements)
        n = self.num_devices
        reduced = 2 * len(self.windows) * num_tokens * self.hidden_bytes * 2 * (n - 1) / n
        gathered = num_sampled * self.logits_bytes * (n - 1) / n
        return Work(
            flops=products + 4 * self.heads_width * seen,
            memory_bytes=self.weight_bytes + positions_moved * self.position_bytes,
            link_bytes=reduced + gathered,
        )

    def _seen(self, context_lens: Iterable[int]) -> int:
        """Positions that queries with these contexts attend to, over all layers."""
        counts = {window: self.windows.count(window) for window in set(self.windows)}
        return sum(n * (c if w is None else min(c, w)) for c in context_lens for w, n in counts.items())


def predict(work: Work, chip: Chip, dtype: str) -> Prediction | None:
    """The roofline of a step's work; None where the chip's figures are not known.

    Args:
      dtype: that products are computed in.
    """
    peak = chip.peak(dtype)
    if peak is None or chip.bytes_per_s is None:
        return None
    memory_s, compute_s = work.memory_bytes / chip.bytes_per_s, work.flops / peak[0]
    link_s = work.link_bytes / chip.link_bytes_per_s if chip.link_bytes_per_s else 0.0
    return Prediction(memory_s=memory_s, compute_s=compute_s, link_s=link_s, seconds=max(memory_s, compute_s) + link_s)


def prompt(costs: StepCosts, num_tokens: int, chip: Chip, dtype: str) -> Prediction | None:
    """A whole prompt of one sequence, in the largest chunks there are, alone on the device."""
    largest = costs.token_buckets[-1]
    total: Prediction | None = None
    for start in range(0, num_tokens, largest):
        part = predict(costs.chunk(start, min(largest, num_tokens - start)), chip, dtype)
        if part is None:
            return None
        total = part if total is None else total + part
    return total


def _matrix_elements(layer: nnx.State) -> int:
    """Elements of a layer's matrices on one device; scales, biases and norms are no products."""
    return sum(
        _shard_elements(leaf.get_value())
        for path, leaf in nnx.to_flat_state(layer)
        if path[-1] == "weight" and len(leaf.get_value().shape) > 1
    )


def _shard_elements(array) -> int:
    return math.prod(array.sharding.shard_shape(array.shape))
