"""Conservation of pages, slots and swap room, as assertions: for tests and soak runs. Changes nothing."""

from __future__ import annotations

from collections import Counter

from jaxinfer.schedule.sequence import Status
from jaxinfer.schedule.state import MAX_PREEMPTIONS, SchedulerState


def audit(state: SchedulerState) -> None:
    """Asserts every invariant of the scheduler's state."""
    state.pool.audit()
    state.swap.audit()
    _audit_pages(state)
    _audit_sequences(state)


def _audit_pages(state: SchedulerState) -> None:
    """Owner counts are the sequences'; a page two sequences hold is the same full page of the same tokens in both."""
    owners = Counter(page_id for seq in state.running.values() for page_id in seq.page_ids)
    assert len(owners) == state.pool.count().used, f"{len(owners)} pages held, {state.pool.count().used} counted"
    for page_id, count in owners.items():
        assert count == state.pool.num_owners(page_id), f"page {page_id} has {count} owners"
    places: dict[int, tuple[int, list[int]]] = {}
    for seq in state.running.values():
        assert len(set(seq.page_ids)) == len(seq.page_ids), f"sequence {seq.seq_id} holds a page twice"
        for index, page_id in enumerate(seq.page_ids):
            if owners[page_id] > 1:
                end = (index + 1) * state.pool.page_size
                place = (index, seq.tokens[:end])
                assert len(place[1]) == end, f"page {page_id} is shared and not full"
                assert places.setdefault(page_id, place) == place, f"page {page_id} is in two unrelated places"


def _audit_sequences(state: SchedulerState) -> None:
    """Every sequence is in the one place that its status says."""
    slots = [seq.slot for seq in state.running.values() if seq.slot is not None]
    assert sorted([*slots, *state.free_slots]) == list(range(state.limits.max_num_seqs)), "a slot is lost or held twice"
    waiting = {seq.seq_id: seq for seq in state.waiting}
    assert waiting.keys() | state.running.keys() == state.sequences.keys(), "a sequence is nowhere"
    assert not waiting.keys() & state.running.keys(), "a sequence runs and waits"
    assert all(seq.status is Status.RUNNING for seq in state.running.values()), "a running sequence has another status"
    assert state.swap.seq_ids() == {seq_id for seq_id, seq in waiting.items() if seq.is_swapped}, "swap room is lost"
    for seq in waiting.values():
        assert seq.status is Status.WAITING, f"sequence {seq.seq_id} waits and is {seq.status}"
        assert seq.slot is None, f"sequence {seq.seq_id} waits and has a slot"
        assert not seq.page_ids, f"sequence {seq.seq_id} waits and holds pages"
    for seq in state.running.values():
        needed = state.pool.pages_for(seq.num_kv)
        assert needed <= len(seq.page_ids), f"sequence {seq.seq_id} has {len(seq.page_ids)} pages and needs {needed}"
    fresh = [seq for seq in waiting.values() if seq.leader is None and seq.first_scheduled_time is None]
    assert state.waiting.num_requests == len(fresh), "queued requests are miscounted"
    assert state.waiting.num_prompt_tokens == sum(seq.num_prompt_tokens for seq in fresh), "queued tokens miscounted"
    assert all(seq.num_preemptions <= MAX_PREEMPTIONS for seq in state.sequences.values()), "preempted too often"
