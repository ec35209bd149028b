"""The page pool on the device: one set of page arrays per layer, shaped by the attention implementation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.model.architecture import Architecture
from jaxinfer.model.sharding import MeshRules
from pallas_kernels.ragged_paged_attention import AttentionOp


@dataclass(frozen=True)
class PageFormat:
    """What one page is.

    Attributes:
      page_size: Z, positions per page.
      dtype: of stored keys and values.
    """

    arch: Architecture
    op: AttentionOp
    page_size: int
    dtype: Any

    def layer_shapes(self, num_pages: int):
        """One layer's arrays as a pytree of ShapeDtypeStruct."""
        return self.op.page_shapes(num_pages, self.arch.num_kv_heads, self.arch.head_dim, self.page_size, self.dtype)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and devices together."""
        per_layer = sum(math.prod(s.shape) * s.dtype.itemsize for s in jax.tree.leaves(self.layer_shapes(1)))
        return per_layer * self.arch.num_layers

    def num_head_shards(self, rules: MeshRules) -> int:
        """Devices a page is divided over."""
        size = rules.mesh.shape["model"]
        return size if self.arch.num_kv_heads % size == 0 else 1

    def axes(self, ndim: int) -> tuple[str | None, ...]:
        """Logical axes of a page array."""
        return tuple("kv_heads" if i == self.op.kv_head_axis else None for i in range(ndim))


def pages_for_layers(page_format: PageFormat, num_pages: int, rules: MeshRules) -> tuple[Any, ...]:
    """Zero-filled pages of every layer, in their shardings."""

    def zeros(struct):
        return jnp.zeros(
            struct.shape, struct.dtype, device=rules.sharding(struct.shape, page_format.axes(len(struct.shape)))
        )

    return tuple(jax.tree.map(zeros, page_format.layer_shapes(num_pages)) for _ in range(page_format.arch.num_layers))


def scrub(pages, page_C):
    """Fills pages with zeros; entries of page_C equal to the number of pages are ignored."""
    return jax.tree.map(lambda a: a.at[page_C].set(jnp.zeros((), a.dtype), mode="drop"), pages)
