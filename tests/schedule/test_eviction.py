"""The four policies, and the queue that applies them."""

import pytest

from jaxinfer.schedule.eviction import DEPTH_OF_DOUBLE_COST, POLICIES, EvictionQueue, PageUse


def make_use(**fields) -> PageUse:
    return PageUse(**{"depth": 0, "created": 1, "last_used": 1, "num_uses": 1, "clock": 0.0, **fields})


@pytest.mark.parametrize(
    ("policy", "goes_first", "goes_later"),
    [
        ("lru", {"last_used": 5, "num_uses": 9}, {"last_used": 6, "num_uses": 1}),
        ("lru", {"last_used": 5, "depth": 3}, {"last_used": 5, "depth": 2}),
        ("lfu", {"num_uses": 1, "last_used": 9}, {"num_uses": 2, "last_used": 5}),
        ("lfu", {"num_uses": 2, "last_used": 5}, {"num_uses": 2, "last_used": 6}),
        ("fifo", {"created": 1, "last_used": 9, "num_uses": 9}, {"created": 2, "last_used": 5}),
        ("cost", {"depth": 0}, {"depth": DEPTH_OF_DOUBLE_COST}),
        ("cost", {"num_uses": 1, "depth": DEPTH_OF_DOUBLE_COST}, {"num_uses": 3, "depth": 0}),
        ("cost", {"num_uses": 3, "clock": 0.0}, {"num_uses": 1, "clock": 10.0}),
    ],
)
def test_policy_ranks_the_lesser_loss_first(policy, goes_first, goes_later):
    rank = POLICIES[policy]
    assert rank(make_use(**goes_first)) < rank(make_use(**goes_later))


def test_pages_leave_in_order_of_rank():
    queue = EvictionQueue(POLICIES["lru"])
    for page_id, last_used in ((1, 30), (2, 10), (3, 20)):
        queue.offer(page_id, make_use(last_used=last_used))
    assert [queue.take() for _ in range(3)] == [2, 3, 1]


def test_retracted_page_is_passed_over_and_may_come_back_with_a_new_rank():
    queue = EvictionQueue(POLICIES["lru"])
    queue.offer(1, make_use(last_used=1))
    queue.offer(2, make_use(last_used=2))
    queue.retract(1)
    assert 1 not in queue
    queue.offer(1, make_use(last_used=3))
    assert [queue.take(), queue.take()] == [2, 1]
    assert len(queue) == 0


def test_stale_items_do_not_pile_up():
    queue = EvictionQueue(POLICIES["lru"])
    for tick in range(10_000):
        queue.offer(1, make_use(last_used=tick))
        queue.retract(1)
    assert len(queue._heap) < 100


def test_clock_never_runs_back():
    queue = EvictionQueue(POLICIES["cost"])
    queue.offer(1, make_use(num_uses=5))
    queue.take()
    queue.offer(2, make_use(num_uses=1))
    queue.take()
    assert queue.clock == 5.0
