"""A decoder run step by step over pages, packed by numpy: one call is one step, as the engine makes it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from oracle import Oracle

from jaxinfer.model import (
    Architecture,
    MeshRules,
    ModelParams,
    PageFormat,
    StepTokensInput,
    final_norm,
    forward,
    logits,
    pages_for_layers,
)
from pallas_kernels.ragged_paged_attention import AttentionNeeds, RaggedBatch, get_attention

PAGE_SIZE, NUM_PAGES, ROWS, TOKENS, WIDTH = 8, 40, 4, 64, 8


class PagedModel:
    """A small model over its own pages.

    Attributes:
      oracle: the same model as a plain loop, where the caller has one.
    """

    def __init__(
        self,
        arch: Architecture,
        params: ModelParams,
        rules: MeshRules,
        *,
        op: str = "xla",
        oracle: Oracle | None = None,
    ):
        self.arch, self.params, self.rules, self.oracle = arch, params, rules, oracle
        self.op = get_attention(op, AttentionNeeds(platform="cpu")).op
        self.format = PageFormat(arch, self.op, PAGE_SIZE, params.top["embedding"].get_value().dtype)
        # 35 is coprime to 39: no page twice, and neighbours in a table are never neighbours in the pool.
        self.table_RM = (1 + (35 * np.arange(ROWS * WIDTH)) % (NUM_PAGES - 1)).astype(np.int32).reshape(ROWS, WIDTH)
        self.clear()

    def clear(self) -> None:
        """Empty pages."""
        self.pages = pages_for_layers(self.format, NUM_PAGES, self.rules)

    def step(self, rows: Sequence[tuple[int, int, Sequence[int]]]) -> list[np.ndarray]:
        """Runs chunks.

        Args:
          rows: (row, first position, token ids) each, in ascending order of row.

        Returns:
          Logits [chunk, V] per chunk.
        """
        is_decode = len(rows) == ROWS and all(len(ids) == 1 for _, _, ids in rows)
        num_tokens = ROWS if is_decode else TOKENS
        token_T, position_T, page_T, offset_T = np.zeros((4, num_tokens), np.int32)
        context_len_B, query_len_B = np.zeros((2, ROWS), np.int32)
        table_BM = np.zeros((ROWS, WIDTH), np.int32)
        end, spans = 0, []
        for row, start, ids in rows:
            span = slice(end, end + len(ids))
            position = np.arange(start, start + len(ids))
            token_T[span], position_T[span] = ids, position
            page_T[span], offset_T[span] = self.table_RM[row][position // PAGE_SIZE], position % PAGE_SIZE
            context_len_B[row], query_len_B[row] = start + len(ids), len(ids)
            used = -(-(start + len(ids)) // PAGE_SIZE)
            table_BM[row, :used] = self.table_RM[row, :used]
            end += len(ids)
            spans.append(span)
        starts_R = np.concatenate([[0], np.cumsum(query_len_B)]).astype(np.int32)
        batch = RaggedBatch(table_BM, context_len_B, starts_R)
        inputs = StepTokensInput(token_T, position_T, page_T, offset_T, batch)
        run = self._run(1 if is_decode else num_tokens)
        logits_TV, self.pages = run((self.params.top, self.params.layers), self.pages, inputs)
        return [np.asarray(logits_TV)[span] for span in spans]

    @functools.cache  # noqa: B019  a test's model lives as long as the test run
    def _run(self, max_query_len: int):
        def run(arrays: Any, pages: Any, inputs: StepTokensInput):
            params = self.params._replace(top=arrays[0], layers=arrays[1])
            x_TD, pages = forward(
                params,
                self.arch,
                self.op,
                self.rules,
                pages,
                inputs,
                max_query_len=max_query_len,
                page_size=PAGE_SIZE,
            )
            return logits(params, self.rules, final_norm(params, x_TD)), pages

        # LLVM's lowest level halves the time to compile; the engine's own tests compile as usual.
        return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})
