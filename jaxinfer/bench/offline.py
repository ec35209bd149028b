"""`bench offline`: a whole workload all at once, beside the same work one request after another.

A run is timed from the first submission to the last token; loading and compiling are over by then. The prefix cache is
empty at the start of each run, because each has a namespace of its own; requests of one run may share.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from jaxinfer.bench.costs import Answered, Cost, kv_item_bytes, workload_cost
from jaxinfer.bench.drive import Run, run_at_once, run_one_by_one
from jaxinfer.bench.machine import MachineRates, measure_machine
from jaxinfer.bench.options import Offline, flat_options
from jaxinfer.bench.report import (
    Agreement,
    Spread,
    compare,
    figures,
    median_run,
    print_table,
    rate,
    share,
    speedups,
    spread,
    where_measured,
    write_json,
)
from jaxinfer.bench.workload import SYNTHETIC_SIZE, Work, check_fits, read_expected, read_workload, synthetic_workload
from jaxinfer.engine import LLM, LoadedEngine
from jaxinfer.engine.metrics import engine_metrics

MAX_SEQS = 32
WARM_UP = Work(id="warm-up", prompt_token_ids=(1,) * 20, max_tokens=4, ignore_eos=True)


def run_offline(command: Offline) -> int:
    """Loads, measures and prints; returns the exit code."""
    works = None if command.workload is None else read_workload(command.workload)[: command.limit]
    expected = None if command.expect_ids is None else read_expected(command.expect_ids)
    count = len(works) if works is not None else min(SYNTHETIC_SIZE, command.limit or SYNTHETIC_SIZE)
    llm = LLM(**flat_options(command.engine, max_num_seqs=min(count, MAX_SEQS)))
    loaded = llm.loaded
    if works is None:
        works = synthetic_workload(loaded.arch.vocab_size)[:count]
    check_fits(works, loaded.arch.vocab_size, loaded.memory.max_model_len)

    other = None
    if command.other_attention is not None:
        options = flat_options(command.engine, max_num_seqs=min(count, MAX_SEQS))
        other = LLM(**{**options, "attention": command.other_attention, "page_size": None}).loaded
    runs = measure(loaded, works, command.repeat, command.baseline, other)
    metrics = engine_metrics(loaded)  # before the machine is measured: that takes memory too
    machine = measure_machine() if command.measure_machine else None
    record = summarize(loaded, runs, metrics, machine)
    answers: dict[str, Sequence[int]] = {a.id: a.token_ids for a in runs.at_once[0].answers}
    agreements = [
        compare({a.id: a.token_ids for a in run.answers}, expected)
        for run in (*runs.at_once, *runs.one_by_one, *runs.other_attention)
        if expected is not None
    ]
    record["agreement"] = [dataclasses.asdict(a) for a in agreements]
    record["token_ids"] = {work_id: list(ids) for work_id, ids in answers.items()}
    show(record, agreements)
    write_json(command.json, record)
    return 0 if all(a.is_whole for a in agreements) else 1


@dataclass(frozen=True)
class Runs:
    """The runs of each kind, in the order they were made.

    Attributes:
      at_once: the engine as configured, all requests at once.
      one_by_one: the same engine, one request after another.
      other_attention: another engine, all at once.
    """

    at_once: list[Run] = field(default_factory=list)
    one_by_one: list[Run] = field(default_factory=list)
    other_attention: list[Run] = field(default_factory=list)


def measure(
    loaded: LoadedEngine, works: Sequence[Work], repeat: int, with_baseline: bool, other: LoadedEngine | None = None
) -> Runs:
    """Takes the kinds in turn, so that a change of the machine's load meets all."""
    runs = Runs()
    for engine in (loaded, *([] if other is None else [other])):
        run_at_once(engine, [WARM_UP], "warm-up")
    for i in range(repeat):
        runs.at_once.append(run_at_once(loaded, works, f"at once {i}"))
        _tell(f"run {i + 1} of {repeat}, all at once: {rate(runs.at_once[-1]):.1f} output tokens/s")
        if with_baseline:
            runs.one_by_one.append(run_one_by_one(loaded, works, f"one by one {i}"))
            _tell(f"run {i + 1} of {repeat}, one by one: {rate(runs.one_by_one[-1]):.1f} output tokens/s")
        if other is not None:
            runs.other_attention.append(run_at_once(other, works, f"at once {i}"))
            _tell(
                f"run {i + 1} of {repeat}, {other.attention} attention: "
                f"{rate(runs.other_attention[-1]):.1f} output tokens/s"
            )
    return runs


