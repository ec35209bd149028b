"""An answer does not depend on its company: batch, slot, arrival order, pool, preemption, overlap. On model T."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from engine.variants import (
    PAGE,
    assert_idle,
    greedy,
    ids_of,
    preempt_every,
    prompts_of,
    requests_of,
    run,
    shared_tiny,
    variant,
)
from oracle import Oracle
from tiny import tiny_params, tiny_request

from jaxinfer.engine.loop import Engine
from jaxinfer.request import Request, SamplingParams

MOST_PREEMPTIONS = 8


def engine_with(**changes) -> Engine:
    return variant(shared_tiny(), **changes).engine


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """The plain loop over the weights of the shared engine."""
    loaded = shared_tiny()
    return Oracle.of(tiny_params(loaded.arch, loaded.rules), loaded.arch)


def mixed_requests(seed: int, count: int, longest: int = 60, max_tokens: int = 24) -> list[Request]:
    """Greedy and seeded requests of many lengths, some sharing a beginning."""
    rng = np.random.default_rng(seed)
    (stem,) = prompts_of(seed, [3 * PAGE])
    requests = []
    for i, prompt in enumerate(prompts_of(seed + 1, rng.integers(1, longest, count))):
        if i % 4 == 3:
            prompt = [*stem[: int(rng.integers(1, len(stem)))], *prompt[:10]]
        if i % 3 == 2:
            params = SamplingParams(max_tokens=int(rng.integers(1, max_tokens)), top_p=0.95, ignore_eos=True)
        else:
            params = greedy(int(rng.integers(1, max_tokens)))
        requests.append(tiny_request(str(i), prompt, params, seed=1000 + i))
    return requests


def alone(requests: Sequence[Request]) -> list[list[int]]:
    """Each request by itself: one step in flight, nothing cached."""
    found = []
    for request in requests:
        found += ids_of(run(engine_with(max_in_flight=1, enable_prefix_caching=False), [request]))
    return found


def test_greedy_answers_are_those_of_the_plain_loop(oracle: Oracle):
    """The engine's one oracle: numpy, float64, no cache. Gaps below 1e-4 may flip in float32; there are none here."""
    prompts = prompts_of(1, [1, 5, 16, 17, 31, 33, 48, 70])
    outputs = run(engine_with(), requests_of(prompts, greedy(20, logprobs=0)))
    for prompt, out in zip(prompts, outputs, strict=True):
        expected = oracle.greedy(prompt, 20)
        assert expected.smallest_gap > 1e-4
        answer = out.outputs[0]
        assert tuple(answer.token_ids) == expected.token_ids
        found = [d[i].logprob for i, d in zip(answer.token_ids, answer.logprobs or (), strict=True)]
        assert found == pytest.approx(expected.logprobs, abs=1e-4)


def test_another_oracle_is_noticed(oracle: Oracle):
    """Mutant: the plain loop over other weights disagrees."""
    loaded = shared_tiny()
    other = Oracle.of(tiny_params(loaded.arch, loaded.rules, seed=1), loaded.arch)
    (prompt,) = prompts_of(1, [5])
    assert other.greedy(prompt, 8).token_ids != oracle.greedy(prompt, 8).token_ids


