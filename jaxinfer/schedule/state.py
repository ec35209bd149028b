"""What the parts of the scheduler share: limits that never change, the sequences, and who holds slots and pages.

The verbs here keep a sequence's own fields and the pool in step; who gets what, and when, is decided by `planning.py`,
`admission.py` and `preemption.py`.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from jaxinfer.schedule.page_pool import PagePool
from jaxinfer.schedule.sequence import Sequence, Status
from jaxinfer.schedule.step_plan import SchedulerStats
from jaxinfer.schedule.swap_space import SwapSpace
from jaxinfer.schedule.waiting_queue import WaitingQueue

MAX_PREEMPTIONS = 8  # of one sequence; RELIABILITY.md F4


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Sizes fixed at start.

    Attributes:
      max_total_tokens: most tokens of a sequence: `max_model_len`, or fewer if the whole pool holds fewer.
      table_width: entries of a row of the page table.
      token_buckets: sizes the device pads a mixed step's query tokens to, ascending; may be empty.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_total_tokens: int
    max_queued_requests: int
    max_queued_tokens: int
    table_width: int
    eos_token_ids: tuple[int, ...]
    rounds_per_dispatch: int
    is_swapping: bool
    token_buckets: tuple[int, ...]


class SchedulerState:
    """The mutable state.

    Attributes:
      pool, swap, waiting: see their classes.
      sequences: every unfinished sequence by id.
      running: those that hold a slot, by id.
      free_slots: a heap; low slots are given first.
      totals: counts since start; its gauges are not kept up to date here.
    """

    def __init__(self, limits: Limits, pool: PagePool, swap: SwapSpace, clock: Callable[[], float]):
        self.limits = limits
        self.pool = pool
        self.swap = swap
        self.clock = clock
        self.waiting = WaitingQueue()
        self.sequences: dict[int, Sequence] = {}
        self.running: dict[int, Sequence] = {}
        self.free_slots = list(range(limits.max_num_seqs))
        self.totals = SchedulerStats()

    def in_order(self) -> list[Sequence]:
        """Running sequences in order of service."""
        return sorted(self.running.values(), key=lambda seq: seq.key)

    def start(self, seq: Sequence) -> None:
        """Gives a waiting sequence the lowest free slot."""
        assert seq.status is Status.WAITING, seq.status
        seq.status = Status.RUNNING
        seq.slot = heapq.heappop(self.free_slots)
        self.running[seq.seq_id] = seq
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = self.clock()

    def stop(self, seq: Sequence, status: Status) -> None:
        """Takes slot and pages from a running sequence."""
        assert seq.status is Status.RUNNING, seq.status
        seq.status = status
        del self.running[seq.seq_id]
        assert seq.slot is not None
        heapq.heappush(self.free_slots, seq.slot)
        seq.slot = None
        self.pool.free(seq.page_ids)
        seq.page_ids = array("i")

    def num_missing_pages(self, seq: Sequence, num_positions: int) -> int:
        """Pages a sequence lacks to hold this many positions."""
        return max(0, self.pool.pages_for(num_positions) - len(seq.page_ids))

    def extend_pages(self, seq: Sequence, num_positions: int) -> bool:
        """Lets a sequence hold this many positions; False, and nothing changes, when pages are short."""
        taken = self.pool.allocate(self.num_missing_pages(seq, num_positions))
        if taken is None:
            return False
        seq.page_ids.extend(taken)
        return True

    def publish(self, seq: Sequence, num_positions: int) -> None:
        """Makes a running sequence's full pages within its first `num_positions` findable."""
        if not self.pool.is_caching:
            return
        num_pages = num_positions // self.pool.page_size
        seq.chain.extend(seq.tokens, num_pages)
        self.pool.publish(seq.chain, seq.page_ids, num_pages)

    def condemn(self, seq: Sequence) -> None:
        """Ends all use of what a sequence with non-finite logits computed: it leaves the cache and gets scrubbed.

        Pages it shared go too: if the fault came from one of them, every later hit would fail as well.
        """
        page_ids = tuple(seq.page_ids)
        seq.chain.extend(seq.tokens, min(len(page_ids), len(seq.tokens) // self.pool.page_size))
        self.pool.withdraw(seq.chain, 0)
        if seq.status is Status.RUNNING:
            self.stop(seq, Status.FINISHED)
        self.pool.taint(page_ids)
        self.pool.taint(page_id for page_id in seq.lost_page_ids if self.pool.num_owners(page_id) == 0)
