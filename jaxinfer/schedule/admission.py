"""Letting waiting sequences in: strictly by priority then arrival, each only when its known tokens fit the pool.

Two kinds are passed over rather than waited for: siblings whose leader is still computing the prompt they will share,
and preempted sequences whose last plan is not committed (their newest tokens are not known yet).
"""

from __future__ import annotations

from jaxinfer.schedule.draft import Draft
from jaxinfer.schedule.sequence import Sequence, Status
from jaxinfer.schedule.state import MAX_PREEMPTIONS, SchedulerState
from jaxinfer.schedule.step_plan import SwapIn

WATERMARK_RATIO = 0.01  # of the pool, left free at admission so that the next decode pages need no preemption


def admit_waiting(state: SchedulerState, draft: Draft) -> None:
    """Admits from the head of the queue while slots, token budget and pages last."""
    passed_over: list[Sequence] = []
    while state.free_slots and draft.budget_left > 0:
        seq = state.waiting.pop()
        if seq is None:
            break
        if _is_blocked(seq, draft):
            passed_over.append(seq)
        elif not (_resume(state, draft, seq) if seq.is_swapped else _begin(state, draft, seq)):
            passed_over.append(seq)
            break
    for seq in passed_over:
        state.waiting.push(seq)


def _is_blocked(seq: Sequence, draft: Draft) -> bool:
    if seq.num_in_flight or (seq.is_swapped and seq.preempted_in_step == draft.step_id):
        return True
    leader = seq.leader
    if leader is None or leader.status is Status.FINISHED or leader.num_preemptions:
        return False
    return leader.num_kv < leader.num_prompt_tokens  # counts issued plans only: this one's chunks are not in it yet


def _begin(state: SchedulerState, draft: Draft, seq: Sequence) -> bool:
    """Starts, or starts again, a sequence with nothing computed but what it can share."""
    pool = state.pool
    from_cache = _look_up(state, seq)
    shared = _leader_pages(state, seq)
    if len(from_cache) >= len(shared):
        shared = from_cache
    if not _fits(state, seq, len(seq.tokens), shared):
        return False
    _count_look_up(state, seq, len(shared) * pool.page_size if shared is from_cache else 0)
    pool.share(shared)
    state.start(seq)
    seq.page_ids.extend(shared)
    seq.num_kv = len(shared) * pool.page_size
    seq.prefill_target = len(seq.tokens)
    _take_first_chunk(state, draft, seq)
    return True


def _resume(state: SchedulerState, draft: Draft, seq: Sequence) -> bool:
    """Brings a swapped sequence back where it was: at its next chunk, or its next decode round."""
    num_swapped = state.swap.num_pages(seq.seq_id)
    if not _fits(state, seq, len(seq.tokens), []):
        return False
    state.start(seq)
    assert state.extend_pages(seq, num_swapped * state.pool.page_size)
    state.swap.release(seq.seq_id)
    seq.is_swapped = False
    draft.swap_ins.append(SwapIn(seq.seq_id, tuple(seq.page_ids)))
    if seq.num_kv >= len(seq.tokens) - 1 and seq.num_kv >= seq.prefill_target:
        seq.prefill_target = seq.num_kv
        assert state.extend_pages(seq, _num_positions(seq, seq.num_kv + 1))
        draft.admit(seq)
        draft.decodes[seq.seq_id] = seq
    else:
        seq.prefill_target = len(seq.tokens)
        _take_first_chunk(state, draft, seq)
    return True


def _take_first_chunk(state: SchedulerState, draft: Draft, seq: Sequence) -> None:
    count = min(draft.budget_left, seq.prefill_target - seq.num_kv)
    assert state.extend_pages(seq, _num_positions(seq, seq.num_kv + count))
    draft.admit(seq)
    draft.chunks[seq.seq_id] = (seq, count)


def _num_positions(seq: Sequence, num_positions: int) -> int:
    """Positions to hold from the start: all it can ever need for a sequence that may not be preempted again."""
    return seq.max_total_tokens - 1 if seq.num_preemptions >= MAX_PREEMPTIONS else num_positions


def _fits(state: SchedulerState, seq: Sequence, num_positions: int, shared: list[int]) -> bool:
    """Whether the pool can hold the sequence beside what running prefills still need, and a small watermark."""
    pool = state.pool
    num_idle_shared = sum(pool.num_owners(page_id) == 0 for page_id in shared)
    needed = pool.pages_for(_num_positions(seq, num_positions)) - len(shared)
    if state.running:
        needed += max(1, int(WATERMARK_RATIO * pool.num_pages))
        needed += sum(state.num_missing_pages(other, other.prefill_target) for other in state.running.values())
    return needed <= pool.num_available - num_idle_shared


def _look_up(state: SchedulerState, seq: Sequence) -> list[int]:
    """Cached pages of the sequence's beginning; never all of its tokens, since the last one's output is wanted."""
    if not _may_look_up(state, seq):
        return []
    num_pages = (len(seq.tokens) - 1) // state.pool.page_size
    seq.chain.extend(seq.tokens, num_pages)
    return state.pool.match(seq.chain, num_pages)


def _may_look_up(state: SchedulerState, seq: Sequence) -> bool:
    return state.pool.is_caching and seq.params.prompt_logprobs is None


def _count_look_up(state: SchedulerState, seq: Sequence, num_found: int) -> None:
    if seq.first_scheduled_time is None and _may_look_up(state, seq):
        seq.cached_tokens = num_found
        state.totals.prefix_cache_queries += seq.num_prompt_tokens
        state.totals.prefix_cache_hits += num_found


def _leader_pages(state: SchedulerState, seq: Sequence) -> list[int]:
    """Full pages of the prompt that the running leader holds and has computed."""
    leader = seq.leader
    if leader is None or leader.status is not Status.RUNNING:
        return []
    num_positions = min(leader.num_kv, seq.num_prompt_tokens, len(seq.tokens) - 1)
    return list(leader.page_ids[: num_positions // state.pool.page_size])
