"""Models and batches that kernels are compiled for. Data and sizes only: no jax here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1, "float8_e4m3fn": 1}
SCALED = ("int8", "float8_e4m3fn")  # dtypes of pages that come with a float32 scale per position and KV head
MODES = ("decode", "prefill", "mixed")


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One model's attention.

    Attributes:
      group: query heads per KV head.
      window, soft_cap: of some of its layers, or None.
    """

    num_kv_heads: int
    group: int
    head_dim: int
    window: int | None = None
    soft_cap: float | None = None


MODELS = {
    "llama-3.1-8b": AttentionShape(num_kv_heads=8, group=4, head_dim=128),
    "llama-3.1-70b-tp8": AttentionShape(num_kv_heads=1, group=8, head_dim=128),
    "qwen3-8b": AttentionShape(num_kv_heads=8, group=4, head_dim=128),
    "gemma-2-9b": AttentionShape(num_kv_heads=8, group=2, head_dim=256, soft_cap=50.0),
    "gemma-2-9b-window": AttentionShape(num_kv_heads=8, group=2, head_dim=256, soft_cap=50.0, window=4096),
    "smollm2-135m": AttentionShape(num_kv_heads=3, group=3, head_dim=64),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A batch at a model's shapes.

    Attributes:
      model: a key of MODELS.
      mode: decode: every row has one query token; prefill: one row of `chunk` query tokens; mixed: all rows but the
        last decode, the last is a prefill chunk.
      batch: rows.
      context: positions of every row, its queries included.
      chunk: query tokens of a prefill row.
      page_size: positions per page.
      dtype, kv_dtype: of activations and of pages.
    """

    model: str
    mode: str = "decode"
    batch: int = 64
    context: int = 2048
    chunk: int = 512
    page_size: int = 64
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"

    @property
    def shape(self) -> AttentionShape:
        return MODELS[self.model]

    @property
    def query_lens(self) -> list[int]:
        """Of each row."""
        if self.mode == "decode":
            return [1] * self.batch
        return [1] * (0 if self.mode == "prefill" else self.batch - 1) + [self.chunk]

    @property
    def num_rows(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lens)

    @property
    def pages_per_row(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def num_pages(self) -> int:
        """In the pool: those of all rows, and the null page."""
        return self.num_rows * self.pages_per_row + 1

    @property
    def page_bytes(self) -> int:
        """Of keys and values of all heads, with their scales, and without any padding."""
        per_head = self.shape.head_dim * ITEM_BYTES[self.kv_dtype] + (4 if self.kv_dtype in SCALED else 0)
        return 2 * self.page_size * self.shape.num_kv_heads * per_head

    @property
    def pages_to_read(self) -> int:
        """Pages that hold a position that some query sees, each counted once."""
        return sum(self.pages_per_row - self._first_page(length) for length in self.query_lens)

    def _first_page(self, query_len: int) -> int:
        if self.shape.window is None:
            return 0
        return max(0, self.context - query_len - self.shape.window + 1) // self.page_size

    @property
    def product_flop(self) -> int:
        """Of scores and sums over values, of the key positions that queries see and no others."""
        seen = 0
        for length in self.query_lens:
            last = np.arange(self.context - length, self.context) + 1
            seen += int(np.minimum(last, self.shape.window or self.context).sum())
        return 4 * seen * self.shape.num_kv_heads * self.shape.group * self.shape.head_dim

    def table(self) -> np.ndarray:
        """int32 page table: every page belongs to one row, in an order that is not the pool's."""
        pages = np.random.default_rng(0).permutation(np.arange(1, self.num_pages))
        return pages.reshape(self.num_rows, self.pages_per_row).astype(np.int32)

    def context_lens(self) -> np.ndarray:
        return np.full(self.num_rows, self.context, np.int32)

    def query_starts(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.query_lens)]).astype(np.int32)
