"""Pages taken away and given back: every answer stays the oracle's."""

import random

import pytest
from fake_device import Driver, random_prompt

from jaxinfer.schedule.state import MAX_PREEMPTIONS

PROMPT = list(range(2, 19))
SWAP = {"preemption_mode": "swap", "swap_capacity_pages": 1000}
MODES = pytest.mark.parametrize("mode", [{}, SWAP], ids=["recompute", "swap"])
OVERLAPS = pytest.mark.parametrize("overlap", [False, True])


@MODES
@OVERLAPS
@pytest.mark.parametrize("every", range(1, 8))
def test_f4_preempted_every_k_steps_the_answer_is_the_same_and_comes_without_gap(mode, overlap, every):
    driver = Driver(overlap=overlap, max_num_batched_tokens=6, rounds_per_dispatch=3, **mode)
    seq_ids = [driver.submit([*PROMPT, token], max_tokens=30, ignore_eos=True)[0] for token in range(20, 24)]
    for number in range(2_000):
        if not driver.scheduler.has_work():
            break
        if number % every == 0:
            driver.scheduler.force_preempt(seq_ids[number % 4])
        driver.step()
        driver.scheduler.audit()
    driver.check_idle()
    driver.check_outputs()
    stats = driver.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swap_outs > 0) == bool(mode)
    assert all(event.num_preemptions <= MAX_PREEMPTIONS for events in driver.events.values() for event in events)


@MODES
@OVERLAPS
def test_f4_64_requests_in_a_pool_of_two_fifths_of_their_need(mode, overlap):
    rng = random.Random(0)
    driver = Driver(overlap=overlap, num_pages=1 + 40, max_num_seqs=8, max_model_len=100, **mode)  # 8 x 13 pages wanted
    for _ in range(64):
        driver.submit(random_prompt(rng, 12), max_tokens=40, ignore_eos=True)
    driver.run()
    driver.check_outputs()
    assert driver.scheduler.stats().num_preemptions > 10


@OVERLAPS
def test_r041_retracting_every_third_step_in_a_nearly_full_pool_changes_nothing(overlap):
    driver = Driver(overlap=overlap, num_pages=1 + 36, max_num_seqs=6, max_num_batched_tokens=32)
    for token in range(20, 31):
        driver.submit([*PROMPT[:8], token] * 2, max_tokens=16, ignore_eos=True)
    number = 0
    while driver.scheduler.has_work():
        if number % 3 == 0 and driver.plans and driver.plans[-1].rows:
            driver.scheduler.force_preempt(driver.plans[-1].rows[-1].seq_id)
        driver.step()
        driver.scheduler.audit()
        number += 1
    driver.check_idle()
    driver.check_outputs()


def test_youngest_of_the_lowest_priority_is_the_victim():
    driver = Driver(num_pages=1 + 8, max_num_seqs=3, rounds_per_dispatch=1, enable_prefix_caching=False)
    for priority in (0, 1, 1):
        driver.submit([2] * 4, priority=priority, max_tokens=20, ignore_eos=True)
    driver.run()
    driver.check_outputs()
    counts = [driver.events[seq_id][-1].num_preemptions for seq_id in range(3)]
    assert counts[0] == 0
    assert counts[2] >= counts[1]
    assert counts[2] > 0
    assert list(driver.reasons) == [0, 1, 2]


def test_sequence_preempted_often_enough_is_passed_over_and_holds_all_it_needs():
    driver = Driver(overlap=False)
    (seq_id,) = driver.submit(PROMPT, max_tokens=60, ignore_eos=True)
    for _ in range(MAX_PREEMPTIONS):
        driver.step()
        assert driver.scheduler.force_preempt(seq_id)
    driver.step()
    assert not driver.scheduler.force_preempt(seq_id)
    assert sum(page_id != 0 for page_id in driver.device.page_tables[seq_id]) == 19  # 17 + 60 - 1 positions
    driver.run()
    driver.check_outputs()
    assert driver.events[seq_id][-1].num_preemptions == MAX_PREEMPTIONS


