"""Random traffic against the fake device: every answer is the oracle's, whatever the pool, policy, overlap or accident.

RELIABILITY.md F4 (each sequence preempted at most 8 times), F5 (answers do not depend on neighbours or order), and the
cases R005, R039, R041 and R047 in volume.
"""

import random

import pytest
from fake_device import Driver, random_prompt

from jaxinfer.config import EVICTION_POLICIES
from jaxinfer.errors import PromptTooLong

REQUESTS_PER_TRIAL = 100
MAX_LEN = 40


def make_driver(rng: random.Random) -> Driver:
    page_size = rng.choice([1, 2, 4, 8])
    return Driver(
        overlap=rng.random() < 0.7,
        page_size=page_size,
        num_pages=1 + max(2, rng.randint(MAX_LEN, 4 * MAX_LEN) // page_size),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.choice([1, 3, 8, 16, 64]),
        max_model_len=MAX_LEN + rng.randint(-8, 8),
        rounds_per_dispatch=rng.choice([1, 2, 4, 8]),
        enable_prefix_caching=rng.random() < 0.8,
        eviction_policy=rng.choice(EVICTION_POLICIES),
        preemption_mode=rng.choice(["recompute", "swap"]),
        swap_capacity_pages=rng.choice([0, 5, 50]),
        token_buckets=rng.choice([None, (4, 8, 16, 64)]),
    )


class Traffic:
    """Submits requests and makes accidents happen.

    Attributes:
      cuts: sequence id -> (output tokens seen when a stop string is found, output tokens kept).
      error_rate: chance per step that some running sequence computes non-finite logits.
    """

    def __init__(self, driver: Driver, rng: random.Random, accident_rate: float, error_rate: float):
        self.driver, self.rng = driver, rng
        self.accident_rate, self.error_rate = accident_rate, error_rate
        self.cuts: dict[int, tuple[int, int]] = {}
        self.num_left = REQUESTS_PER_TRIAL
        self.alive: list[int] = []
        driver.on_event = self.find_stop

    def find_stop(self, event) -> None:
        at, kept = self.cuts.get(event.seq_id, (1_000, 0))
        if event.finish_reason is None and len(self.driver.outputs[event.seq_id]) >= at:
            self.driver.finish(event.seq_id, "cut", kept)

    def prompt(self) -> tuple[list[int], str]:
        """A new prompt, or the next turn of an ended conversation so that cached answers are found too; namespace."""
        rng, driver = self.rng, self.driver
        if not driver.reasons or rng.random() < 0.6:
            return random_prompt(rng, MAX_LEN), rng.choice(["", "", "b"])
        seq_id = rng.choice(list(driver.reasons)[-8:])
        request = driver.requests[seq_id][0]
        said = [*request.prompt_token_ids, *driver.outputs[seq_id]]
        return [*said, rng.randrange(2, 50)][:MAX_LEN], request.cache_namespace

    def submit(self) -> None:
        rng, driver = self.rng, self.driver
        self.num_left -= 1
        max_tokens = rng.choice([None, 1, 2, 5, 12, 30])
        options = {
            "n": rng.choice([1, 1, 1, 2, 4]),
            "priority": rng.choice([0, 0, 0, 1, -1]),
            "ignore_eos": rng.random() < 0.5,
            "stop_token_ids": (rng.randrange(50),) if rng.random() < 0.3 else (),
            "min_tokens": rng.choice([0, 0, 3]) if max_tokens is None or max_tokens > 3 else 0,
            "prompt_logprobs": 1 if rng.random() < 0.1 else None,
            "deadline_s": rng.uniform(1, 60) if rng.random() < 0.1 else None,
            "max_tokens": max_tokens,
        }
        prompt, namespace = self.prompt()
        try:
            seq_ids = driver.submit(prompt, namespace=namespace, seed=rng.randrange(100), **options)
        except PromptTooLong:
            return
        self.alive.extend(seq_ids)
        for seq_id in seq_ids:
            if rng.random() < 0.1:
                at = rng.randint(1, 10)
                self.cuts[seq_id] = (at, rng.randint(0, at))

    def step(self) -> None:
        rng, driver = self.rng, self.driver
        driver.clock.now += rng.random()
        while self.num_left and rng.random() < 0.5:
            self.submit()
        self.alive = [seq_id for seq_id in self.alive if seq_id not in driver.reasons]
        if self.alive and rng.random() < self.accident_rate:
            seq_id = rng.choice(self.alive)
            if rng.random() < 0.2:
                driver.finish(seq_id, "abort")
            else:
                driver.scheduler.force_preempt(seq_id)
        if self.alive and rng.random() < self.error_rate:
            driver.device.bad_seq_ids.add(rng.choice(self.alive[:8]))
        driver.take(driver.scheduler.expire(driver.clock.now))
        driver.step()


def run_trial(seed: int) -> Driver:
    rng = random.Random(seed)
    driver = make_driver(rng)
    traffic = Traffic(driver, rng, accident_rate=rng.choice([0.0, 0.1, 0.5]), error_rate=rng.choice([0.0, 0.0, 0.05]))
    num_steps = 0
    while traffic.num_left or driver.scheduler.has_work():
        traffic.step()
        num_steps += 1
        if num_steps % 5 == 0:
            driver.scheduler.audit()
        assert num_steps < 30_000, "no end in sight"
    driver.check_idle()
    driver.check_outputs()
    check_metrics(driver)
    return driver


def check_metrics(driver: Driver) -> None:
    for seq_id, events in driver.events.items():
        assert all(event.num_preemptions <= 8 for event in events)
        request, index = driver.requests[seq_id]
        scores = [score for event in events for score in event.prompt_logprobs]
        if request.params.prompt_logprobs is None or index:
            assert not scores
        elif driver.reasons[seq_id] in ("stop", "length"):
            prompt = request.prompt_token_ids
            wanted = [(-float(p), prompt[p] + 1) for p in range(1, len(prompt))]
            assert [(score.logprob, score.rank) for score in scores] == wanted
    stats = driver.scheduler.stats()
    assert sum(stats.finished.values()) == len(driver.requests)


@pytest.mark.parametrize("first_seed", range(0, 16, 4))
def test_random_traffic_has_the_oracles_answers_and_leaks_nothing(first_seed):
    for seed in range(first_seed, first_seed + 4):
        run_trial(seed)


@pytest.mark.slow
def test_ten_thousand_random_requests_have_the_oracles_answers_and_leak_nothing():
    num_preempted = sum(run_trial(seed).scheduler.stats().num_preemptions for seed in range(100, 200))
    assert num_preempted > 500