def summarize(
    loaded: LoadedEngine,
    runs: Runs,
    metrics: dict[str, Any],
    machine: MachineRates | None,
) -> dict[str, Any]:
    """Everything measured, ready for JSON; the top figures are those of the median run."""
    at_once, one_by_one = runs.at_once, runs.one_by_one
    median = median_run(at_once)
    cost = run_cost(loaded, median)
    record: dict[str, Any] = {
        "where": where_measured(),
        "model": loaded.source,
        "dtype": loaded.dtype,
        "config": dataclasses.asdict(loaded.config),
        "attention": metrics["attention"],
        "max_num_seqs": loaded.programs.sizes.num_slots,
        "at_once": dataclasses.asdict(figures(median)),
        "at_once_rates": [rate(run) for run in at_once],
        "cost": dataclasses.asdict(cost),
        "peak_memory_bytes": metrics["device_memory_peak_bytes"],
        "peak_pages_used": metrics["peak_pages_used"],
        "num_pages": metrics["num_pages"],
        "memory": metrics["memory"],
        "start_seconds": metrics["start_seconds"],
    }
    if machine is not None:
        record["machine"] = dataclasses.asdict(machine)
        record["bandwidth_ratio"] = cost.bytes / median.seconds / machine.read_bytes_per_s
        record["flops_ratio"] = cost.flops / median.seconds / machine.flops_per_s
    if one_by_one:
        ratios = speedups(at_once, one_by_one)
        record["one_by_one"] = dataclasses.asdict(figures(median_run(one_by_one)))
        record["one_by_one_rates"] = [rate(run) for run in one_by_one]
        record["speedups"] = ratios
        record["speedup"] = statistics.median(ratios)
    if runs.other_attention:
        ratios = speedups(at_once, runs.other_attention)
        record["other_attention"] = dataclasses.asdict(figures(median_run(runs.other_attention)))
        record["other_attention_rates"] = [rate(run) for run in runs.other_attention]
        record["attention_speedups"] = ratios
        record["attention_speedup"] = statistics.median(ratios)
    return record


def run_cost(loaded: LoadedEngine, run: Run) -> Cost:
    """Least work of a run."""
    kv_dtype = loaded.config.model.kv_cache_dtype
    return workload_cost(
        loaded.arch,
        [Answered(a.prompt_tokens, a.cached_tokens, len(a.token_ids)) for a in run.answers],
        run.num_passes,
        jnp.dtype(loaded.dtype).itemsize,
        kv_item_bytes(loaded.arch, loaded.dtype if kv_dtype == "auto" else kv_dtype),
    )


def show(record: dict[str, Any], agreements: Sequence[Agreement]) -> None:
    """The table on the terminal."""
    kinds = {"at_once": "all at once", "one_by_one": "one by one", "other_attention": "other attention"}
    runs = [record[kind] for kind in kinds if kind in record]
    names = ["", *(name for kind, name in kinds.items() if kind in record)]

    def line(name: str, say) -> list[str]:
        return [name, *(say(run) for run in runs)]

    rows = [
        line("output tokens/s", lambda r: f"{r['output_tokens_per_s']:.1f}"),
        line("seconds", lambda r: f"{r['seconds']:.2f}"),
        line("requests", lambda r: str(r["num_requests"])),
        line("prompt tokens", lambda r: f"{r['prompt_tokens']:,}"),
        line("output tokens", lambda r: f"{r['output_tokens']:,}"),
        line("cached prompt tokens", lambda r: f"{r['cached_tokens']:,}"),
        line("TTFT mean / p50 / p99", lambda r: _spread(r["ttft"])),
        line("ITL mean / p50 / p99", lambda r: _spread(r["itl"])),
        line("TPOT mean / p50 / p99", lambda r: _spread(r["tpot"])),
        line("steps, passes over the weights", lambda r: f"{r['num_steps']:,}, {r['num_passes']:,}"),
        line("host overhead", lambda r: share(r["host_overhead_ratio"])),
        line("padding in mixed steps", lambda r: share(r["padded_ratio"])),
        line("preemptions, recompiles", lambda r: f"{r['num_preemptions']}, {r['num_recompiles']}"),
    ]
    rows += _whole_process(record, len(runs))
    rows += [
        [f"ids as expected, run {i + 1}", f"{a.num_equal} of {a.num_compared}", *[""] * (len(runs) - 1)]
        for i, a in enumerate(agreements)
    ]
    print_table(f"{record['model']} {record['dtype']}, {record['where']['processor']}", names, rows)
    for i, agreement in enumerate(agreements):
        if agreement.differing:
            print(f"run {i + 1}: ids differ in {', '.join(agreement.differing)}")


def _whole_process(record: dict[str, Any], num_runs: int) -> list[list[str]]:
    """Figures that belong to the process, or to the median run at once."""
    rows = [
        ["peak memory", f"{record['peak_memory_bytes'] / 1e9:.2f} GB"],
        ["pages peak", f"{record['peak_pages_used']:,} of {record['num_pages']:,}"],
    ]
    if "machine" in record:
        machine = record["machine"]
        reads, flops = record["bandwidth_ratio"], record["flops_ratio"]
        rows += [
            ["memory bandwidth reached", f"{share(reads)} of {machine['read_bytes_per_s'] / 1e9:.1f} GB/s"],
            ["arithmetic reached", f"{share(flops)} of {machine['flops_per_s'] / 1e9:.1f} GFLOP/s"],
        ]
    if "speedup" in record:
        pairs = ", ".join(f"{r:.2f}" for r in record["speedups"])
        rows.append(["at once / one by one", f"{record['speedup']:.2f} x (pairs: {pairs})"])
    if "attention_speedup" in record:
        pairs = ", ".join(f"{r:.2f}" for r in record["attention_speedups"])
        name = record["attention"]["implementation"]
        rows.append([f"{name} / other attention", f"{record['attention_speedup']:.2f} x (pairs: {pairs})"])
    rates = [record[f"{kind}_rates"] for kind in ("at_once", "one_by_one", "other_attention") if kind in record]
    rows.append(["rates of all runs", *(", ".join(f"{r:.1f}" for r in found) for found in rates)])
    rows.append(["attention", "{implementation}: {reason}".format(**record["attention"])])
    return [row + [""] * (num_runs + 1 - len(row)) for row in rows]


def _spread(value: dict[str, float] | None) -> str:
    return spread(None if value is None else Spread(**value))


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
