"""Times single dispatches of the engine's own programs: plans of its scheduler, run by its runner, one at a time.

What is timed is `runner.submit(plan)` and `runner.collect(pending)` together: packing, the copy to the device, the
compiled program, and the copy of the tokens back. Planning and committing are not; nor is text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.engine import LoadedEngine
from jaxinfer.errors import ConfigError
from jaxinfer.request import Request, SamplingParams
from jaxinfer.schedule.step_plan import StepPlan, TokenEvent

SPARE_TOKENS = 128  # a sequence may take so many decode rows in mixed steps while others are still in prefill


@dataclass(frozen=True)
class DecodeTimes:
    """Decode dispatches of one visit.

    Attributes:
      round_s: per dispatch, seconds per round.
      mean_context: positions attended to, mean over rows and rounds.
    """

    round_s: tuple[float, ...]
    mean_context: float


def scattered_lengths(rows: int, context: int, num_rounds: int) -> list[int]:
    """Prompt lengths whose contexts spread evenly from half to 1.5 times `context`, halfway through `num_rounds`."""
    contexts = np.linspace(0.5 * context, 1.5 * context, rows) if rows > 1 else [context]
    return [max(1, round(c - num_rounds / 2)) for c in contexts]


def time_decode(loaded: LoadedEngine, rows: int, context: int, num_dispatches: int) -> DecodeTimes:
    """Decodes `rows` sequences at once; each call has the same prompts, so that a later one finds them cached.

    Raises:
      ConfigError: the engine has too few slots or positions.
    """
    scheduler = loaded.engine.scheduler
    num_slots, rounds = loaded.programs.sizes.num_slots, scheduler.limits.rounds_per_dispatch
    if rows > num_slots:
        raise ConfigError(f"rows is {rows}; max_num_seqs is {num_slots}; raise it")
    num_rounds = num_dispatches * rounds
    lengths = scattered_lengths(rows, context, num_rounds)
    num_output = num_rounds + SPARE_TOKENS
    _check_positions(loaded, max(lengths) + num_output)
    requests = [_request(loaded, f"decode {i}", n, num_output, "decode") for i, n in enumerate(lengths)]
    known = {scheduler.submit(r)[0]: len(r.prompt_token_ids) for r in requests}
    times: list[float] = []
    contexts: list[float] = []
    while len(times) < num_dispatches:
        plan = scheduler.plan()
        assert plan is not None, "sequences with tokens left can always run"
        seconds, events = _run(loaded, plan)
        if plan.kind == "decode" and len(plan.rows) == rows and plan.num_rounds == rounds:
            times.append(seconds / rounds)
            contexts.append(float(np.mean(list(known.values()))) + (rounds - 1) / 2)
        for event in events:
            known[event.seq_id] += len(event.token_ids)
    for seq_id in known:
        scheduler.finish(seq_id, "abort")
    return DecodeTimes(tuple(times), float(np.mean(contexts)))


def time_prefill(loaded: LoadedEngine, num_tokens: int, salt: str) -> float:
    """Seconds from the first dispatch of a prompt to its first output token; over several steps if it is long.

    Args:
      salt: a namespace not used before: nothing of the prompt may be cached.
    """
    _check_positions(loaded, num_tokens + 1)
    scheduler = loaded.engine.scheduler
    scheduler.submit(_request(loaded, f"prefill {salt}", num_tokens, 1, salt))
    total = 0.0
    while scheduler.has_work():
        plan = scheduler.plan()
        assert plan is not None, "one sequence alone can always run"
        total += _run(loaded, plan)[0]
    return total


def _run(loaded: LoadedEngine, plan: StepPlan) -> tuple[float, Sequence[TokenEvent]]:
    runner = loaded.engine.runner
    start = time.perf_counter()
    tokens = runner.collect(runner.submit(plan))
    seconds = time.perf_counter() - start
    return seconds, loaded.engine.scheduler.commit(plan, tokens)


def _request(loaded: LoadedEngine, request_id: str, num_tokens: int, max_tokens: int, salt: str) -> Request:
    rng = np.random.default_rng(num_tokens)
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(rng.integers(loaded.arch.vocab_size, size=num_tokens).tolist()),
        params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        seed=0,
        arrival_time=time.monotonic(),
        cache_namespace=salt,
    )


def _check_positions(loaded: LoadedEngine, needed: int) -> None:
    limit = loaded.memory.max_model_len
    if needed > limit:
        raise ConfigError(
            f"this needs {needed} positions; max_model_len is {limit}; raise it or measure shorter contexts"
        )
