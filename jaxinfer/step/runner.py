"""Runs plans: sends them to the device without waiting, and reads their tokens when asked.

pending = runner.submit(plan)      # returns at once; the device works through submitted plans in order
tokens = runner.collect(pending)   # waits for that plan's tokens
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.request import SamplingParams
from jaxinfer.schedule.step_plan import RowTokens, StepPlan, StepTokens
from jaxinfer.step.batch import pack_admissions, pack_decode, pack_mixed, unpack_row
from jaxinfer.step.compiled import COPY_PAGES, MAX_ADMISSIONS, Programs
from jaxinfer.step.programs import DecodeNews
from jaxinfer.step.slot_state import SlotState


@dataclass
class PendingStep:
    """A plan on its way.

    Attributes:
      news: the program's result, not yet read; None for a plan without rows.
      prompt_words: int32 [T, LOGPROB_WORDS] on the device, or None.
      first_token_T: per row, index of its first query token (for `prompt_words`).
      params: sampling parameters of each row's sequence.
    """

    plan: StepPlan
    news: DecodeNews | None = None
    prompt_words: jax.Array | None = None
    first_token: tuple[int, ...] = ()
    params: tuple[SamplingParams | None, ...] = ()


@dataclass
class RunnerStats:
    """Seconds and counts since start.

    Attributes:
      wait_seconds: time spent waiting for the device.
      num_steps, num_rounds: plans run, and rounds asked for.
      query_tokens, padded_tokens: query tokens computed in mixed steps, with and without padding.
    """

    wait_seconds: float = 0.0
    num_steps: int = 0
    num_rounds: int = 0
    query_tokens: int = 0
    padded_tokens: int = 0


class Runner:
    """Owns what lives on the device: parameters, pages, slots, and the pages swapped to host memory.

    Attributes:
      stats: see `RunnerStats`.
    """

    def __init__(
        self,
        programs: Programs,
        leaves: Any,
        pages: Any,
        state: SlotState,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ):
        self.stats = RunnerStats()
        self._programs = programs
        self._sizes = programs.sizes
        self._leaves = leaves
        self._pages = pages
        self._state = state
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._params: dict[int, SamplingParams] = {}
        self._swapped: dict[int, list[Any]] = {}

    def submit(self, plan: StepPlan) -> PendingStep:
        """Issues a plan; returns before the device has run it."""
        with self._programs.counting():
            return self._submit(plan)

    def _submit(self, plan: StepPlan) -> PendingStep:
        for swap in plan.swap_outs:
            self._swapped[swap.seq_id] = self._copy_out(swap.page_ids)
        self._scrub(plan.scrub_page_ids)
        for swap in plan.swap_ins:
            self._copy_in(swap.page_ids, self._swapped.pop(swap.seq_id))
        self._admit(plan)
        pending = PendingStep(plan, params=tuple(self._params.get(row.slot) for row in plan.rows))
        if plan.rows and plan.kind == "decode":
            self._submit_decode(pending)
        elif plan.rows:
            self._submit_mixed(pending)
        self.stats.num_steps += 1
        self.stats.num_rounds += plan.num_rounds
        return pending

    def collect(self, pending: PendingStep) -> StepTokens:
        """Waits for a plan's tokens and reads them."""
        start = time.perf_counter()
        for swap in pending.plan.swap_outs:
            if swap.seq_id in self._swapped:
                self._swapped[swap.seq_id] = [jax.tree.map(np.asarray, part) for part in self._swapped[swap.seq_id]]
        if pending.news is None:
            return StepTokens(())
        tokens_BX = np.asarray(pending.news.tokens_BX)
        asked = [p.logprobs if p else None for p in pending.params]
        logprobs_BRW = np.asarray(pending.news.logprobs_BRW) if any(n is not None for n in asked) else None
        prompt_TW = None if pending.prompt_words is None else np.asarray(pending.prompt_words)
        self.stats.wait_seconds += time.perf_counter() - start
        rows: list[RowTokens] = []
        for b, row in enumerate(pending.plan.rows):
            params = pending.params[b]
            first = pending.first_token[b] if pending.first_token else 0
            scores = prompt_TW is not None and row.prompt_logprobs
            rows.append(
                unpack_row(
                    row,
                    tokens_BX[b],
                    None if logprobs_BRW is None else logprobs_BRW[b],
                    prompt_TW[first : first + row.num_tokens] if scores and prompt_TW is not None else None,
                    asked[b],
                    params.prompt_logprobs if params else None,
                )
            )
        return StepTokens(tuple(rows))

    def forget_swapped(self, is_live: Callable[[int], bool]) -> None:
        """Drops host copies of sequences that have ended."""
        for seq_id in [s for s in self._swapped if not is_live(s)]:
            del self._swapped[seq_id]

    @property
    def num_swapped(self) -> int:
        """Sequences whose pages are in host memory."""
        return len(self._swapped)

    def poison_pages(self, page_ids: tuple[int, ...], value: float) -> None:
        """Overwrites pages with a value (integers, whose scales get it, with 1): faults for tests of the NaN guard."""

        def filled(a: jax.Array) -> np.ndarray:
            return np.full((COPY_PAGES, *a.shape[1:]), 1 if jnp.issubdtype(a.dtype, jnp.integer) else value, a.dtype)

        values = jax.tree.map(filled, self._pages)
        for chunk in _chunks(page_ids, self._sizes.num_pages):
            self._pages = self._programs.get(("copy_in",))(self._pages, self._put(chunk), self._put_like_pages(values))

    def _submit_decode(self, pending: PendingStep) -> None:
        plan = pending.plan
        num_rows = _bucket(self._sizes.row_buckets, len(plan.rows))
        packed = self._put(pack_decode(plan, num_rows, self._sizes.num_slots))
        rounds = self._put(np.int32(plan.num_rounds))
        program = self._programs.get(("decode", num_rows))
        self._pages, self._state, pending.news = program(self._leaves, self._pages, self._state, packed, rounds)

    def _submit_mixed(self, pending: PendingStep) -> None:
        plan = pending.plan
        num_tokens = _bucket(self._sizes.token_buckets, plan.num_query_tokens)
        packed = self._put(pack_mixed(plan, self._sizes.mixed_rows(num_tokens), self._sizes.num_slots))
        program = self._programs.get(("mixed", num_tokens))
        self._pages, self._state, pending.news, hidden = program(self._leaves, self._pages, self._state, packed)
        self.stats.query_tokens += plan.num_query_tokens
        self.stats.padded_tokens += num_tokens
        if any(row.prompt_logprobs for row in plan.rows):
            count = self._put(np.int32(plan.num_query_tokens))
            pending.prompt_words = self._programs.get(("score",))(self._leaves, hidden, count)
            ends = np.cumsum([row.num_tokens for row in plan.rows])
            pending.first_token = tuple(int(end) - row.num_tokens for end, row in zip(ends, plan.rows, strict=True))

    def _admit(self, plan: StepPlan) -> None:
        for i in range(0, len(plan.admissions), MAX_ADMISSIONS):
            part = plan.admissions[i : i + MAX_ADMISSIONS]
            packed = pack_admissions(
                part,
                MAX_ADMISSIONS,
                num_slots=self._sizes.num_slots,
                max_model_len=self._sizes.max_model_len,
                vocab_size=self._vocab_size,
                eos_token_ids=self._eos_token_ids,
            )
            self._state = self._programs.get(("admit",))(self._state, self._put(packed))
            self._params.update({a.slot: a.params for a in part})

    def _scrub(self, page_ids: tuple[int, ...]) -> None:
        for chunk in _chunks(page_ids, self._sizes.num_pages):
            self._pages = self._programs.get(("scrub",))(self._pages, self._put(chunk))

    def _copy_out(self, page_ids: tuple[int, ...]) -> list[Any]:
        # Still on the device when this returns; `collect` pulls the copies once the next program is queued behind them.
        return [
            self._programs.get(("copy_out",))(self._pages, self._put(c))
            for c in _chunks(page_ids, self._sizes.num_pages)
        ]

    def _copy_in(self, page_ids: tuple[int, ...], parts: list[Any]) -> None:
        for chunk, values in zip(_chunks(page_ids, self._sizes.num_pages), parts, strict=True):
            self._pages = self._programs.get(("copy_in",))(self._pages, self._put(chunk), self._put_like_pages(values))

    def _put(self, value: np.ndarray | np.int32):
        return jax.device_put(value, self._programs.replicated)

    def _put_like_pages(self, values):
        return jax.tree.map(lambda v, a: jax.device_put(v, a.sharding), values, self._pages)


def _bucket(sizes: tuple[int, ...], need: int) -> int:
    return sizes[bisect.bisect_left(sizes, need)]


def _chunks(page_ids: tuple[int, ...], num_pages: int) -> list[np.ndarray]:
    """Fixed-size runs of page ids; unused entries are `num_pages`, which programs ignore."""
    chunks = []
    for i in range(0, len(page_ids), COPY_PAGES):
        chunk = np.full(COPY_PAGES, num_pages, np.int32)
        part = page_ids[i : i + COPY_PAGES]
        chunk[: len(part)] = part
        chunks.append(chunk)
    return chunks
