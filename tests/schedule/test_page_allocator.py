"""Free, used and cached pages, one verb at a time. In volume: `test_page_pool.py`."""

import pytest

from jaxinfer.schedule.page_allocator import PageAllocator


def test_every_page_but_the_null_page_is_given_once():
    pages = PageAllocator(5)
    assert sorted(pages.allocate(4)) == [1, 2, 3, 4]
    assert pages.allocate(1) is None
    assert pages.count() == (0, 0, 4)


def test_allocation_is_all_or_nothing():
    pages = PageAllocator(4)
    assert pages.allocate(4) is None
    assert pages.count().free == 3
    assert pages.allocate(0) == []


def test_shared_page_is_free_when_the_last_owner_leaves():
    pages = PageAllocator(3)
    (page_id,) = pages.allocate(1)
    assert not pages.share(page_id)
    assert not pages.free(page_id)
    assert pages.free(page_id)
    assert pages.count() == (2, 0, 0)


def test_kept_page_stays_cached_until_evicted():
    pages = PageAllocator(3)
    (page_id,) = pages.allocate(1)
    pages.keep(page_id)
    pages.free(page_id)
    assert pages.count() == (1, 1, 0)
    assert pages.share(page_id)
    pages.free(page_id)
    assert pages.evict(page_id)
    assert pages.count() == (2, 0, 0)
    pages.audit()


def test_page_evicted_while_used_is_freed_by_its_owner():
    pages = PageAllocator(3)
    (page_id,) = pages.allocate(1)
    pages.keep(page_id)
    assert not pages.evict(page_id)
    assert pages.free(page_id)
    assert pages.count() == (2, 0, 0)


@pytest.mark.parametrize("verb", ["free", "share", "keep", "evict"])
def test_misuse_of_a_free_page_is_caught(verb):
    pages = PageAllocator(3)
    with pytest.raises(AssertionError):
        getattr(pages, verb)(1)


def test_freed_page_is_reused_before_the_pool_grows():
    pages = PageAllocator(100)
    (page_id,) = pages.allocate(1)
    pages.free(page_id)
    assert pages.allocate(1) == [page_id]
