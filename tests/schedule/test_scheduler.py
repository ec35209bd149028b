"""The scheduler's verbs from outside: submit, commit, finish, expire; and the cases about the prefix cache."""

from itertools import pairwise

import pytest
from fake_device import EOS, Driver

from jaxinfer.errors import PromptTooLong, QueueFull
from jaxinfer.schedule import RowTokens, StepTokens

PROMPT = list(range(2, 19))  # 17 tokens: four pages of four and one more


def answer(driver: Driver, prompt, **options) -> list[int]:
    """Submits, runs to the end, and returns the first choice's tokens, checked against the oracle."""
    seq_id = driver.submit(prompt, **options)[0]
    driver.run()
    driver.check_outputs()
    return driver.outputs[seq_id]


def cached_tokens(driver: Driver) -> int:
    """Of the sequence that ended last."""
    return driver.events[list(driver.reasons)[-1]][-1].cached_tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_r001_answer_is_the_same_from_cold_cache_warm_cache_and_no_cache(overlap):
    prompt = list(range(2, 2 + 3 * 4 + 3))
    warm, cold = Driver(overlap=overlap), Driver(overlap=overlap, enable_prefix_caching=False)
    answers, cached = [], []
    for driver in (warm, warm, cold):
        answers.append(answer(driver, prompt, max_tokens=32))
        cached.append(cached_tokens(driver))
    assert answers[0] == answers[1] == answers[2]
    assert cached == [0, 12, 0]


@pytest.mark.parametrize("kept", [0, 3, 4, 9])
@pytest.mark.parametrize("is_preempted", [False, True])
def test_r003_no_page_with_tokens_past_a_stop_cut_is_found_again(kept, is_preempted):
    driver = Driver(rounds_per_dispatch=8)
    (seq_id,) = driver.submit(PROMPT, max_tokens=40, ignore_eos=True)
    while len(driver.outputs[seq_id]) < 10:
        driver.step()
    said = PROMPT + driver.outputs[seq_id]
    if is_preempted:
        assert driver.scheduler.force_preempt(seq_id)
        driver.step()
    driver.finish(seq_id, "stop_string", kept)
    driver.run()
    answer(driver, [*said, 5], max_tokens=8)
    assert cached_tokens(driver) == (len(PROMPT) + kept) // 4 * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_r007_fully_cached_prompt_reads_the_same_pages_at_every_step(overlap):
    driver = Driver(overlap=overlap)
    prompt = PROMPT[:16]
    first = answer(driver, prompt, max_tokens=12)
    num_plans = len(driver.plans)
    assert answer(driver, prompt, max_tokens=12) == first
    assert cached_tokens(driver) == 12  # one page short: the last token's output is wanted
    tables = [plan.page_table[0] for plan in driver.plans[num_plans:]]
    for before, after in pairwise(tables):
        num_pages = int((before != 0).sum())
        assert before[:num_pages].tolist() == after[:num_pages].tolist()


def test_r009_second_use_after_eviction_counts_only_pages_before_the_first_missing():
    driver = Driver(num_pages=11, max_model_len=40)
    answer(driver, PROMPT, max_tokens=1)
    answer(driver, list(range(30, 46)) + list(range(2, 14)), max_tokens=1)  # seven pages; ten in all: evicts the end
    answer(driver, PROMPT, max_tokens=4)
    assert cached_tokens(driver) == 12
    stats = driver.scheduler.stats()
    assert stats.num_evictions > 0
    assert stats.prefix_cache_hits == 12


@pytest.mark.parametrize("options", [{"namespace": "other"}, {"prompt_logprobs": 0}])
def test_r013_reuse_that_is_forbidden_counts_no_cached_tokens(options):
    driver = Driver()
    answer(driver, PROMPT, max_tokens=1)
    answer(driver, PROMPT, max_tokens=1, **options)
    assert cached_tokens(driver) == 0
    assert driver.scheduler.stats().prefix_cache_hits == 0


def test_r036_prompt_that_the_whole_pool_cannot_hold_is_refused_at_once_with_the_numbers():
    driver = Driver(num_pages=50, max_model_len=1000)
    with pytest.raises(PromptTooLong, match=r"250 tokens and needs 63 pages; the whole pool has 49"):
        driver.submit([2] * 250)
    assert len(answer(driver, PROMPT, max_tokens=3, ignore_eos=True)) == 3


def test_prompt_that_leaves_no_room_for_an_answer_is_refused():
    driver = Driver(max_model_len=16)
    with pytest.raises(PromptTooLong, match=r"16 tokens; max_model_len is 16"):
        driver.submit([2] * 16)
    assert len(answer(driver, [2] * 15, ignore_eos=True)) == 1


def test_answer_without_bound_ends_where_the_pool_does():
    driver = Driver(num_pages=6, max_model_len=1000)
    assert (
        len(answer(driver, [2] * 10, max_tokens=None, ignore_eos=True)) == 11
    )  # 20 positions, and one token past them


@pytest.mark.parametrize("prompts", [(PROMPT, PROMPT), (PROMPT, PROMPT[:5])])
def test_r045_two_requests_of_ten_choices_at_once_all_complete(prompts):
    driver = Driver(max_num_seqs=6)
    for prompt in prompts:
        driver.submit(prompt, n=10, max_tokens=10)
    driver.run()
    driver.check_outputs()
    assert len(driver.reasons) == 20


def test_r047_two_alternating_conversations_never_mix():
    shared, both = Driver(num_pages=40), {}
    for secret in (30, 31):
        both[secret] = [*PROMPT, secret]
    for _turn in range(10):
        for secret, said in both.items():
            out = answer(shared, said[-100:], max_tokens=4)
            assert out == answer(Driver(), said[-100:], max_tokens=4)
            both[secret] = [*said, *out, secret]