def test_preempted_sequence_comes_back_before_younger_ones_and_only_after_its_commit():
    driver = Driver(max_num_seqs=1)
    (first,) = driver.submit(PROMPT[:4], max_tokens=12, ignore_eos=True)
    driver.step()
    (second,) = driver.submit(PROMPT[:3], max_tokens=2, ignore_eos=True)
    driver.scheduler.force_preempt(first)
    plan = driver.step()  # the first's plan is in flight: the second goes ahead
    assert [admission.seq_id for admission in plan.admissions] == [second]
    driver.run()
    driver.check_outputs()


def test_swapped_sequence_goes_on_as_a_decode_row():
    driver = Driver(overlap=False, **SWAP)
    (seq_id,) = driver.submit(PROMPT, max_tokens=12, ignore_eos=True)
    driver.step()
    driver.step()
    driver.step()
    driver.scheduler.force_preempt(seq_id)
    out = driver.step()
    assert out.rows == ()
    assert out.page_table.shape[0] == 0
    assert len(out.swap_outs) == 1
    back = driver.step()
    assert [row.start for row in back.rows] == [None]
    assert len(back.swap_ins[0].page_ids) == len(out.swap_outs[0].page_ids)
    driver.run()
    driver.check_outputs()


def test_swapped_sequence_in_prefill_goes_on_at_its_next_chunk():
    driver = Driver(max_num_batched_tokens=6, **SWAP)
    (seq_id,) = driver.submit(PROMPT, max_tokens=3, ignore_eos=True)
    driver.step()
    driver.scheduler.force_preempt(seq_id)
    driver.step()
    starts = []
    while driver.scheduler.has_work():
        plan = driver.step()
        starts += [row.start for row in plan.rows] if plan else []
    assert starts == [6, 12, None]
    driver.check_outputs()


def test_recompute_is_the_way_when_host_memory_is_full():
    driver = Driver(preemption_mode="swap", swap_capacity_pages=2)
    (seq_id,) = driver.submit(PROMPT, max_tokens=12, ignore_eos=True)
    driver.step()
    driver.step()
    driver.scheduler.force_preempt(seq_id)
    driver.run()
    driver.check_outputs()
    stats = driver.scheduler.stats()
    assert (stats.num_preemptions, stats.num_swap_outs) == (1, 0)


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_sequence_that_ends_while_swapped_out_leaves_nothing(reason):
    driver = Driver(**SWAP)
    (seq_id,) = driver.submit(PROMPT, max_tokens=40, ignore_eos=True)
    driver.step()
    driver.step()
    driver.scheduler.force_preempt(seq_id)
    driver.step()
    driver.finish(seq_id, reason)
    driver.run()
    driver.check_idle()


def test_fault_found_after_preemption_still_scrubs_the_lost_pages():
    driver = Driver()
    (seq_id,) = driver.submit(PROMPT, max_tokens=40, ignore_eos=True)
    driver.device.bad_seq_ids.add(seq_id)
    first = driver.step()
    driver.scheduler.force_preempt(seq_id)
    driver.step()
    assert driver.reasons[seq_id] == "error"
    (other,) = driver.submit(PROMPT, max_tokens=4)
    plan = driver.step()
    assert {int(page_id) for page_id in first.page_table[0] if page_id} <= set(plan.scrub_page_ids)
    driver.run()
    assert driver.reasons[other] in ("stop", "length")
    assert driver.events[other][-1].cached_tokens == 0
    driver.check_outputs()


def test_tiny_pool_with_many_sequences_always_completes():
    driver = Driver(num_pages=1 + 5, page_size=4, max_num_seqs=8, max_num_batched_tokens=8, max_model_len=21)
    for token in range(2, 26):
        driver.submit([token] * (token % 7 + 1), max_tokens=None, ignore_eos=True, priority=token % 3)
    driver.run()
    driver.check_outputs()
