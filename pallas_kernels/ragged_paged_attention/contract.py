"""The op's contract: what every implementation takes and gives.

One contract for prefill chunks, single-token decodes and verified drafts: row b owns the query tokens
`query_start[b] .. query_start[b + 1]` of the packed axis T, which are the LAST positions of its context.

    T:            0 1 2 | 3 | 4 5 6 7 | . .        (two padding tokens)
    query_start:  0      3   4         8
    context_len:  9      17  4                      row 0 computes positions 6, 7, 8 of 9

Pages that a row owns hold finite values everywhere, also where nothing was written yet: fresh pages are zero, and the
engine scrubs pages that may hold anything else before they are used again. Pages that no row of the batch owns may hold
anything.

An implementation owns its page layout: only `page_shapes`, `write` and `attend` know it. What depends on the batch but
not on the layer is worked out once per step by `prepare`.

Quantized pages (int8, or float8_e4m3fn) hold a key or value divided by a float32 scale of its own, one per position and
KV head: the head's largest magnitude over the dtype's largest number, 1 where that is 0. `write` computes it, and the
scales are one more leaf of the page arrays. A score is multiplied by its key's scale after the product and a weight by
its value's before, so that no head need be rebuilt; where a tile has more queries than a head has numbers, an
implementation may scale the heads as it casts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

Pages = Any  # pytree of one layer's page arrays; axis 0 is the page, `AttentionOp.kv_head_axis` the KV head
Work = Any  # pytree made by `prepare`


class RaggedBatch(NamedTuple):
    """Which tokens attend to which pages.

    Attributes:
      page_table_BM: int32, page of each Z positions; entries past the context are the null page 0.
      context_len_B: int32, positions a row attends to, its own query tokens included; 0 for an empty row.
      query_start_R: int32 [B + 1], non-decreasing. An empty row has no tokens, or one whose output means nothing.
    """

    page_table_BM: jax.Array
    context_len_B: jax.Array
    query_start_R: jax.Array


@dataclass(frozen=True, kw_only=True)
class AttentionNeeds:
    """What an implementation must run. None where the caller does not know it yet.

    Attributes:
      platform: jax's name of the devices' platform.
      head_dim, group: H, and query heads per KV head.
      page_size: Z; None asks for the implementation's own default.
      dtype, kv_dtype: names of the dtypes of activations and of pages.
      native_folder: where native kernels built for this machine lie; None forgoes them.
    """

    platform: str
    head_dim: int | None = None
    group: int | None = None
    page_size: int | None = None
    dtype: str | None = None
    kv_dtype: str | None = None
    native_folder: Path | None = None


@dataclass(frozen=True)
class AttentionOp:
    """One implementation.

    Attributes:
      name: as asked for by the user.
      default_page_size: positions per page this implementation likes best.
      kv_head_axis: axis of every page array that counts KV heads, for sharding.
      page_shapes: (num_pages, num_kv_heads, head_dim, page_size, dtype) -> pytree of ShapeDtypeStruct, one layer's
        pages.
      write: (pages, k_TKH, v_TKH, page_T, offset_T) -> pages. Every token's key and value go to (page, offset); padding
        tokens name page 0. In place when the pages are donated.
      prepare: (batch, *, num_tokens, max_query_len, page_size, sliding_window) -> Work. `num_tokens` is T;
        `max_query_len` bounds every row's query tokens, and 1 promises that row b's token is token b.
      attend: (q_TKGH, pages, work, *, scale, soft_cap) -> out_TKGH in q's dtype; scores and sums in float32. Outputs of
        padding tokens are finite and mean nothing. Query position p sees key positions in (p - sliding_window, p].
      max_table_entries: most entries, rows times width, of a page table that fits where the kernel keeps it; None for
        no limit.
      why_not: AttentionNeeds -> None, or why this implementation cannot run them here, and what to do about it.
    """

    name: str
    default_page_size: int
    kv_head_axis: int
    page_shapes: Callable[..., Pages]
    write: Callable[..., Pages]
    prepare: Callable[..., Work]
    attend: Callable[..., jax.Array]
    why_not: Callable[[AttentionNeeds], str | None] = lambda needs: None
    max_table_entries: int | None = None
