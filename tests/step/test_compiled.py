"""Buckets, the set of programs, what they need beside their arguments, and the count of traces."""

from __future__ import annotations

import itertools
import random

import jax
import jax.numpy as jnp
import pytest
from tiny import run_all, run_greedy, shared_engine, tiny_engine, tiny_request

from jaxinfer.engine.load import LoadedEngine
from jaxinfer.request import SamplingParams
from jaxinfer.step import CompileCounter, ProgramSizes
from jaxinfer.step.compiled import buckets


@pytest.mark.parametrize(
    ("low", "high", "want"),
    [
        (1, 1, (1,)),
        (1, 4, (1, 2, 4)),
        (1, 6, (1, 2, 4, 6)),
        (16, 64, (16, 32, 64)),
        (16, 100, (16, 32, 64, 100)),
        (8, 8, (8,)),
    ],
)
def test_buckets_are_powers_of_two_up_to_the_largest_itself(low, high, want):
    assert buckets(low, high) == want


@pytest.mark.parametrize("num_slots", [1, 3, 4, 33])
@pytest.mark.parametrize("max_tokens", [4, 16, 100])
def test_every_size_has_a_bucket_of_less_than_twice_as_much(num_slots, max_tokens):
    sizes = ProgramSizes(
        num_slots=num_slots,
        max_num_batched_tokens=max_tokens,
        max_rounds=4,
        max_model_len=64,
        num_pages=9,
        table_width=4,
    )
    for need, all_sizes in itertools.chain(
        ((n, sizes.row_buckets) for n in range(1, num_slots + 1)),
        ((n, sizes.token_buckets) for n in range(1, max_tokens + 1)),
    ):
        got = min(size for size in all_sizes if size >= need)
        assert got < 2 * need or got <= 16
    assert sizes.row_buckets[-1] == num_slots
    assert sizes.token_buckets[-1] == max_tokens
    assert all(sizes.mixed_rows(tokens) == min(tokens, num_slots) for tokens in sizes.token_buckets)


def test_warm_up_compiles_every_program():
    loaded = shared_engine()
    keys = loaded.programs.keys()
    assert len(set(keys)) == len(keys)
    assert loaded.programs.num_compiled == len(keys)


def test_the_counter_sees_a_trace_and_no_call():
    counter = CompileCounter()
    f = jax.jit(lambda x: x + 1)
    x = jnp.zeros(3)
    before = counter.num_traces
    f(x)
    traced = counter.num_traces
    assert traced > before
    f(x)
    assert counter.num_traces == traced


def test_nothing_is_traced_at_any_concurrency():
    """R174: 1, 2, ... more than there are slots, one by one."""
    loaded = shared_engine()
    run_greedy(loaded, [[10]], max_tokens=2)
    before = loaded.compile_counter.num_traces
    for count in range(1, 7):
        run_greedy(loaded, [[10 + i, 20] for i in range(count)], max_tokens=5)
    assert loaded.compile_counter.num_traces == before


def _random_params(rng: random.Random) -> SamplingParams:
    """Any mix of parameters, each present half of the time."""
    options = {
        "temperature": rng.choice([0.0, 0.7, 2.0]),
        "top_k": rng.choice([1, 5, 100_000]),
        "top_p": 0.5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.3,
        "logprobs": rng.choice([0, 5, 20]),
        "prompt_logprobs": 2,
        "logit_bias": {5: 2.0, 6: -100.0},
        "min_tokens": 2,
        "stop_token_ids": [7, 8],
        "allowed_token_ids": list(range(100, 200)),
        "seed": 3,
        "n": 2,
        "ignore_eos": True,
    }
    return SamplingParams(
        max_tokens=rng.randint(2, 60), **{k: v for k, v in options.items() if rng.random() < 0.5 or k == "temperature"}
    )


def drive_random_requests(loaded: LoadedEngine, num_batches: int) -> None:
    """Prompts of all lengths, every sampling parameter, and an abort in each batch."""
    rng = random.Random(0)
    for batch in range(num_batches):
        requests = [
            tiny_request(f"r{batch}-{i}", [rng.randrange(512) for _ in range(rng.randint(1, 90))], _random_params(rng))
            for i in range(8)
        ]
        for request in requests[1:]:
            loaded.engine.submit(request)
        for _ in range(5):
            loaded.engine.step()
        loaded.engine.abort(requests[1].request_id)
        run_all(loaded, requests[:1])


def test_nothing_is_traced_over_random_requests():
    loaded = shared_engine()
    before = loaded.compile_counter.num_traces
    drive_random_requests(loaded, 3)
    assert loaded.compile_counter.num_traces == before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_nothing_is_traced_over_preemptions(mode):
    """A pool of eleven pages for four sequences of up to ten."""
    loaded = tiny_engine(num_pages=12, preemption_mode=mode)
    drive_random_requests(loaded, 6)
    stats = loaded.engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_swap_outs > 0) == (mode == "swap")
    assert loaded.num_recompiles == 0


KINDS = [("decode", 4), ("decode", 1), ("mixed", 32), ("mixed", 16), ("scrub",), ("copy_in",)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_no_program_copies_the_pool(kind):
    """A pool of 32 MiB in four arrays: a copy of one, 8 MiB, would show among the temporaries."""
    loaded = shared_engine()
    assert loaded.memory.pool_bytes == 32 << 20
    analysis = loaded.programs.get(kind).memory_analysis()
    assert analysis.temp_size_in_bytes < 4 << 20
    assert analysis.alias_size_in_bytes >= loaded.memory.pool_bytes, "the pool is updated in place"


def test_a_program_left_out_of_warm_up_is_counted_when_it_is_needed():
    loaded = tiny_engine(warm_up=False)
    before = loaded.num_recompiles
    loaded.programs.get(("copy_out",))
    assert loaded.num_recompiles > before
    before = loaded.num_recompiles
    loaded.programs.get(("copy_out",))
    assert loaded.num_recompiles == before
