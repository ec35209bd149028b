"""Who is let in, in which order, and what newcomers share."""

from dataclasses import replace

from fake_device import Driver

from jaxinfer.schedule.sequence import choice_seed

PROMPT = list(range(2, 19))


def admitted(plan) -> list[int]:
    return [admission.seq_id for admission in plan.admissions]


def test_siblings_wait_for_the_leader_then_share_its_full_prompt_pages_even_without_caching():
    for is_caching in (True, False):
        driver = Driver(enable_prefix_caching=is_caching, max_num_batched_tokens=32)
        driver.submit(PROMPT, n=3, max_tokens=4, prompt_logprobs=0)
        first = driver.step()
        assert admitted(first) == [0]
        second = driver.step()
        assert admitted(second) == [1, 2]
        assert [row.start for row in second.rows] == [None, 16, 16]
        assert len({tuple(table[:4]) for table in second.page_table.tolist()}) == 1
        assert [admission.params.prompt_logprobs for admission in (*first.admissions, *second.admissions)] == [
            0,
            None,
            None,
        ]
        driver.run()
        driver.check_outputs()


def test_siblings_recompute_at_least_one_token_of_a_prompt_that_ends_on_a_page():
    driver = Driver()
    driver.submit(PROMPT[:8], n=2, max_tokens=4)
    driver.step()
    assert driver.step().rows[1].start == 4


def test_siblings_go_on_their_own_when_the_leader_is_gone():
    driver = Driver(max_num_batched_tokens=4)
    driver.submit(PROMPT, n=2, max_tokens=4)
    driver.step()
    driver.finish(0, "abort")
    assert admitted(driver.step()) == [1]
    driver.run()
    driver.check_outputs()


def test_choices_draw_from_different_seeds_and_the_first_from_the_requests_own():
    driver = Driver(max_num_batched_tokens=64)
    driver.submit(PROMPT, n=4, seed=7, max_tokens=9)
    seeds = [admission.seed for _ in range(2) for admission in driver.step().admissions]
    assert seeds == [choice_seed(7, index) for index in range(4)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_head_of_the_queue_is_not_skipped_for_a_smaller_request():
    driver = Driver(num_pages=11, max_num_seqs=3, enable_prefix_caching=False)
    driver.submit(PROMPT, max_tokens=8, ignore_eos=True)
    driver.step()
    driver.submit(range(2, 34), max_tokens=2, ignore_eos=True)  # eight pages; five are left
    driver.submit([5], max_tokens=2, ignore_eos=True)
    while 0 not in driver.reasons:
        assert admitted(driver.step() or replace(driver.plans[0], admissions=())) == []
    driver.run()
    assert list(driver.reasons) == [0, 1, 2]


def test_a_lone_sequence_may_use_the_last_page():
    driver = Driver(num_pages=6)
    driver.submit([2] * 18, max_tokens=3, ignore_eos=True)
    driver.run()
    driver.check_outputs()
    assert driver.scheduler.stats().peak_pages_used == 5


def test_found_pages_are_held_while_the_rest_is_made_room_for():
    driver = Driver(num_pages=9)
    driver.submit(range(2, 18), max_tokens=1)  # leaves four cached pages
    driver.run()
    driver.submit([*range(2, 18), *range(30, 46)], max_tokens=1)  # finds them, and needs every other page
    driver.run()
    driver.check_outputs()
    assert driver.events[1][-1].cached_tokens == 16


def test_first_scheduled_time_is_of_the_first_admission():
    driver = Driver()
    driver.clock.now = 3.0
    (seq_id,) = driver.submit(PROMPT, max_tokens=20, ignore_eos=True)
    driver.step()
    driver.clock.now = 9.0
    driver.scheduler.force_preempt(seq_id)
    driver.run()
    assert {event.first_scheduled_time for event in driver.events[seq_id]} == {3.0}
    assert driver.events[seq_id][-1].cached_tokens == 0  # what it found of its own after preemption does not count
