"""Sequences that wait for a slot, in order of service: priority, then arrival.

A preempted sequence keeps its place by arrival, which is before all of its class that were never admitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from jaxinfer.schedule.sequence import Sequence


class WaitingQueue:
    """A heap with lazy removal.

    Attributes:
      num_requests: requests that were never scheduled.
      num_prompt_tokens: their prompts' tokens.
    """

    def __init__(self):
        self.num_requests = 0
        self.num_prompt_tokens = 0
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._members: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members.values())

    def push(self, seq: Sequence) -> None:
        self._members[seq.seq_id] = seq
        heapq.heappush(self._heap, (seq.key, seq))
        self._count(seq, 1)

    def pop(self) -> Sequence | None:
        """Removes and returns the first in order; None when nothing waits."""
        while self._heap:
            _, seq = heapq.heappop(self._heap)
            if self._members.pop(seq.seq_id, None) is not None:
                self._count(seq, -1)
                return seq
        return None

    def remove(self, seq: Sequence) -> None:
        """Takes out a sequence that has ended; it never comes back."""
        if self._members.pop(seq.seq_id, None) is None:
            return
        self._count(seq, -1)
        if len(self._heap) > 64 + 2 * len(self._members):
            self._heap = [(member.key, member) for member in self._members.values()]
            heapq.heapify(self._heap)

    def _count(self, seq: Sequence, change: int) -> None:
        if seq.leader is None and seq.first_scheduled_time is None:
            self.num_requests += change
            self.num_prompt_tokens += change * seq.num_prompt_tokens
