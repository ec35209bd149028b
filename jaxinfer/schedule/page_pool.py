"""All pages on the device, as the scheduler sees them: allocator and prefix cache kept in step.

Also remembers pages that may hold non-finite values. Such a page is never published again; once nobody holds it, it
is handed out for scrubbing. A plan scrubs before its rows run, so the page may be reused at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from jaxinfer.schedule.page_allocator import PageAllocator, PageCounts
from jaxinfer.schedule.prefix_cache import PageChain, PrefixCache


class PagePool:
    """Attributes:
    page_size: positions per page.
    is_caching: whether pages are published and looked up at all.
    num_evictions: cached pages dropped to make room, since start.
    """

    def __init__(self, num_pages: int, page_size: int, *, policy: str = "lru", is_caching: bool = True):
        self.page_size = page_size
        self.is_caching = is_caching
        self.num_evictions = 0
        self._allocator = PageAllocator(num_pages)
        self._cache = PrefixCache(policy)
        self._tainted: set[int] = set()
        self._to_scrub: set[int] = set()

    @property
    def num_pages(self) -> int:
        """Pages that can hold something: all but the null page."""
        return self._allocator.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free ones, and cached ones after eviction."""
        counts = self._allocator.count()
        return counts.free + counts.cached

    def pages_for(self, num_positions: int) -> int:
        """Pages that hold this many positions."""
        return -(-num_positions // self.page_size)

    def count(self) -> PageCounts:
        return self._allocator.count()

    def num_owners(self, page_id: int) -> int:
        return self._allocator.num_owners(page_id)

    def allocate(self, count: int) -> list[int] | None:
        """Takes pages, evicting cached ones as needed; None, and nothing evicted, when there are too few."""
        if count > self.num_available:
            return None
        while self._allocator.count().free < count:
            removed = self._cache.evict()
            self.num_evictions += len(removed)
            for page_id in removed:
                self._allocator.evict(page_id)
        return self._allocator.allocate(count)

    def share(self, page_ids: Iterable[int]) -> None:
        """Adds an owner to each page, found in the cache or held by a sibling."""
        for page_id in page_ids:
            self._allocator.share(page_id)
            if page_id in self._cache:
                self._cache.use(page_id)

    def free(self, page_ids: SequenceOf[int]) -> None:
        """Takes one owner from each page, last page first so that a chain's end is let go before its beginning."""
        for page_id in reversed(page_ids):
            if not self._allocator.free(page_id):
                continue
            if page_id in self._cache:
                self._cache.let_go(page_id)
            elif page_id in self._tainted:
                self._tainted.discard(page_id)
                self._to_scrub.add(page_id)

    def match(self, chain: PageChain, max_pages: int) -> list[int]:
        """Page ids of the longest cached beginning of the chain. Share them before anything else is allocated."""
        return self._cache.match(chain, max_pages) if self.is_caching else []

    def publish(self, chain: PageChain, page_ids: SequenceOf[int], num_pages: int) -> None:
        """Makes the first `num_pages` pages of a sequence findable; its chain must have their keys."""
        if not self.is_caching:
            return
        if self._tainted:
            num_pages = next((i for i in range(num_pages) if page_ids[i] in self._tainted), num_pages)
        for page_id in self._cache.publish(chain, page_ids, num_pages):
            self._allocator.keep(page_id)

    def withdraw(self, chain: PageChain, first_page: int) -> None:
        """Removes the chain's pages from `first_page` on from the cache, with all that continue them."""
        for page_id in self._cache.withdraw(chain, first_page):
            self._allocator.evict(page_id)

    def taint(self, page_ids: Iterable[int]) -> None:
        """Marks withdrawn pages as holding what must not be read: scrubbed when nobody holds them, which may be now."""
        for page_id in page_ids:
            if self._allocator.num_owners(page_id):
                self._tainted.add(page_id)
            elif page_id not in self._cache:
                self._to_scrub.add(page_id)

    def take_scrubs(self) -> tuple[int, ...]:
        """Pages for the next plan to scrub; each is given once."""
        taken = tuple(sorted(self._to_scrub))
        self._to_scrub.clear()
        return taken

    def audit(self) -> None:
        """Asserts that allocator and cache are sound and agree."""
        self._allocator.audit()
        owners = [self._allocator.num_owners(page_id) for page_id in range(self._allocator.num_pages)]
        self._cache.audit(owners)
        for page_id, num_owners in enumerate(owners):
            assert self._allocator.is_kept(page_id) == (page_id in self._cache), f"page {page_id}: kept but not cached"
            assert page_id not in self._tainted or num_owners, f"tainted page {page_id} has no owner"
            assert page_id not in self._tainted or page_id not in self._cache, f"tainted page {page_id} is cached"
        counts = self._allocator.count()
        assert counts.free + counts.cached + counts.used == self.num_pages, counts
