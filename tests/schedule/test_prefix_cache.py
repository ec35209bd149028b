"""What is found again and what is not, through `PagePool` with pages of two tokens."""

import pytest

from jaxinfer.schedule import prefix_cache
from jaxinfer.schedule.page_pool import PagePool
from jaxinfer.schedule.prefix_cache import PageChain


class Holder:
    """A sequence's pages: some found in the cache, the rest allocated and published at once."""

    def __init__(self, pool: PagePool, text: str, namespace: str = ""):
        self.pool = pool
        tokens = [ord(c) for c in text]
        num_pages = len(tokens) // pool.page_size
        self.chain = PageChain(namespace, pool.page_size)
        self.chain.extend(tokens, num_pages)
        self.found = pool.match(self.chain, num_pages)
        pool.share(self.found)
        self.page_ids = [*self.found, *(pool.allocate(num_pages - len(self.found)) or [])]
        pool.publish(self.chain, self.page_ids, num_pages)

    def release(self) -> None:
        self.pool.free(self.page_ids)


def find(pool: PagePool, text: str, namespace: str = "") -> int:
    """Pages found for a text."""
    chain = PageChain(namespace, pool.page_size)
    chain.extend([ord(c) for c in text], len(text) // pool.page_size)
    return len(pool.match(chain, 100))


@pytest.fixture
def pool() -> PagePool:
    return PagePool(9, 2)


def test_only_the_common_full_pages_are_found(pool):
    Holder(pool, "ABCDEF").release()
    assert find(pool, "ABCDEF") == 3
    assert find(pool, "ABCDEX") == 2
    assert find(pool, "ABCD") == 2
    assert find(pool, "ABC") == 1
    assert find(pool, "CDEF") == 0


def test_same_tokens_under_another_parent_or_namespace_are_another_page(pool):
    Holder(pool, "ABXY").release()
    Holder(pool, "CDXY", "tenant").release()
    assert find(pool, "CDXY") == 0
    assert find(pool, "ABXY", "tenant") == 0
    assert find(pool, "CDXY", "tenant") == 2


def test_r009_no_hit_counts_past_the_first_missing_page(pool):
    Holder(pool, "ABCDEF").release()
    chain = PageChain("", 2)
    chain.extend([ord(c) for c in "ABCDEF"], 3)
    pool.withdraw(chain, 1)
    assert find(pool, "ABCDEF") == 1
    pool.audit()


def test_r009_pages_behind_a_missing_page_go_with_it_even_while_held(pool):
    first, second = Holder(pool, "ABCD"), None
    chain = PageChain("", 2)
    chain.extend([ord(c) for c in "AB"], 1)
    pool.withdraw(chain, 0)
    second = Holder(pool, "ABCD")
    assert second.found == []
    assert not set(first.page_ids) & set(second.page_ids)
    first.release()
    second.release()
    assert find(pool, "ABCD") == 2
    pool.audit()


def test_r053_everything_is_evictable_after_partial_matches(pool):
    holders = [Holder(pool, text) for text in ("ABCD", "ABX_", "ABCE")]
    assert [len(holder.found) for holder in holders] == [0, 1, 1]
    for holder in holders:
        holder.release()
    pool.audit()
    assert pool.allocate(8) is not None
    assert pool.count() == (0, 0, 8)
    assert find(pool, "ABCD") == 0


@pytest.mark.parametrize("policy", ["lru", "lfu", "fifo", "cost"])
def test_chains_are_evicted_from_their_end(policy):
    pool = PagePool(5, 2, policy=policy)
    Holder(pool, "ABCDEFGH").release()
    for num_left in (3, 2, 1, 0):
        taken = pool.allocate(1)
        assert find(pool, "ABCDEFGH") == num_left
        assert taken is not None
    pool.audit()


def test_duplicate_contents_are_not_published_and_their_continuation_hangs_from_the_first(pool):
    chain = PageChain("", 2)
    chain.extend([ord(c) for c in "ABCD"], 2)
    own = pool.allocate(2)
    first = Holder(pool, "AB")
    pool.publish(chain, own, 2)
    assert pool.match(chain, 2) == [first.page_ids[0], own[1]]
    first.release()
    pool.audit()
    rest = pool.allocate(pool.num_available)
    assert pool.count() == (0, 0, 8)  # the first page went although a held page hung from it
    assert find(pool, "ABCD") == 0
    pool.free(own)
    pool.free(rest)
    assert pool.count() == (8, 0, 0)


def test_held_pages_are_never_evicted(pool):
    holder = Holder(pool, "ABCD")
    assert pool.allocate(7) is None
    assert pool.allocate(6) is not None
    assert not set(holder.page_ids) & {page_id for page_id in range(1, 9) if pool.num_owners(page_id) != 1}
    assert find(pool, "ABCD") == 2


def test_digest_collision_is_a_miss(pool, monkeypatch):
    monkeypatch.setattr(prefix_cache, "_digest", lambda parent, block: b"same")
    Holder(pool, "AB").release()
    assert find(pool, "AB") == 1
    assert find(pool, "XY") == 0
    assert Holder(pool, "XY").found == []
    assert find(pool, "AB") == 1
    pool.audit()


def test_caching_switched_off_keeps_nothing():
    pool = PagePool(9, 2, is_caching=False)
    Holder(pool, "ABCD").release()
    assert pool.count() == (8, 0, 0)
    assert find(pool, "ABCD") == 0


def test_tainted_pages_are_scrubbed_once_nobody_holds_them(pool):
    bad, other = Holder(pool, "ABCD"), Holder(pool, "AB")
    assert other.found == bad.page_ids[:1]
    pool.withdraw(bad.chain, 0)
    bad.release()
    pool.taint(bad.page_ids)
    assert pool.take_scrubs() == (bad.page_ids[1],)
    pool.publish(other.chain, other.page_ids, 1)
    assert find(pool, "AB") == 0
    other.release()
    assert pool.take_scrubs() == (bad.page_ids[0],)
    assert pool.take_scrubs() == ()
    pool.audit()
