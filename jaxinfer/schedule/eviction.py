"""Which cached page that nobody holds goes first: four pure ranking functions and the queue that applies them.

Only leaves stand in the queue (the prefix cache sees to it), so a chain is eaten from its end whatever the policy. A
page's rank is fixed while it stands in the queue, because a use takes it out; so a heap serves, O(log n) per page.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

DEPTH_OF_DOUBLE_COST = (
    64  # pages before a page at which attention costs about as much as the rest of a small model's layer
)


@dataclass(slots=True)
class PageUse:
    """What is remembered of a cached page's use. Times are ticks: one per event of the cache.

    Attributes:
      depth: pages before it in its chain.
      created: when it was published.
      last_used: when it was last shared or let go.
      num_uses: publication, and each time it was found again.
      clock: the queue's clock at the last use; see `cost`.
    """

    depth: int
    created: int
    last_used: int
    num_uses: int
    clock: float


Rank = tuple[float, ...]
Policy = Callable[[PageUse], Rank]


def lru(use: PageUse) -> Rank:
    """The page unused for longest goes first; of pages let go together, the deepest."""
    return (use.last_used, -use.depth)


def lfu(use: PageUse) -> Rank:
    """The page found least often goes first; among equals, the one unused for longest."""
    return (use.num_uses, use.last_used, -use.depth)


def fifo(use: PageUse) -> Rank:
    """The page published first goes first."""
    return (use.created,)


def cost(use: PageUse) -> Rank:
    """The page whose loss costs least goes first: uses times the prefill work to make it again, ageing with evictions.

    A deep page attends to all before it, so its cost grows with depth. The clock (rank of the last page evicted) makes
    old uses fade without touching waiting pages. Source: GreedyDual-Size-Frequency, Cherkasova 1998, HP Labs HPL-98-69.
    """
    return (use.clock + use.num_uses * (1.0 + use.depth / DEPTH_OF_DOUBLE_COST), use.last_used)


POLICIES: dict[str, Policy] = {"lru": lru, "lfu": lfu, "fifo": fifo, "cost": cost}


class EvictionQueue:
    """Pages that may be evicted, lowest rank first.

    Attributes:
      clock: highest first component among the ranks of pages taken.
    """

    def __init__(self, policy: Policy):
        self.clock = 0.0
        self._policy = policy
        self._heap: list[tuple[Rank, int]] = []
        self._ranks: dict[int, Rank] = {}  # of the pages that stand in the queue; heap items that differ are stale

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._ranks

    def page_ids(self) -> list[int]:
        """The pages that stand in the queue, in no order."""
        return list(self._ranks)

    def offer(self, page_id: int, use: PageUse) -> None:
        """Puts a page into the queue."""
        rank = self._policy(use)
        self._ranks[page_id] = rank
        heapq.heappush(self._heap, (rank, page_id))

    def retract(self, page_id: int) -> None:
        """Takes a page out of the queue, if it stands there."""
        if self._ranks.pop(page_id, None) is not None and len(self._heap) > 64 + 2 * len(self._ranks):
            self._heap = [(rank, page_id) for page_id, rank in self._ranks.items()]
            heapq.heapify(self._heap)

    def take(self) -> int:
        """Removes and returns the page to evict; the queue must not be empty."""
        while True:
            rank, page_id = heapq.heappop(self._heap)
            if self._ranks.get(page_id) == rank:
                del self._ranks[page_id]
                self.clock = max(self.clock, rank[0])
                return page_id
