"""Order of service and bounded memory of the queue; room in host memory."""

import pytest

from jaxinfer.request import Request, SamplingParams
from jaxinfer.schedule.sequence import make_sequences
from jaxinfer.schedule.swap_space import SwapSpace
from jaxinfer.schedule.waiting_queue import WaitingQueue


def make(seq_id: int, priority: int = 0, n: int = 1):
    params = SamplingParams(priority=priority, n=n)
    request = Request(request_id=f"r{seq_id}", prompt_token_ids=(2, 3), params=params, seed=0, arrival_time=0.0)
    return make_sequences(request, seq_id, max_total_tokens=9, page_size=2)


def test_priority_then_arrival():
    queue = WaitingQueue()
    for seq_id, priority in ((0, 1), (1, 0), (2, 1), (3, -1)):
        queue.push(make(seq_id, priority)[0])
    order = [queue.pop().seq_id for _ in range(4)]
    assert order == [3, 1, 0, 2]
    assert queue.pop() is None


def test_only_leaders_that_never_ran_count_as_queued():
    queue = WaitingQueue()
    sequences = make(0, n=3)
    for seq in sequences:
        queue.push(seq)
    assert (len(queue), queue.num_requests, queue.num_prompt_tokens) == (3, 1, 2)
    leader = queue.pop()
    leader.first_scheduled_time = 1.0
    queue.push(leader)
    assert (len(queue), queue.num_requests, queue.num_prompt_tokens) == (3, 0, 0)


def test_removed_sequences_do_not_pile_up():
    queue = WaitingQueue()
    queue.push(make(0)[0])
    for seq_id in range(1, 2_000):
        (seq,) = make(seq_id)
        queue.push(seq)
        queue.remove(seq)
        queue.remove(seq)
    assert len(queue._heap) < 100
    assert queue.pop().seq_id == 0


def test_swap_room_is_all_or_nothing_and_given_back_once():
    space = SwapSpace(5)
    assert space.reserve(1, 3)
    assert not space.reserve(2, 3)
    assert space.reserve(3, 2)
    space.release(1)
    space.release(1)
    assert space.num_used == 2
    with pytest.raises(AssertionError):
        space.reserve(3, 1)
    space.audit()
