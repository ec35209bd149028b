"""Which pages are free, and how many owners each of the others has.

    free ── allocate ──► used (1+ owners) ── last free ──► free, or cached when its contents are kept
                          ▲ share                               │ evict ──► free
                          └──────────────────── share ──────────┘

Five verbs: allocate, share, free, evict, count; all O(1) per page. Any free page serves any sequence, so the pool
cannot fragment. What a kept page holds, and which one to evict, is the prefix cache's business.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxinfer.schedule.step_plan import NULL_PAGE


class PageCounts(NamedTuple):
    """How many pages are in each state; the null page is in none.

    Attributes:
      free: hold nothing of use.
      cached: no owner, contents kept for the prefix cache.
      used: one owner or more.
    """

    free: int
    cached: int
    used: int


class PageAllocator:
    """Owner counts of pages 1 .. num_pages - 1."""

    def __init__(self, num_pages: int):
        assert num_pages >= 2, num_pages
        self.num_pages = num_pages
        self._free_ids = list(range(num_pages - 1, NULL_PAGE, -1))  # a stack; low ids come out first
        self._num_owners = [0] * num_pages
        self._is_kept = bytearray(num_pages)
        self._num_cached = 0

    def allocate(self, count: int) -> list[int] | None:
        """Takes free pages, each with one owner; None when there are too few. Cached pages are not touched."""
        if count > len(self._free_ids):
            return None
        taken = [self._free_ids.pop() for _ in range(count)]
        for page_id in taken:
            self._num_owners[page_id] = 1
        return taken

    def share(self, page_id: int) -> bool:
        """Adds an owner to a used or cached page; True when it was cached (nobody's) until now."""
        was_cached = self._num_owners[page_id] == 0
        if was_cached:
            assert self._is_kept[page_id], f"page {page_id} is free; it cannot be shared"
            self._num_cached -= 1
        self._num_owners[page_id] += 1
        return was_cached

    def free(self, page_id: int) -> bool:
        """Takes one owner away; True when it was the last. A kept page then stays as cached."""
        assert self._num_owners[page_id] > 0, f"page {page_id} has no owner"
        self._num_owners[page_id] -= 1
        if self._num_owners[page_id]:
            return False
        if self._is_kept[page_id]:
            self._num_cached += 1
        else:
            self._free_ids.append(page_id)
        return True

    def keep(self, page_id: int) -> None:
        """Marks a used page: its contents stay when the last owner leaves. Undone by `evict`."""
        assert self._num_owners[page_id] > 0, f"page {page_id} has no owner"
        assert not self._is_kept[page_id], f"page {page_id} is kept already"
        self._is_kept[page_id] = True

    def evict(self, page_id: int) -> bool:
        """Ends the keeping of a page; True when that made it free (it had no owner)."""
        assert self._is_kept[page_id], f"page {page_id} is not kept"
        self._is_kept[page_id] = False
        if self._num_owners[page_id]:
            return False
        self._num_cached -= 1
        self._free_ids.append(page_id)
        return True

    def count(self) -> PageCounts:
        """Pages in each state; they add up to num_pages - 1."""
        num_free = len(self._free_ids)
        return PageCounts(num_free, self._num_cached, self.num_pages - 1 - num_free - self._num_cached)

    def num_owners(self, page_id: int) -> int:
        """Sequences that hold the page."""
        return self._num_owners[page_id]

    def is_kept(self, page_id: int) -> bool:
        """Whether the prefix cache has an entry for the page."""
        return bool(self._is_kept[page_id])

    def audit(self) -> None:
        """Asserts that every page is in exactly one state and that the counts say so."""
        free_ids = set(self._free_ids)
        assert len(free_ids) == len(self._free_ids), "a page is free twice"
        assert NULL_PAGE not in free_ids, "the null page is free"
        assert self._num_owners[NULL_PAGE] == 0, "the null page has an owner"
        num_cached = 0
        for page_id in range(1, self.num_pages):
            is_free = self._num_owners[page_id] == 0 and not self._is_kept[page_id]
            assert is_free == (page_id in free_ids), f"page {page_id} is free in one place and not in the other"
            num_cached += self._num_owners[page_id] == 0 and bool(self._is_kept[page_id])
        assert num_cached == self._num_cached, f"{num_cached} cached pages, {self._num_cached} counted"
