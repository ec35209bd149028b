"""Taking a running sequence's pages so that others can go on.

The victim is the youngest of the lowest priority; the first in order of service is only ever preempted by a test, so it
always completes. After `MAX_PREEMPTIONS` a sequence is passed over; it is then admitted only with all pages it can ever
need, so it never asks for any, and those that do can wait for it to end.
"""

from __future__ import annotations

from jaxinfer.schedule.draft import Draft
from jaxinfer.schedule.sequence import Sequence, Status
from jaxinfer.schedule.state import MAX_PREEMPTIONS, SchedulerState
from jaxinfer.schedule.step_plan import SwapOut


def is_preemptable(seq: Sequence) -> bool:
    """Whether a sequence may lose its pages."""
    return seq.status is Status.RUNNING and seq.num_preemptions < MAX_PREEMPTIONS


def choose_victim(state: SchedulerState) -> Sequence | None:
    """The running sequence to preempt, or None when none may be. Nothing has been admitted in this plan yet."""
    candidates = [seq for seq in state.running.values() if is_preemptable(seq)]
    return max(candidates, key=lambda seq: seq.key, default=None)


def preempt(state: SchedulerState, draft: Draft, seq: Sequence) -> None:
    """Frees a sequence's slot and pages. It waits until its plan in flight is committed, then comes back.

    Its pages may be reused in this very plan: a row in flight runs before it, and swap-outs come first in it.
    """
    draft.drop(seq)
    state.publish(seq, seq.num_final_kv)
    num_pages = state.pool.pages_for(seq.num_kv)
    if state.limits.is_swapping and num_pages and state.swap.reserve(seq.seq_id, num_pages):
        seq.is_swapped = True
        draft.swap_outs.append(SwapOut(seq.seq_id, tuple(seq.page_ids[:num_pages])))
        state.totals.num_swap_outs += 1
    else:
        seq.num_kv = 0
    if seq.num_in_flight:
        seq.lost_page_ids = tuple(seq.page_ids)
    seq.num_preemptions += 1
    seq.preempted_in_step = draft.step_id
    state.totals.num_preemptions += 1
    state.stop(seq, Status.WAITING)
    state.waiting.push(seq)
