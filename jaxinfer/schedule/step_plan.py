"""The records that pass between scheduler, step and engine: one plan goes down, one set of tokens comes back.

    Scheduler.plan() -> StepPlan -> (device) -> StepTokens -> Scheduler.commit(plan, tokens) -> list[TokenEvent]

Plans are executed in the order they were made. One plan may be in flight while the next is made, so a plan never
depends on tokens the host has not seen: a decode row names only its slot, and the device knows the slot's last token
and position.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxinfer.request import SamplingParams

NULL_PAGE = 0


@dataclass(frozen=True)
class Admission:
    """State to write into a slot before the step runs: a sequence joins, or comes back after preemption.

    Attributes:
      slot: row of the device's state.
      seq_id: the sequence.
      token_ids: every token known so far, prompt and outputs.
      num_prompt_tokens: how many of them are the prompt.
      max_total_tokens: prompt plus most outputs; the device freezes the slot there.
      params: sampling parameters.
      seed: in [0, 2**63), of this sequence's draws.
      bad_word_ids: token sequences that may not be produced.
    """

    slot: int
    seq_id: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    max_total_tokens: int
    params: SamplingParams
    seed: int
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class PlannedRow:
    """One row of the ragged batch.

    Attributes:
      seq_id, slot: whose row it is.
      start: first position computed, or None for a decode row (the device knows it).
      num_tokens: query tokens in this step: the chunk's length; 1 for a decode row.
      samples: whether a token comes out: decode rows, and the chunk that reaches the last known token.
      prompt_logprobs: whether the log probabilities of the chunk's tokens are to be reported.
    """

    seq_id: int
    slot: int
    start: int | None
    num_tokens: int
    samples: bool
    prompt_logprobs: bool = False


@dataclass(frozen=True)
class SwapOut:
    """Copy these pages to host memory under this sequence's name, before anything else in the plan."""

    seq_id: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True)
class SwapIn:
    """Copy the sequence's pages back from host memory into these pages (same order), after swap-outs and scrubs."""

    seq_id: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """Host description of one step. Order on the device: swap_outs, scrubs, swap_ins, admissions, then the rows.

    Attributes:
      step_id: counts up from 0.
      kind: "mixed" (some row is a prefill chunk; every row one pass) or "decode" (all rows decode, `num_rounds`
        rounds).
      rows: never empty, unless only swaps or scrubs are to be done.
      page_table: int32 [len(rows), table width]; unused entries are NULL_PAGE. A fresh array per plan, never written
        again.
      num_rounds: tokens per row at most; 1 in a mixed step.
      scrub_page_ids: pages to fill with zeros: they may hold non-finite values.
    """

    step_id: int
    kind: str
    rows: tuple[PlannedRow, ...]
    page_table: np.ndarray
    num_rounds: int = 1
    admissions: tuple[Admission, ...] = ()
    swap_outs: tuple[SwapOut, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    scrub_page_ids: tuple[int, ...] = ()

    @property
    def num_query_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at one position, as read back from the device.

    Attributes:
      logprob, rank: of the token itself.
      top_ids, top_logprobs: the likeliest tokens, best first; as many as were asked for.
    """

    logprob: float
    rank: int
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class RowTokens:
    """What one row brought back.

    Attributes:
      token_ids: the tokens sampled, 0 to num_rounds of them; a row whose slot was already frozen brings none.
      logprobs: one per token, or empty when the request did not ask.
      prompt_logprobs: of the chunk's positions start+1 .. start+num_tokens (the token at position p is scored by the
        model's output at p-1; the last entry of a prompt's final chunk has no token and is left out), or empty.
      is_bad: the logits were not finite; the tokens mean nothing.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    is_bad: bool = False


@dataclass(frozen=True)
class StepTokens:
    """The result of one plan, a `RowTokens` per row in the plan's order."""

    rows: tuple[RowTokens, ...]


@dataclass(frozen=True)
class TokenEvent:
    """News of one sequence after a commit.

    Attributes:
      index: which of the request's n choices.
      token_ids: new output tokens, the one that ends the sequence included; none past it.
      logprobs, prompt_logprobs: as in `RowTokens`, cut in the same way.
      finish_reason: None, "stop" (end of sequence or stop id), "length", "timeout" (deadline) or "error" (non-finite
        logits).
      stop_token_id: the id of `stop_token_ids` that ended it, or None.
      first_scheduled_time: seconds on the scheduler's clock, or None when it was never scheduled.
      cached_tokens: prompt tokens read from the prefix cache when it was first admitted.
      num_preemptions: so far.
    """

    seq_id: int
    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stop_token_id: int | None = None
    first_scheduled_time: float | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class SchedulerStats:
    """Counts since start, and gauges of now. Pages exclude the null page.

    Attributes:
      prefix_cache_queries, prefix_cache_hits: prompt tokens looked up, and found, in the prefix cache.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    num_pages_cached: int = 0
    peak_pages_used: int = 0
    num_preemptions: int = 0
    num_swap_outs: int = 0
    num_evictions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    finished: dict[str, int] = field(default_factory=dict)
