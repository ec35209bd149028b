"""The policy of one plan: decodes first, then prefill chunks, then newcomers; pages are reserved as each is let in."""

from __future__ import annotations

from bisect import bisect_right

from jaxinfer.schedule.admission import admit_waiting
from jaxinfer.schedule.draft import Draft
from jaxinfer.schedule.preemption import choose_victim, is_preemptable, preempt
from jaxinfer.schedule.sequence import Sequence
from jaxinfer.schedule.state import SchedulerState

TRIM_RATIO = (
    4  # a chunk is cut to a smaller bucket when that holds back less than this part of what padding would waste
)


def draft_plan(state: SchedulerState, step_id: int, forced: set[int]) -> Draft:
    """Decides everything about the next plan.

    Args:
      forced: ids of sequences to preempt for a test; cleared.
    """
    for seq in state.running.values():
        state.publish(seq, min(seq.num_kv, seq.prefill_target))
    draft = Draft(step_id, state.limits.max_num_batched_tokens)
    for seq_id in sorted(forced):
        seq = state.running.get(seq_id)
        if seq is not None and is_preemptable(seq):
            preempt(state, draft, seq)
    forced.clear()
    _take_decodes(state, draft)
    _continue_prefills(state, draft)
    if not draft.was_short:
        admit_waiting(state, draft)
    if draft.chunks:
        _trim_to_bucket(draft, state.limits.token_buckets)
    elif draft.decodes:
        _extend_rounds(state, draft)
    return draft


def _take_decodes(state: SchedulerState, draft: Draft) -> None:
    """One round for every sequence past its prefill, preempting from the end of the order when pages are short."""
    for seq in state.in_order():
        if seq.seq_id in state.running and seq.can_decode and _make_room(state, draft, seq):
            draft.decodes[seq.seq_id] = seq


def _make_room(state: SchedulerState, draft: Draft, seq: Sequence) -> bool:
    """Gets the pages of one decode round; False when the sequence itself had to give way."""
    while not state.extend_pages(seq, seq.num_kv + 1):
        victim = choose_victim(state)
        assert victim is not None, "a sequence that may not be preempted holds all its pages from the start"
        draft.was_short = True
        preempt(state, draft, victim)
        if victim is seq:
            return False
    return True


def _continue_prefills(state: SchedulerState, draft: Draft) -> None:
    """The next chunk of every sequence in prefill, as far as the token budget and pages go."""
    for seq in state.in_order():
        if draft.budget_left <= 0:
            return
        if seq.seq_id not in state.running or not seq.is_prefilling:
            continue
        count = min(draft.budget_left, seq.prefill_target - seq.num_kv)
        while (room := _room(state, seq)) == 0:
            victim = choose_victim(state)
            if victim is None or victim is seq:
                break  # those before it go on; it keeps what it has until they need it
            draft.was_short = True
            preempt(state, draft, victim)
        count = min(count, room)
        if count > 0:
            assert state.extend_pages(seq, seq.num_kv + count)
            draft.chunks[seq.seq_id] = (seq, count)


def _room(state: SchedulerState, seq: Sequence) -> int:
    """Tokens a sequence could compute in the pages it has and could get."""
    return (len(seq.page_ids) + state.pool.num_available) * state.pool.page_size - seq.num_kv


def _trim_to_bucket(draft: Draft, buckets: tuple[int, ...]) -> None:
    """Cuts the last chunk when a few tokens too many would have the device pad to the next bucket."""
    total = draft.num_query_tokens
    index = bisect_right(buckets, total)
    if index in (0, len(buckets)):
        return
    excess = total - buckets[index - 1]
    seq, count = next(reversed(draft.chunks.values()))
    if 0 < excess < count and excess * TRIM_RATIO <= buckets[index] - buckets[index - 1]:
        draft.chunks[seq.seq_id] = (seq, count - excess)


def _extend_rounds(state: SchedulerState, draft: Draft) -> None:
    """As many rounds as are wanted and pages allow; evicts cached pages for it, but preempts nobody."""
    rows = draft.decodes.values()
    left = [seq.num_rounds_left for seq in rows]
    num_rounds = min(state.limits.rounds_per_dispatch, max(left))
    if state.waiting or any(seq.is_prefilling for seq in state.running.values()):
        num_rounds = min(num_rounds, min(left))  # someone waits for what the first to end leaves behind
    while num_rounds > 1 and _pages_for_rounds(state, draft, num_rounds) > state.pool.num_available:
        num_rounds -= 1
    for seq in rows:
        assert state.extend_pages(seq, seq.num_kv + min(num_rounds, seq.num_rounds_left))
    draft.num_rounds = num_rounds


def _pages_for_rounds(state: SchedulerState, draft: Draft, num_rounds: int) -> int:
    return sum(
        state.num_missing_pages(seq, seq.num_kv + min(num_rounds, seq.num_rounds_left))
        for seq in draft.decodes.values()
    )
