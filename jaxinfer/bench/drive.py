"""Runs requests through an engine and notes when each token arrived.

The same loop as `LLM.generate`, text included, with a clock beside it: `RequestMetrics` keeps the time of the first and
the last token only. Tokens of one dispatch arrive together, so many gaps are 0; that is what a client sees.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.bench.workload import Work
from jaxinfer.engine import LoadedEngine
from jaxinfer.engine.metrics import engine_metrics
from jaxinfer.request import Request, RequestOutput, SamplingParams

COUNTERS = (
    "host_seconds_total",
    "busy_seconds_total",
    "query_tokens_total",
    "padded_tokens_total",
    "recompiles_total",
    "num_preemptions_total",
    "num_steps_total",
    "prefix_cache_hits_total",
)


@dataclass(frozen=True)
class Answer:
    """One finished request.

    Attributes:
      first_token_s: from submission to the first token.
      gaps_s: between neighbouring tokens.
      finish_reason: as in `CompletionOutput`.
    """

    id: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    gaps_s: tuple[float, ...]
    finish_reason: str | None


@dataclass(frozen=True)
class Run:
    """A workload, done once.

    Attributes:
      seconds: from the first submission to the last token.
      counters: growth of the engine's counters.
      num_passes: passes over all weights asked for: a mixed step is one, a decode dispatch as many as it has rounds.
    """

    answers: tuple[Answer, ...]
    seconds: float
    counters: dict[str, float]
    num_passes: int


def run_at_once(loaded: LoadedEngine, works: Sequence[Work], salt: str) -> Run:
    """All requests submitted together; they share cached prefixes with each other, and with runs of the same salt."""
    return _counted(loaded, lambda: _drive(loaded, works, [salt] * len(works)))


def run_one_by_one(loaded: LoadedEngine, works: Sequence[Work], salt: str) -> Run:
    """Each request submitted when the one before has ended; nothing is shared."""

    def drive() -> list[Answer]:
        return [_drive(loaded, [work], [f"{salt}/{work.id}"])[0] for work in works]

    return _counted(loaded, drive)


def _counted(loaded: LoadedEngine, drive: Callable[[], list[Answer]]) -> Run:
    stats = loaded.engine.runner.stats
    before, passes_before = engine_metrics(loaded), stats.num_rounds
    start = time.monotonic()
    answers = drive()
    seconds = time.monotonic() - start
    while loaded.engine.has_work():  # plans made before the last answer was known
        loaded.engine.step()
    after = engine_metrics(loaded)
    growth = {name: after[name] - before[name] for name in COUNTERS}
    return Run(tuple(answers), seconds, growth, stats.num_rounds - passes_before)


def _drive(loaded: LoadedEngine, works: Sequence[Work], salts: Sequence[str]) -> list[Answer]:
    engine = loaded.engine
    start = time.monotonic()
    arrivals: dict[str, list[float]] = {}
    outputs: dict[str, RequestOutput] = {}
    for work, salt in zip(works, salts, strict=True):
        params = SamplingParams(temperature=0.0, max_tokens=work.max_tokens, ignore_eos=work.ignore_eos)
        request_id = f"{salt}/{work.id}"
        engine.submit(
            Request(
                request_id=request_id,
                prompt_token_ids=work.prompt_token_ids,
                params=params,
                seed=0,
                arrival_time=start,
                cache_namespace=salt,
            )
        )
        arrivals[request_id] = []
    num_open = len(works)
    while num_open:
        changed = engine.step()
        now = time.monotonic()
        for output in changed:
            times = arrivals[output.request_id]
            times += [now] * (len(output.outputs[0].token_ids) - len(times))
            if output.finished:
                outputs[output.request_id] = output
                num_open -= 1
    return [
        _answer(work.id, outputs[rid], times, start) for work, (rid, times) in zip(works, arrivals.items(), strict=True)
    ]


def _answer(work_id: str, output: RequestOutput, times: list[float], start: float) -> Answer:
    completion = output.outputs[0]
    return Answer(
        id=work_id,
        token_ids=tuple(completion.token_ids),
        prompt_tokens=len(output.prompt_token_ids),
        cached_tokens=completion.metrics.cached_tokens,
        first_token_s=times[0] - start,
        gaps_s=tuple(b - a for a, b in itertools.pairwise(times)),
        finish_reason=completion.finish_reason,
    )
