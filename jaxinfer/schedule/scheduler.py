"""The scheduler: requests go in, plans come out, tokens go in, news come out.

    submit ─► waiting ─ plan ─► running ─ commit ─► finished
                  ▲──── preemption ────┘   finish, expire: from anywhere

Three verbs drive it: `plan` decides a step, `commit` takes its tokens, `finish` ends a sequence from outside. Plan n+1
may be made before plan n is committed, so plans rest on what the device will have done, not on tokens seen. Plans are
committed in order, each exactly once. One thread only.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from jaxinfer.errors import PromptTooLong, QueueFull
from jaxinfer.request import Request
from jaxinfer.schedule.audit import audit
from jaxinfer.schedule.page_pool import PagePool
from jaxinfer.schedule.planning import draft_plan
from jaxinfer.schedule.preemption import is_preemptable
from jaxinfer.schedule.sequence import Sequence, Status, append_tokens, make_event, make_sequences
from jaxinfer.schedule.state import Limits, SchedulerState
from jaxinfer.schedule.step_plan import PlannedRow, RowTokens, SchedulerStats, StepPlan, StepTokens, TokenEvent
from jaxinfer.schedule.swap_space import SwapSpace


class Scheduler:
    """Decides which sequence computes which tokens in which pages.

    Attributes:
      limits: the sizes it works with; `limits.table_width` is the width of every plan's page table.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: tuple[int, ...],
        rounds_per_dispatch: int = 8,
        enable_prefix_caching: bool = True,
        eviction_policy: str = "lru",
        preemption_mode: str = "recompute",
        swap_capacity_pages: int = 0,
        max_queued_requests: int = 1_000_000,
        max_queued_tokens: int = 1_000_000_000,
        clock: Callable[[], float] = time.monotonic,
        token_buckets: tuple[int, ...] | None = None,
    ):
        """Takes `num_pages` with the null page counted; other sizes as in `CacheConfig` and `SchedulerConfig`."""
        pool = PagePool(num_pages, page_size, policy=eviction_policy, is_caching=enable_prefix_caching)
        self.limits = Limits(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_total_tokens=min(max_model_len, pool.num_pages * page_size + 1),  # the last token takes no position
            max_queued_requests=max_queued_requests,
            max_queued_tokens=max_queued_tokens,
            table_width=pool.pages_for(max_model_len),
            eos_token_ids=eos_token_ids,
            rounds_per_dispatch=rounds_per_dispatch,
            is_swapping=preemption_mode == "swap",
            token_buckets=tuple(token_buckets or ()),
        )
        self._state = SchedulerState(self.limits, pool, SwapSpace(swap_capacity_pages), clock)
        self._in_flight: deque[StepPlan] = deque()
        self._deadlines: list[tuple[float, int]] = []
        self._to_preempt: set[int] = set()
        self._ended: dict[int, str] = {}  # ended by their own tokens in the last commit; settled at the next call
        self._next_seq_id = 0
        self._next_step_id = 0

    def submit(self, request: Request) -> list[int]:
        """Queues a request; returns the sequence ids of its choices, in order.

        Raises:
          PromptTooLong: it could never run.
          QueueFull: too many wait already.
        """
        self._settle()
        self._check_fits(request)
        self._check_queue(request)
        max_tokens = request.params.max_tokens
        max_total_tokens = self.limits.max_total_tokens
        if max_tokens is not None:
            max_total_tokens = min(max_total_tokens, len(request.prompt_token_ids) + max_tokens)
        pool = self._state.pool
        sequences = make_sequences(request, self._next_seq_id, max_total_tokens, pool.page_size)
        self._next_seq_id += len(sequences)
        for seq in sequences:
            self._state.sequences[seq.seq_id] = seq
            self._state.waiting.push(seq)
            if request.params.deadline_s is not None:
                self._add_deadline(request.arrival_time + request.params.deadline_s, seq.seq_id)
        return [seq.seq_id for seq in sequences]

    def plan(self) -> StepPlan | None:
        """Decides the next step, or returns None when nothing can be issued now."""
        self._settle()
        draft = draft_plan(self._state, self._next_step_id, self._to_preempt)
        used = self._state.pool.count().used
        self._state.totals.peak_pages_used = max(self._state.totals.peak_pages_used, used)
        if draft.is_empty:
            assert self._in_flight or not self._state.sequences, "sequences wait and nothing can ever run"
            return None
        plan = draft.freeze(self._state)
        self._next_step_id += 1
        self._in_flight.append(plan)
        return plan

    def commit(self, plan: StepPlan, tokens: StepTokens) -> list[TokenEvent]:
        """Takes the tokens of the oldest uncommitted plan. Rows of sequences that have ended meanwhile are ignored."""
        assert self._in_flight, "no plan is in flight"
        assert self._in_flight[0] is plan, f"plan {plan.step_id} is not the one to commit next"
        assert len(tokens.rows) == len(plan.rows), f"{len(tokens.rows)} results for {len(plan.rows)} rows"
        self._in_flight.popleft()
        events: list[TokenEvent] = []
        for row, result in zip(plan.rows, tokens.rows, strict=True):
            seq = self._state.sequences.get(row.seq_id)
            if seq is None:
                continue
            seq.num_in_flight -= 1
            event = self._take_result(seq, row, result, plan.num_rounds)
            if event is not None:
                events.append(event)
            if not seq.num_in_flight:
                seq.lost_page_ids = ()
        return events

    def finish(self, seq_id: int, reason: str, num_output_tokens: int | None = None) -> None:
        """Ends a sequence from outside: stop string, abort, error. Ended and unknown ids are ignored.

        Args:
          reason: counted in `SchedulerStats.finished`; "error" also drops and scrubs what the sequence computed.
          num_output_tokens: output tokens that stay (a stop string's own may not); no later one gets into the cache.
        """
        self._ended.pop(seq_id, None)
        seq = self._state.sequences.get(seq_id)
        if seq is not None:
            self._end(seq, reason, num_output_tokens)

    def expire(self, now: float) -> list[TokenEvent]:
        """Ends the sequences, waiting or running, whose deadline has passed."""
        self._settle()
        events: list[TokenEvent] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            seq = self._state.sequences.get(heapq.heappop(self._deadlines)[1])
            if seq is not None:
                self._end(seq, "timeout")
                events.append(make_event(seq, "timeout"))
        return events

    def has_work(self) -> bool:
        """Whether a sequence is unfinished or a plan is uncommitted."""
        self._settle()
        return bool(self._state.sequences or self._in_flight)

    def is_live(self, seq_id: int) -> bool:
        """Whether the sequence has not ended."""
        return seq_id in self._state.sequences and seq_id not in self._ended

    def stats(self) -> SchedulerStats:
        """Counts and gauges of now; a copy."""
        self._settle()
        state = self._state
        counts = state.pool.count()
        return replace(
            state.totals,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_pages=state.pool.num_pages,
            num_pages_used=counts.used,
            num_pages_cached=counts.cached,
            num_evictions=state.pool.num_evictions,
            finished=dict(state.totals.finished),
        )

    def audit(self) -> None:
        """Asserts that no page, slot or swap room is lost, held twice, or counted wrong."""
        self._settle()
        audit(self._state)

    def force_preempt(self, seq_id: int) -> bool:
        """Preempts a running sequence at the next plan, for tests; False when it does not run or may not be."""
        self._settle()
        seq = self._state.running.get(seq_id)
        if seq is None or not is_preemptable(seq):
            return False
        self._to_preempt.add(seq_id)
        return True

    def _check_fits(self, request: Request) -> None:
        num_tokens = len(request.prompt_token_ids)
        pool = self._state.pool
        if num_tokens >= self.limits.max_model_len:
            raise PromptTooLong(
                f"prompt has {num_tokens} tokens; max_model_len is {self.limits.max_model_len}, prompt and answer "
                "together; shorten the prompt or raise max_model_len"
            )
        if pool.pages_for(num_tokens) > pool.num_pages:
            raise PromptTooLong(
                f"prompt has {num_tokens} tokens and needs {pool.pages_for(num_tokens)} pages; the whole pool has "
                f"{pool.num_pages}; shorten the prompt or give the cache more memory"
            )

    def _check_queue(self, request: Request) -> None:
        waiting = self._state.waiting
        if waiting.num_requests >= self.limits.max_queued_requests:
            raise QueueFull(
                f"{waiting.num_requests} requests wait; at most {self.limits.max_queued_requests} may; try again later"
            )
        num_tokens = len(request.prompt_token_ids)
        if waiting.num_prompt_tokens + num_tokens > self.limits.max_queued_tokens:
            raise QueueFull(
                f"{waiting.num_prompt_tokens} prompt tokens wait and this prompt has {num_tokens}; "
                f"at most {self.limits.max_queued_tokens} may; try again later"
            )

    def _add_deadline(self, deadline: float, seq_id: int) -> None:
        heapq.heappush(self._deadlines, (deadline, seq_id))
        if len(self._deadlines) > 64 + 2 * len(self._state.sequences):
            self._deadlines = [item for item in self._deadlines if item[1] in self._state.sequences]
            heapq.heapify(self._deadlines)

    def _take_result(self, seq: Sequence, row: PlannedRow, result: RowTokens, num_rounds: int) -> TokenEvent | None:
        """Applies one row's result to its sequence; None when there is nothing to tell."""
        if result.is_bad:
            self._end(seq, "error")
            return make_event(seq, "error")
        wanted = min(num_rounds, seq.max_total_tokens - len(seq.tokens)) if row.samples else 0
        scored = _new_prompt_logprobs(seq, row, result)
        count, reason, stop_id = append_tokens(seq, result.token_ids[:wanted], self.limits.eos_token_ids)
        assert reason or count == wanted, f"sequence {seq.seq_id} brought {len(result.token_ids)} tokens, not {wanted}"
        if reason is not None:
            self._ended[seq.seq_id] = reason
        if not (count or scored):
            return None
        return make_event(
            seq,
            reason,
            token_ids=tuple(result.token_ids[:count]),
            logprobs=tuple(result.logprobs[:count]),
            prompt_logprobs=scored,
            stop_token_id=stop_id,
        )

    def _settle(self) -> None:
        """Ends what ended by its own tokens. Not at once in `commit`: a stop string in those tokens may cut them."""
        ended, self._ended = self._ended, {}
        for seq_id, reason in ended.items():
            self._end(self._state.sequences[seq_id], reason)

    def _end(self, seq: Sequence, reason: str, num_output_tokens: int | None = None) -> None:
        """Takes everything from a sequence and forgets it."""
        state = self._state
        num_kept = len(seq.tokens)
        if num_output_tokens is not None:
            num_kept = min(num_kept, seq.num_prompt_tokens + num_output_tokens)
        if reason == "error":
            state.condemn(seq)
        else:
            num_pages = num_kept // state.pool.page_size
            if seq.chain.num_published > num_pages:
                state.pool.withdraw(seq.chain, num_pages)  # published at a preemption, and cut off now
            if seq.status is Status.RUNNING:
                state.publish(seq, min(num_kept, seq.num_final_kv))
                state.stop(seq, Status.FINISHED)
        state.waiting.remove(seq)
        state.swap.release(seq.seq_id)
        seq.status = Status.FINISHED
        del state.sequences[seq.seq_id]
        state.totals.finished[reason] = state.totals.finished.get(reason, 0) + 1


def _new_prompt_logprobs(seq: Sequence, row: PlannedRow, result: RowTokens) -> tuple:
    """The row's prompt log probabilities that were not reported before: a preempted prompt is computed again."""
    if not row.prompt_logprobs or row.start is None:
        return ()
    first = max(seq.num_prompt_logprobs, row.start + 1)
    end = min(seq.num_prompt_tokens, row.start + row.num_tokens + 1)
    scored = tuple(result.prompt_logprobs[first - row.start - 1 : max(first, end) - row.start - 1])
    seq.num_prompt_logprobs = max(seq.num_prompt_logprobs, end)
    return scored
