"""Named shapes of the op, for tests, tuner and benchmark alike. Data only: nothing here makes arrays.

query_lens   3  1  0  4  1     row b computes the last query_lens[b] positions
context_lens 9 17  0  4  0     of context_lens[b]; 0 of 0 is an empty slot, 1 of 0 a frozen
                                   one, whose output means nothing
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """One ragged batch.

    Attributes:
      name: unique.
      context_lens, query_lens: per row; a row's queries are its last positions.
      num_padding: padding tokens behind the last row's.
      window: positions a query sees, or None for all.
      soft_cap: of the scores, or None.
      dtype: of queries and pages.
    """

    name: str
    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    num_padding: int = 0
    dtype: str = "float32"

    def __post_init__(self):
        assert len(self.context_lens) == len(self.query_lens), "one query length per row"
        rows = zip(self.query_lens, self.context_lens, strict=True)
        assert all(0 <= q <= c or (q, c) == (1, 0) for q, c in rows), "queries are the last positions of a context"

    @property
    def num_tokens(self) -> int:
        """T: query tokens and padding."""
        return sum(self.query_lens) + self.num_padding

    @property
    def is_decode(self) -> bool:
        """Whether the batch keeps the promise of `max_query_len` = 1: row b's token is token b."""
        return all(q == 1 for q in self.query_lens)

    @property
    def scale(self) -> float:
        """The usual one."""
        return self.head_dim**-0.5

    def num_pages(self, row: int) -> int:
        """Pages that hold the row's context."""
        return -(-self.context_lens[row] // self.page_size)

    @property
    def table_width(self) -> int:
        """M: one entry more than the longest row uses, so that unused entries are met."""
        return max(self.num_pages(row) for row in range(len(self.context_lens))) + 1


CASES: tuple[AttentionCase, ...] = (
    AttentionCase(name="one_token", context_lens=(1,), query_lens=(1,)),
    AttentionCase(name="decode", context_lens=(5, 16, 17, 33), query_lens=(1, 1, 1, 1)),
    AttentionCase(name="decode_page_edge", context_lens=(16, 32, 48), query_lens=(1, 1, 1)),
    AttentionCase(name="empty_slot", context_lens=(20, 0, 7), query_lens=(1, 0, 1)),
    AttentionCase(name="empty_slots_at_both_ends", context_lens=(0, 0, 9, 0), query_lens=(0, 0, 3, 0)),
    AttentionCase(name="frozen_rows_decode", context_lens=(20, 0, 7, 0), query_lens=(1, 1, 1, 1)),
    AttentionCase(name="frozen_rows_mixed", context_lens=(0, 20, 0, 7), query_lens=(1, 6, 1, 1), num_padding=3),
    AttentionCase(name="all_rows_frozen", context_lens=(0, 0), query_lens=(1, 1)),
    AttentionCase(name="nothing_at_all", context_lens=(0, 0), query_lens=(0, 0), num_padding=4),
    AttentionCase(name="prefill", context_lens=(37,), query_lens=(37,)),
    AttentionCase(name="prefill_page_edge", context_lens=(32, 16), query_lens=(32, 16)),
    AttentionCase(name="prefill_chunk", context_lens=(50, 31), query_lens=(18, 15)),
    AttentionCase(name="prefill_beyond_a_tile", context_lens=(150, 70), query_lens=(130, 70), num_padding=5),
    AttentionCase(name="mixed", context_lens=(9, 17, 0, 4, 40), query_lens=(3, 1, 0, 4, 1), num_padding=7),
    AttentionCase(name="mixed_long_tail", context_lens=(300, 3, 8, 20), query_lens=(1, 3, 1, 6), num_padding=5),
    AttentionCase(name="decode_long_tail", context_lens=(400, 3, 1, 12, 7, 2), query_lens=(1,) * 6),
    AttentionCase(name="verified_drafts", context_lens=(4, 18, 33, 64), query_lens=(4, 4, 4, 4)),
    AttentionCase(name="one_query_head", context_lens=(21, 6), query_lens=(1, 6), num_kv_heads=1, group=1),
    AttentionCase(name="head_dim_80", context_lens=(21, 40), query_lens=(5, 1), head_dim=80),
    AttentionCase(name="head_dim_128", context_lens=(21, 40), query_lens=(5, 1), head_dim=128),
    AttentionCase(name="head_dim_96", context_lens=(21, 40), query_lens=(5, 1), head_dim=96),
    AttentionCase(name="head_dim_256", context_lens=(21, 40), query_lens=(5, 1), head_dim=256, group=2),
    AttentionCase(name="page_size_8", context_lens=(21, 8, 40), query_lens=(5, 1, 1), page_size=8, num_padding=1),
    AttentionCase(name="page_size_32", context_lens=(21, 32, 70), query_lens=(5, 1, 33), page_size=32),
    AttentionCase(name="page_size_64", context_lens=(21, 64, 130), query_lens=(5, 1, 1), page_size=64),
    AttentionCase(name="page_size_128", context_lens=(21, 128, 130), query_lens=(5, 1, 3), page_size=128),
    AttentionCase(name="page_size_256", context_lens=(257, 3), query_lens=(3, 1), page_size=256),
    AttentionCase(name="window_decode", context_lens=(8, 16, 17, 40, 64), query_lens=(1,) * 5, window=16),
    AttentionCase(name="window_prefill", context_lens=(8, 16, 17, 64), query_lens=(8, 16, 17, 64), window=16),
    AttentionCase(name="window_mixed", context_lens=(60, 41, 150), query_lens=(1, 9, 90), window=16, num_padding=3),
    AttentionCase(name="window_one", context_lens=(20, 9), query_lens=(1, 4), window=1),
    AttentionCase(name="soft_cap", context_lens=(20, 33), query_lens=(1, 5), soft_cap=2.0),
    AttentionCase(name="soft_cap_decode", context_lens=(20, 33), query_lens=(1, 1), soft_cap=2.0, window=16),
    AttentionCase(name="bfloat16_decode", context_lens=(5, 16, 33), query_lens=(1, 1, 1), dtype="bfloat16"),
    AttentionCase(
        name="bfloat16_mixed", context_lens=(50, 17, 80), query_lens=(30, 1, 4), num_padding=2, dtype="bfloat16"
    ),
)
