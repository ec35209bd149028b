"""Engines for tests that need no second compilation: a new scheduler and loop around programs that are already there.

Everything a scheduler decides (pool size, chunk budget, preemption, caching, overlap) is host state, so one compiled
engine serves every such test. A fresh scheduler knows nothing of what earlier ones left in the pages: garbage there is
part of the test. Variants of one engine are used one after another: a later one writes into the pages that an earlier
one's prefix cache still names.

    loaded = shared_tiny()                                   # compiled once a session
    engine = variant(loaded, num_pages=20, preemption_mode="swap").engine
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from tiny import tiny_engine, tiny_request

from jaxinfer import LLM
from jaxinfer.engine.load import LoadedEngine
from jaxinfer.engine.loop import MAX_IN_FLIGHT, Engine
from jaxinfer.request import CompletionOutput, Request, RequestOutput, SamplingParams
from jaxinfer.schedule.scheduler import Scheduler

PAGE = 16  # positions per page of the shared tiny engine
SLOTS = 8
CONTEXT = 256


@functools.cache
def shared_tiny() -> LoadedEngine:
    """Model T, compiled once: 8 slots, 32 query tokens a step, 4 rounds a dispatch."""
    return tiny_engine(page_size=PAGE, max_num_seqs=SLOTS, max_num_batched_tokens=32, rounds_per_dispatch=4)


def page_size(loaded: LoadedEngine) -> int:
    return loaded.engine.scheduler._state.pool.page_size


def variant(
    loaded: LoadedEngine,
    *,
    max_in_flight: int = MAX_IN_FLIGHT,
    clock: Callable[[], float] = time.monotonic,
    **changes: Any,
) -> LoadedEngine:
    """The same programs and pages under a new scheduler and loop; `changes` are arguments of `Scheduler`."""
    sizes = loaded.programs.sizes
    options: dict[str, Any] = {
        "num_pages": sizes.num_pages,
        "page_size": page_size(loaded),
        "max_num_seqs": sizes.num_slots,
        "max_num_batched_tokens": sizes.max_num_batched_tokens,
        "max_model_len": sizes.max_model_len,
        "eos_token_ids": loaded.tokenizer.eos_token_ids,
        "rounds_per_dispatch": sizes.max_rounds,
        "swap_capacity_pages": 1 << 20,
        "token_buckets": sizes.token_buckets,
        "clock": clock,
    }
    scheduler = Scheduler(**(options | changes))
    engine = Engine(scheduler, loaded.engine.runner, loaded.tokenizer, max_in_flight=max_in_flight, clock=clock)
    return replace(loaded, engine=engine)


def llm_around(loaded: LoadedEngine, **options: Any) -> LLM:
    """An `LLM` whose engine is this one: nothing is loaded or compiled."""
    with mock.patch("jaxinfer.engine.llm.load_engine", return_value=loaded):
        return LLM("memory", use_tqdm=False, **options)


def variant_llm(loaded: LoadedEngine, **changes: Any) -> LLM:
    """`llm_around` a `variant`."""
    return llm_around(variant(loaded, **changes))


def greedy(max_tokens: int = 16, **changes: Any) -> SamplingParams:
    """Greedy to the full length, unless `changes` say otherwise."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | changes))


def prompts_of(seed: int, lengths: Iterable[int], vocab_size: int = 512) -> list[list[int]]:
    """Random prompts of these lengths, without control ids."""
    rng = np.random.default_rng(seed)
    return [rng.integers(8, vocab_size, length).tolist() for length in lengths]


def requests_of(prompts: Sequence[Sequence[int]], params: SamplingParams, **fields: Any) -> list[Request]:
    """One request per prompt; ids are their positions."""
    return [replace(tiny_request(str(i), prompt, params), **fields) for i, prompt in enumerate(prompts)]


def ids_of(outputs: Sequence[RequestOutput], choice: int = 0) -> list[list[int]]:
    return [output.outputs[choice].token_ids for output in outputs]


def first(outputs: Sequence[RequestOutput]) -> CompletionOutput:
    """The only answer of the only prompt."""
    (output,) = outputs
    (answer,) = output.outputs
    return answer


def run(
    engine: Engine,
    requests: Sequence[Request],
    *,
    before_step: Callable[[int], None] = lambda step: None,
    max_steps: int = 100_000,
) -> list[RequestOutput]:
    """Submits together, turns the loop to the end, and fails rather than hang."""
    for request in requests:
        engine.submit(request)
    finished: dict[str, RequestOutput] = {}
    for step in range(max_steps):
        if not engine.has_work():
            return [finished[request.request_id] for request in requests]
        before_step(step)
        finished |= {out.request_id: out for out in engine.step() if out.finished}
    raise AssertionError(f"{len(requests) - len(finished)} requests unfinished after {max_steps} steps")


def preempt_every(engine: Engine, num_steps: int) -> Callable[[int], None]:
    """For `run`: every so many steps forces the next running sequence, in turn, off the device."""
    scheduler = engine.scheduler
    turn = 0

    def before_step(step: int) -> None:
        nonlocal turn
        if step % num_steps == 0:
            running = sorted(scheduler._state.running)
            if running:
                scheduler.force_preempt(running[turn % len(running)])
                turn += 1

    return before_step


def assert_idle(engine: Engine) -> None:
    """Nothing runs, waits or holds a page, and the books balance."""
    engine.scheduler.audit()
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)
    assert not engine.live_request_ids()
    assert engine.runner.num_swapped == 0
