"""Host state of one sequence, and the rules for where it ends.

A sequence that runs (5 prompt tokens, 2 outputs known to the host, one decode plan of 3 rounds in flight):

    tokens      p p p p p o o          len(tokens) = 7, known to the host
    on device   p p p p p o o ? ? ?    num_issued_tokens = 10 once all issued plans have run, if it does not end before
    keys/values x x x x x x x x x      num_kv = 9: the last token's are never written before the next round
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from jaxinfer.request import MAX_SEED, Request, SamplingParams
from jaxinfer.schedule.prefix_cache import PageChain
from jaxinfer.schedule.step_plan import TokenEvent


class Status(enum.Enum):
    """Where a sequence is. Only a running one has a slot and pages."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's choices.

    Attributes:
      seq_id: counts up in the order of submission; never used again.
      index: which choice; choice 0 is the leader that computes the prompt for its siblings.
      tokens: prompt and committed outputs.
      max_total_tokens: the sequence ends when it has this many.
      leader: choice 0, or None for choice 0 itself.
      slot: row of the device's state; only while running.
      page_ids: its page table; only while running. An int array, so that it copies into a plan's table fast.
      num_kv: positions whose keys and values exist once all issued plans have run. Kept while swapped out.
      prefill_target: positions computed in chunks; beyond them the device goes on by itself.
      num_in_flight: issued plans with a row of this sequence that are not committed.
      lost_page_ids: pages taken from it by preemption while a plan was in flight, until that is committed.
      num_prompt_logprobs: prompt positions whose log probabilities were reported (position 0 has none, and counts).
      preempted_in_step: step_id of the plan that last took its pages.
    """

    seq_id: int
    request: Request
    index: int
    params: SamplingParams
    seed: int
    tokens: list[int]
    max_total_tokens: int
    chain: PageChain
    leader: Sequence | None = None
    status: Status = Status.WAITING
    slot: int | None = None
    page_ids: array = field(default_factory=lambda: array("i"))
    num_kv: int = 0
    prefill_target: int = 0
    num_in_flight: int = 0
    is_swapped: bool = False
    lost_page_ids: tuple[int, ...] = ()
    num_preemptions: int = 0
    preempted_in_step: int | None = None
    first_scheduled_time: float | None = None
    cached_tokens: int = 0
    num_prompt_logprobs: int = 1

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: priority, then arrival."""
        return (self.params.priority, self.seq_id)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def is_prefilling(self) -> bool:
        """Whether known tokens are still to be computed."""
        return self.num_kv < self.prefill_target

    @property
    def num_rounds_left(self) -> int:
        """Decode rounds that can still be issued to a sequence past its prefill."""
        return self.max_total_tokens - 1 - self.num_kv

    @property
    def can_decode(self) -> bool:
        return not self.is_prefilling and self.num_rounds_left > 0

    @property
    def num_final_kv(self) -> int:
        """Positions whose token is final and whose keys and values exist for certain once issued plans have run.

        A token's keys and values are written by the round after it, which does not happen if it ended the sequence; so
        outcomes of decode rounds count up to the last token but one.
        """
        return max(min(self.num_kv, self.prefill_target), min(self.num_kv, len(self.tokens) - 1))


def make_sequences(request: Request, first_seq_id: int, max_total_tokens: int, page_size: int) -> list[Sequence]:
    """The request's n choices, leader first. Only the leader reports the prompt's log probabilities."""
    sequences: list[Sequence] = []
    sibling_params = replace(request.params, prompt_logprobs=None) if request.params.n > 1 else request.params
    for index in range(request.params.n):
        sequences.append(
            Sequence(
                seq_id=first_seq_id + index,
                request=request,
                index=index,
                params=sibling_params if index else request.params,
                seed=choice_seed(request.seed, index),
                tokens=list(request.prompt_token_ids),
                max_total_tokens=max_total_tokens,
                chain=PageChain(request.cache_namespace, page_size),
                leader=sequences[0] if index else None,
            )
        )
    return sequences


def choice_seed(seed: int, index: int) -> int:
    """Seed of a choice: the request's own for the first, else mixed from both so that choices differ.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), cut to 63 bits.
    """
    if index == 0:
        return seed
    mixed = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) & MAX_SEED


def append_tokens(
    seq: Sequence, token_ids: SequenceOf[int], eos_token_ids: tuple[int, ...]
) -> tuple[int, str | None, int | None]:
    """Appends tokens up to the one that ends the sequence; the device applies the same rule.

    `min_tokens` plays no part: the device does not draw end ids before it, unless a request allows it nothing else.

    Returns:
      How many were appended, the finish reason ("stop", "length" or None), and the stop id that ended it, if one did.
    """
    params = seq.params
    for count, token_id in enumerate(token_ids, start=1):
        seq.tokens.append(token_id)
        if token_id in eos_token_ids and not params.ignore_eos:
            return count, "stop", None
        if token_id in params.stop_token_ids:
            return count, "stop", token_id
        if len(seq.tokens) >= seq.max_total_tokens:
            return count, "length", None
    return len(token_ids), None, None


def make_event(seq: Sequence, finish_reason: str | None = None, **news) -> TokenEvent:
    """A `TokenEvent` of this sequence as it is now; `news` are the event's other fields."""
    return TokenEvent(
        seq_id=seq.seq_id,
        request_id=seq.request.request_id,
        index=seq.index,
        finish_reason=finish_reason,
        first_scheduled_time=seq.first_scheduled_time,
        cached_tokens=seq.cached_tokens,
        num_preemptions=seq.num_preemptions,
        **news,
    )