def test_r048_pages_are_found_only_by_plans_after_the_one_that_writes_them():
    driver = Driver(max_num_batched_tokens=4, max_num_seqs=2)
    driver.submit(PROMPT, max_tokens=4)
    driver.step()
    driver.step()
    driver.submit(PROMPT, max_tokens=4)  # pages 0 and 1 are issued, page 2 is not
    driver.finish(0, "abort")
    driver.step()
    assert driver.plans[-1].rows[0].start == 8
    driver.run()
    driver.check_outputs()


def test_queue_is_bounded_by_requests_and_by_prompt_tokens():
    driver = Driver(max_num_seqs=1, max_queued_requests=2, max_queued_tokens=30)
    driver.submit(PROMPT, n=4)
    with pytest.raises(QueueFull, match="17 prompt tokens wait and this prompt has 17; at most 30"):
        driver.submit(PROMPT)
    driver.submit([2])
    with pytest.raises(QueueFull, match="2 requests wait; at most 2"):
        driver.submit([2])
    driver.step()
    driver.submit([2])  # the first runs now
    driver.run()
    driver.check_outputs()


def test_f8_deadlines_end_waiting_and_running_sequences_on_time():
    driver = Driver(max_num_seqs=1)
    (running,) = driver.submit(PROMPT, max_tokens=100, ignore_eos=True, deadline_s=5.0)
    (waiting,) = driver.submit(PROMPT, deadline_s=3.0)
    (patient,) = driver.submit(PROMPT, max_tokens=2)
    for _ in range(3):
        driver.step()
    assert driver.scheduler.expire(2.9) == []
    driver.take(driver.scheduler.expire(3.0))
    assert driver.reasons == {waiting: "timeout"}
    driver.take(driver.scheduler.expire(5.5))
    assert driver.reasons[running] == "timeout"
    assert driver.events[waiting][-1].first_scheduled_time is None
    assert driver.events[running][-1].first_scheduled_time == 0.0
    driver.run()
    driver.check_outputs()
    assert patient in driver.reasons
    assert driver.scheduler.stats().finished["timeout"] == 2


def test_finish_is_idempotent_and_ignores_unknown_ids():
    driver = Driver()
    (seq_id,) = driver.submit(PROMPT, max_tokens=50)
    driver.step()
    driver.scheduler.finish(seq_id, "abort")
    driver.scheduler.finish(seq_id, "abort")
    driver.scheduler.finish(99, "abort")
    assert driver.scheduler.has_work()  # its plan is still in flight
    driver.step()
    driver.check_idle()
    assert driver.outputs[seq_id] == []
    assert driver.scheduler.stats().finished == {"abort": 1}


def test_non_finite_logits_end_that_sequence_alone_and_its_pages_are_scrubbed_before_reuse():
    driver = Driver(num_pages=40, max_num_seqs=3)
    bad, good = driver.submit(PROMPT, max_tokens=30)[0], driver.submit(list(range(20, 31)), max_tokens=30)[0]
    while not driver.outputs[bad]:
        driver.step()
    page_ids = {page_id for page_id in driver.device.page_tables[bad] if page_id}
    driver.device.bad_seq_ids.add(bad)
    while bad not in driver.reasons:
        driver.step()
    assert driver.reasons[bad] == "error"
    assert driver.events[bad][-1].token_ids == ()
    third = answer(driver, PROMPT, max_tokens=30)
    assert cached_tokens(driver) == 0
    assert page_ids <= {page_id for plan in driver.plans for page_id in plan.scrub_page_ids}
    assert len(third) > 0
    assert driver.reasons[good] in ("stop", "length")


def test_commit_takes_plans_in_order_and_only_once():
    driver = Driver()
    driver.submit(PROMPT, max_tokens=50, ignore_eos=True)
    scheduler = driver.scheduler
    first, second = scheduler.plan(), scheduler.plan()
    results = [StepTokens(tuple(RowTokens() for _ in plan.rows)) for plan in (first, second)]
    with pytest.raises(AssertionError):
        scheduler.commit(second, results[1])
    scheduler.commit(first, results[0])
    with pytest.raises(AssertionError):
        scheduler.commit(first, results[0])


def test_stop_id_is_named_and_end_of_sequence_is_not():
    def first_event(**options):
        driver = Driver()
        answer(driver, PROMPT, max_tokens=60, **options)
        return driver.events[0][-1]

    token = first_event(ignore_eos=True, min_tokens=5).token_ids[0]
    event = first_event(ignore_eos=True, stop_token_ids=(token,))
    assert (event.finish_reason, event.stop_token_id) == ("stop", token)
    for seed in range(20):
        event = first_event(seed=seed, stop_token_ids=EOS)
        assert event.stop_token_id is None


def test_end_id_that_is_all_a_request_allows_ends_it_below_min_tokens():
    driver = Driver()
    assert answer(driver, PROMPT, max_tokens=9, min_tokens=5, allowed_token_ids=(1,)) == [1]
    assert driver.reasons[0] == "stop"


def test_stats_count_pages_and_peak():
    driver = Driver()
    answer(driver, PROMPT, max_tokens=4, ignore_eos=True)
    stats = driver.scheduler.stats()
    assert (stats.num_pages, stats.num_pages_used, stats.num_pages_cached) == (63, 0, 5)
    assert stats.peak_pages_used == 5
    assert stats.prefix_cache_queries == 17
    stats.finished["length"] = 99
    assert driver.scheduler.stats().finished == {"length": 1}
