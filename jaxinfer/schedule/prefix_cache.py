"""Full pages found again by their tokens.

A page's key is a digest of (the parent page's digest, its tokens); the first page's parent is the namespace. Entries
form a tree by parent. On a hit tokens and parent are compared too, so a digest collision is a miss, never a wrong page.

    namespace ─ [ABCD] ─ [EFGH] ─ [IJKL]        match ABCDEFGHIXYZ -> pages of [ABCD], [EFGH]
                      └─ [EFXX]

The tree is closed: an entry's parent is always an entry. Removing an entry therefore removes all below it. An entry is
idle while no sequence holds its page; idle entries without idle children stand in the eviction queue, so every idle
page can go. Ownership counts live in `PageAllocator`; `PagePool` keeps the two in step.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from jaxinfer.schedule.eviction import POLICIES, EvictionQueue, PageUse

DIGEST_BYTES = 16


class PageChain:
    """The keys of one sequence's full pages; grows with its tokens, never changes.

    Attributes:
      digests: one per full page.
      blocks: the pages' tokens as int32 bytes.
      num_published: pages of this chain that are entries, as far as known: entries may have gone since.
      tail: what the next page would hang from: the page id of the last of them (possibly another sequence's page of the
        same contents), or the namespace.
    """

    __slots__ = ("blocks", "digests", "namespace", "num_published", "page_size", "tail")

    def __init__(self, namespace: str, page_size: int):
        self.namespace = namespace
        self.page_size = page_size
        self.digests: list[bytes] = []
        self.blocks: list[bytes] = []
        self.num_published = 0
        self.tail: int | str = namespace

    def extend(self, token_ids: SequenceOf[int], num_pages: int) -> None:
        """Computes the keys of the first `num_pages` pages; all their tokens must be final."""
        for index in range(len(self.digests), num_pages):
            block = array("i", token_ids[index * self.page_size : (index + 1) * self.page_size]).tobytes()
            assert len(block) == 4 * self.page_size, "only full pages have keys"
            parent = self.digests[-1] if index else _digest(b"", self.namespace.encode("utf-8", "surrogatepass"))
            self.blocks.append(block)
            self.digests.append(_digest(parent, block))


@dataclass(slots=True, eq=False)
class _Entry:
    """One cached page. `parent` is its parent's page id, or the namespace when it is a chain's first."""

    page_id: int
    digest: bytes
    block: bytes
    parent: int | str
    use: PageUse
    is_idle: bool = False
    num_idle_children: int = 0
    children: set[int] = field(default_factory=set)


class PrefixCache:
    """The entries, by digest and by page id."""

    def __init__(self, policy: str):
        self._by_digest: dict[bytes, int] = {}
        self._entries: dict[int, _Entry] = {}
        self._queue = EvictionQueue(POLICIES[policy])
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, page_id: int) -> bool:
        return page_id in self._entries

    def match(self, chain: PageChain, max_pages: int) -> list[int]:
        """Page ids of the longest cached beginning of the chain; it ends at the first missing page."""
        found: list[int] = []
        for index in range(min(max_pages, len(chain.digests))):
            page_id = self._find(chain, index, found[-1] if found else chain.namespace)
            if page_id is None:
                break
            found.append(page_id)
        return found

    def publish(self, chain: PageChain, page_ids: SequenceOf[int], num_pages: int) -> list[int]:
        """Makes entries of the chain's first `num_pages` pages; returns the page ids that became one.

        A page whose contents are cached under another page id is passed over: the chain goes on below that one.
        """
        last = chain.num_published - 1
        if last >= 0 and self._by_digest.get(chain.digests[last]) != chain.tail:
            chain.num_published, chain.tail = 0, chain.namespace  # what it hung from has gone: begin at the root
        added: list[int] = []
        for index in range(chain.num_published, num_pages):
            page_id = self._find(chain, index, chain.tail)
            if page_id is None:
                page_id = page_ids[index]
                if chain.digests[index] in self._by_digest or page_id in self._entries:
                    break  # a digest collision, or the page is known as something else
                self._add(page_id, chain, index)
                added.append(page_id)
            chain.num_published, chain.tail = index + 1, page_id
        return added

    def use(self, page_id: int) -> None:
        """A sequence that found this page now holds it."""
        entry = self._entries[page_id]
        self._touch(entry)
        entry.use.num_uses += 1
        if entry.is_idle:
            entry.is_idle = False
            self._queue.retract(page_id)
            self._count_idle_child(entry, -1)

    def let_go(self, page_id: int) -> None:
        """The last sequence that held this page let go of it."""
        entry = self._entries[page_id]
        self._touch(entry)
        entry.is_idle = True
        self._count_idle_child(entry, 1)
        self._offer_if_evictable(entry)

    def evict(self) -> list[int]:
        """Removes the entry the policy ranks lowest and all below it; returns their page ids. One must be idle."""
        return self._remove(self._entries[self._queue.take()])

    def withdraw(self, chain: PageChain, first_page: int) -> list[int]:
        """Removes the chain's entries from page `first_page` on and all below them; returns their page ids."""
        matched = self.match(chain, first_page + 1)
        if chain.num_published > first_page:
            chain.num_published = first_page
            chain.tail = matched[first_page - 1] if 0 < first_page <= len(matched) else chain.namespace
        return self._remove(self._entries[matched[first_page]]) if len(matched) > first_page else []

    def _find(self, chain: PageChain, index: int, parent: int | str) -> int | None:
        page_id = self._by_digest.get(chain.digests[index])
        if page_id is None:
            return None
        entry = self._entries[page_id]
        return page_id if entry.block == chain.blocks[index] and entry.parent == parent else None

    def _add(self, page_id: int, chain: PageChain, index: int) -> None:
        use = PageUse(depth=index, created=0, last_used=0, num_uses=1, clock=0.0)
        entry = _Entry(page_id, chain.digests[index], chain.blocks[index], chain.tail, use)
        self._touch(entry)
        use.created = self._tick
        self._entries[page_id] = entry
        self._by_digest[entry.digest] = page_id
        if isinstance(chain.tail, int):
            self._entries[chain.tail].children.add(page_id)

    def _touch(self, entry: _Entry) -> None:
        self._tick += 1
        entry.use.last_used = self._tick
        entry.use.clock = self._queue.clock

    def _offer_if_evictable(self, entry: _Entry) -> None:
        if entry.is_idle and entry.num_idle_children == 0:
            self._queue.offer(entry.page_id, entry.use)

    def _count_idle_child(self, child: _Entry, change: int) -> None:
        if not isinstance(child.parent, int):
            return
        parent = self._entries[child.parent]
        parent.num_idle_children += change
        if parent.num_idle_children:
            self._queue.retract(parent.page_id)
        else:
            self._offer_if_evictable(parent)

    def _remove(self, top: _Entry) -> list[int]:
        if isinstance(top.parent, int):
            self._entries[top.parent].children.discard(top.page_id)
            if top.is_idle:
                self._count_idle_child(top, -1)
        removed: list[int] = []
        pending = [top.page_id]
        while pending:
            entry = self._entries.pop(pending.pop())
            del self._by_digest[entry.digest]
            self._queue.retract(entry.page_id)
            pending.extend(entry.children)
            removed.append(entry.page_id)
        return removed

    def audit(self, num_owners: SequenceOf[int]) -> None:
        """Asserts that the tree is closed and that exactly the evictable pages stand in the queue."""
        assert len(self._by_digest) == len(self._entries), "entries and digests differ in number"
        for page_id, entry in self._entries.items():
            assert self._by_digest[entry.digest] == page_id, f"page {page_id} is not found by its digest"
            assert entry.is_idle == (num_owners[page_id] == 0), f"page {page_id} is idle: {entry.is_idle}"
            if isinstance(entry.parent, int):
                assert page_id in self._entries[entry.parent].children, f"page {page_id} is missing from its parent"
            num_idle = sum(self._entries[child].is_idle for child in entry.children)
            assert num_idle == entry.num_idle_children, f"page {page_id}: {num_idle} idle children"
            is_evictable = entry.is_idle and num_idle == 0
            assert is_evictable == (page_id in self._queue), f"page {page_id} is evictable: {is_evictable}"
        assert all(page_id in self._entries for page_id in self._queue.page_ids()), "a page in the queue has no entry"


def _digest(parent: bytes, block: bytes) -> bytes:
    return hashlib.blake2b(block, digest_size=DIGEST_BYTES, key=parent).digest()