@pytest.mark.parametrize("num_schedules", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ids_do_not_depend_on_arrival_order_slot_or_neighbours_f5_f17(num_schedules: int):
    """F5: random arrival schedules; F17: seeded draws too. Each request's ids are those of its solo run."""
    requests = mixed_requests(3, 48, max_tokens=10)
    expected = alone(requests)
    rng = np.random.default_rng(4)
    engine = engine_with()
    for schedule in range(num_schedules):
        chosen = rng.choice(len(requests), int(rng.integers(2, 10)), replace=False).tolist()
        arrivals = sorted(int(t) for t in rng.integers(0, 8, len(chosen)))
        found: dict[str, list[int]] = {}
        step = 0
        while arrivals or engine.has_work():
            while arrivals and arrivals[0] <= step:
                engine.submit(requests[chosen[len(chosen) - len(arrivals)]])
                arrivals.pop(0)
            step += 1
            found |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
        wrong = [i for i in chosen if found[str(i)] != expected[i]]
        assert not wrong, f"schedule {schedule}: requests {wrong}"
    assert_idle(engine)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_a_pool_of_40_percent_of_the_need_changes_nothing_f4(mode: str):
    """F4: 64 requests, 8 of them at a time; ids as in a calm run; nobody is preempted more than 8 times."""
    requests = mixed_requests(5, 64, longest=90, max_tokens=60)
    calm = engine_with()
    expected = ids_of(run(calm, requests))
    assert calm.scheduler.stats().num_preemptions == 0
    need = calm.scheduler.stats().peak_pages_used
    longest = max(len(r.prompt_token_ids) + (r.params.max_tokens or 0) for r in requests)
    engine = engine_with(num_pages=max(int(0.4 * need), -(-longest // PAGE)) + 1, preemption_mode=mode)
    outputs = run(engine, requests)
    assert ids_of(outputs) == expected
    stats = engine.scheduler.stats()
    assert stats.num_pages <= 0.5 * need
    assert stats.num_preemptions > 5
    assert (stats.num_swap_outs > 0) == (mode == "swap")
    assert max(o.metrics.num_preemptions for o in outputs) <= MOST_PREEMPTIONS
    assert_idle(engine)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("every", range(1, 8))
def test_forced_preemption_every_few_steps_changes_nothing_f4(mode: str, every: int):
    """F4: k = 1..7, in prefill and in decode; log probabilities stay too (to rounding, or exactly when swapped)."""
    requests = mixed_requests(6, 24, max_tokens=40)
    expected = ids_of(run(engine_with(), requests))
    engine = engine_with(preemption_mode=mode)
    outputs = run(engine, requests, before_step=preempt_every(engine, every))
    assert ids_of(outputs) == expected
    assert engine.scheduler.stats().num_preemptions >= 5
    assert max(o.metrics.num_preemptions for o in outputs) <= MOST_PREEMPTIONS
    assert_idle(engine)


def test_little_room_for_swapped_pages_falls_back_to_recomputing_f4():
    requests = mixed_requests(7, 24, max_tokens=40)
    expected = ids_of(run(engine_with(), requests))
    engine = engine_with(preemption_mode="swap", swap_capacity_pages=6)
    assert ids_of(run(engine, requests, before_step=preempt_every(engine, 1))) == expected
    stats = engine.scheduler.stats()
    assert 0 < stats.num_swap_outs < stats.num_preemptions
    assert_idle(engine)


@pytest.mark.parametrize("budget", [8, 11, 16, 31])
@pytest.mark.parametrize("rounds", [1, 3])
def test_chunk_budgets_and_rounds_change_nothing(budget: int, rounds: int):
    requests = mixed_requests(8, 24, longest=100)
    expected = ids_of(run(engine_with(), requests))
    engine = engine_with(max_num_batched_tokens=budget, rounds_per_dispatch=rounds)
    assert ids_of(run(engine, requests)) == expected
    assert_idle(engine)


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_the_number_of_slots_changes_nothing(slots: int):
    requests = mixed_requests(9, 16)
    expected = ids_of(run(engine_with(), requests))
    assert ids_of(run(engine_with(max_num_seqs=slots), requests)) == expected


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("caches", [False, True])
def test_overlap_and_caching_change_nothing_r039(max_in_flight: int, caches: bool):
    """R039: twice over, so that the second round finds what the first left."""
    requests = mixed_requests(10, 24)
    expected = alone(requests)
    engine = engine_with(max_in_flight=max_in_flight, enable_prefix_caching=caches)
    for _ in range(2):
        assert ids_of(run(engine, requests)) == expected
    assert (engine.scheduler.stats().prefix_cache_hits > 0) == caches


def test_priorities_change_the_order_and_nothing_else():
    requests = mixed_requests(11, 32)
    expected = ids_of(run(engine_with(), requests))
    ranked = [
        tiny_request(
            r.request_id, r.prompt_token_ids, SamplingParams(**(vars(r.params) | {"priority": -i})), seed=r.seed
        )
        for i, r in enumerate(requests)
    ]
    engine = engine_with(max_num_seqs=2)
    order: list[int] = []
    for request in ranked:
        engine.submit(request)
    found: dict[str, list[int]] = {}
    while engine.has_work():
        for out in engine.step():
            if out.finished:
                order.append(int(out.request_id))
                found[out.request_id] = out.outputs[0].token_ids
    assert [found[str(i)] for i in range(32)] == expected
    assert np.corrcoef(order, np.arange(32))[0, 1] < -0.9
