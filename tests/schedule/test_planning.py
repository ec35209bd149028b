"""What goes into one plan: decodes first, chunks within the budget, rounds as pages and neighbours allow."""

import pytest
from fake_device import Driver

PROMPT = list(range(2, 19))


def rows(plan) -> list[tuple]:
    """(sequence, first position, tokens, samples) of each row."""
    return [(row.seq_id, row.start, row.num_tokens, row.samples) for row in plan.rows]


def test_prompt_is_cut_into_chunks_and_only_the_last_samples():
    driver = Driver(max_num_batched_tokens=8)
    driver.submit(PROMPT, max_tokens=3, ignore_eos=True)
    driver.run()
    assert [rows(plan) for plan in driver.plans] == [
        [(0, 0, 8, False)],
        [(0, 8, 8, False)],
        [(0, 16, 1, True)],
        [(0, None, 1, True)],
    ]
    assert [(plan.kind, plan.num_rounds) for plan in driver.plans] == [("mixed", 1)] * 3 + [("decode", 2)]


def test_decodes_come_first_and_the_rest_of_the_budget_goes_to_chunks():
    driver = Driver(max_num_batched_tokens=17)
    driver.submit(PROMPT, max_tokens=30, ignore_eos=True)
    driver.step()
    driver.submit(list(range(20, 40)))
    assert rows(driver.step()) == [(0, None, 1, True), (1, 0, 16, False)]
    assert rows(driver.step()) == [(0, None, 1, True), (1, 16, 4, True)]


def test_smaller_priority_is_prefilled_first_then_earlier_arrival():
    driver = Driver(max_num_batched_tokens=40)
    for priority in (5, 0, 5):
        driver.submit(PROMPT, priority=priority)
    assert rows(driver.step()) == [(1, 0, 17, True), (0, 0, 17, True), (2, 0, 6, False)]


def test_overlapped_plans_never_issue_more_than_the_sequence_can_take():
    driver = Driver(rounds_per_dispatch=4)
    driver.submit(PROMPT[:4], max_tokens=7, ignore_eos=True)
    driver.run()
    assert [plan.num_rounds for plan in driver.plans] == [1, 4, 2]


def test_rounds_stop_at_the_first_to_end_when_someone_waits():
    driver = Driver(max_num_seqs=2, rounds_per_dispatch=8)
    driver.submit([2], max_tokens=4, ignore_eos=True)
    driver.submit([3], max_tokens=20, ignore_eos=True)
    driver.step()
    driver.submit([4], max_tokens=2)
    assert driver.step().num_rounds == 3
    driver.run()
    driver.check_outputs()


def test_rounds_are_reduced_when_pages_are_short_before_anyone_is_preempted():
    driver = Driver(num_pages=9, max_num_seqs=2, rounds_per_dispatch=16)
    for token in (2, 3):
        driver.submit([token] * 4, max_tokens=13, ignore_eos=True)
    driver.step()
    assert driver.step().num_rounds == 12
    driver.run()
    tight = Driver(num_pages=7, max_num_seqs=2, rounds_per_dispatch=16)
    for token in (2, 3):
        tight.submit([token] * 4, max_tokens=9, ignore_eos=True)
    tight.submit([4])
    tight.step()
    assert tight.step().num_rounds == 8
    tight = Driver(num_pages=6, max_num_seqs=2, rounds_per_dispatch=16)
    for token in (2, 3):
        tight.submit([token] * 4, max_tokens=9, ignore_eos=True)
    tight.step()
    assert tight.step().num_rounds == 4
    tight.run()
    tight.check_outputs()


@pytest.mark.parametrize(("num_tokens", "planned"), [(17, 16), (20, 16), (29, 29), (16, 16), (70, 64)])
def test_chunk_is_trimmed_to_a_bucket_when_padding_would_cost_more(num_tokens, planned):
    driver = Driver(max_num_batched_tokens=64, token_buckets=(16, 32, 64))
    driver.submit(range(2, 2 + num_tokens), max_tokens=2, ignore_eos=True)
    assert driver.step().num_query_tokens == planned
    driver.run()


def test_page_table_is_fresh_in_every_plan_and_padded_with_the_null_page():
    driver = Driver(max_num_batched_tokens=8)
    driver.submit(PROMPT, max_tokens=9, ignore_eos=True)
    first = driver.step()
    before = first.page_table.copy()
    second = driver.step()
    assert first.page_table.shape == (1, 32)
    assert (first.page_table == before).all()
    assert second.page_table[0, :2].tolist() == before[0, :2].tolist()
    assert before[0, 2:].sum() == 0


def test_nothing_to_do_is_none():
    driver = Driver()
    assert driver.scheduler.plan() is None
    driver.submit([2], max_tokens=1)
    assert driver.scheduler.plan() is not None
    assert driver.scheduler.plan() is None  # its only token is in flight


def test_low_slots_are_given_first():
    driver = Driver(max_num_batched_tokens=64)
    for token in (2, 3, 4):
        driver.submit([token], max_tokens=50, ignore_eos=True)
    assert [row.slot for row in driver.step().rows] == [0, 1, 2]
    driver.finish(1, "abort")
    driver.submit([5], max_tokens=50)
    assert driver.step().admissions[0].slot == 1
