"""The figures of a run, as numbers and as a table. Pure arithmetic; nothing is measured here."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxinfer.bench.drive import Run
from jaxinfer.version import __version__


@dataclass(frozen=True)
class Spread:
    """Of a set of times, seconds."""

    mean: float
    p50: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        """None of nothing. Percentiles interpolate between neighbours."""
        if not values:
            return None
        p50, p99 = np.percentile(np.asarray(values, np.float64), [50, 99])
        return Spread(float(np.mean(values)), float(p50), float(p99))


@dataclass(frozen=True)
class Figures:
    """One run in numbers. Times are seconds.

    Attributes:
      ttft: over requests.
      itl: over all gaps between neighbouring tokens of all requests.
      tpot: over requests: its mean gap.
      host_overhead_ratio: time the loop did not wait for the device, of the time it worked.
      padded_ratio: padding among the query tokens of mixed steps; None without a mixed step.
    """

    seconds: float
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    cached_tokens: int
    num_steps: int
    num_passes: int
    num_preemptions: int
    num_recompiles: int
    host_overhead_ratio: float
    padded_ratio: float | None


def figures(run: Run) -> Figures:
    """The numbers of a run."""
    answers, counters = run.answers, run.counters
    prompt_tokens = sum(a.prompt_tokens for a in answers)
    output_tokens = sum(len(a.token_ids) for a in answers)
    padded = counters["padded_tokens_total"]
    busy = counters["busy_seconds_total"]
    return Figures(
        seconds=run.seconds,
        num_requests=len(answers),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        output_tokens_per_s=output_tokens / run.seconds,
        total_tokens_per_s=(prompt_tokens + output_tokens) / run.seconds,
        ttft=Spread.of([a.first_token_s for a in answers]),
        itl=Spread.of([gap for a in answers for gap in a.gaps_s]),
        tpot=Spread.of([statistics.fmean(a.gaps_s) for a in answers if a.gaps_s]),
        cached_tokens=sum(a.cached_tokens for a in answers),
        num_steps=int(counters["num_steps_total"]),
        num_passes=run.num_passes,
        num_preemptions=int(counters["num_preemptions_total"]),
        num_recompiles=int(counters["recompiles_total"]),
        host_overhead_ratio=counters["host_seconds_total"] / busy if busy else 0.0,
        padded_ratio=1 - counters["query_tokens_total"] / padded if padded else None,
    )


def median_run(runs: Sequence[Run]) -> Run:
    """The run whose time is the median (the quicker of the middle two): its figures belong together."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def rate(run: Run) -> float:
    """Output tokens per second."""
    return sum(len(a.token_ids) for a in run.answers) / run.seconds


def speedups(at_once: Sequence[Run], one_by_one: Sequence[Run]) -> list[float]:
    """Throughput all at once over one by one, pair by pair, in the order they ran."""
    return [rate(a) / rate(b) for a, b in zip(at_once, one_by_one, strict=True)]


@dataclass(frozen=True)
class Agreement:
    """Answers compared with expected ids.

    Attributes:
      num_equal, num_compared: requests.
      num_equal_tokens, num_tokens: expected tokens, and those up to the first that differs.
      differing: ids of requests that differ, or were not answered.
    """

    num_equal: int
    num_compared: int
    num_equal_tokens: int
    num_tokens: int
    differing: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        return self.num_equal == self.num_compared > 0


def compare(answers: dict[str, Sequence[int]], expected: dict[str, list[int]]) -> Agreement:
    """Compares the requests that are in both; a request without expectation counts as differing."""
    differing: list[str] = []
    num_equal_tokens = num_tokens = 0
    for work_id, ids in answers.items():
        wanted = expected.get(work_id)
        if wanted is None or list(ids) != wanted:
            differing.append(work_id)
        for i, token_id in enumerate(wanted or ()):
            if i >= len(ids) or ids[i] != token_id:
                break
            num_equal_tokens += 1
        num_tokens += len(wanted or ())
    return Agreement(len(answers) - len(differing), len(answers), num_equal_tokens, num_tokens, tuple(differing))


def where_measured() -> dict[str, Any]:
    """The machine and the versions, for the record."""
    return {
        "jaxinfer": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "processor": _cpu_name(),
        "device": jax.devices()[0].device_kind,
        "num_devices": jax.device_count(),
    }


def write_json(path: Path | None, record: dict[str, Any]) -> None:
    """Writes a record when a file was asked for."""
    if path is not None:
        path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """On the terminal; wide enough to keep every cell on a line where the output is not a terminal."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)


def ms(seconds: float | None) -> str:
    """Milliseconds in words."""
    return "-" if seconds is None else f"{1e3 * seconds:,.1f} ms"


def spread(value: Spread | None) -> str:
    """Mean, median and 99th percentile in words."""
    return "-" if value is None else f"{ms(value.mean)} / {ms(value.p50)} / {ms(value.p99)}"


def share(ratio: float | None) -> str:
    """A ratio in words."""
    return "-" if ratio is None else f"{100 * ratio:.1f} %"


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
