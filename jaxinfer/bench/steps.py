"""`bench steps`: the engine's single steps beside the time of their matrix products, visit by visit.

Each repetition visits every case once: the products, then the engine's own dispatches. So a change of the machine's
load meets both. The ratio is (least time of the products / least time of the engine); the median of the repetitions'
own ratios stands beside it, and when the two differ much the machine was too noisy. Products at few rows are timed in
runs as long as a decode dispatch: the least of short times is luckier than the least of long ones.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxinfer.bench.bound import ProductBound, ProductTimes, bound_of
from jaxinfer.bench.costs import (
    Cost,
    attended,
    attention_flops,
    kv_bytes,
    kv_item_bytes,
    product_flops,
    product_weights,
)
from jaxinfer.bench.dispatches import DecodeTimes, time_decode, time_prefill
from jaxinfer.bench.machine import MachineProbe, MachineRates
from jaxinfer.bench.options import Steps, flat_options
from jaxinfer.bench.report import ms, print_table, share, where_measured, write_json
from jaxinfer.engine import LLM, LoadedEngine

GOALS = {("decode", 1): 0.85, ("decode", 32): 0.65, ("prefill", 512): 0.8}


@dataclass(frozen=True)
class CaseFigures:
    """One case. Seconds are of one pass: a decode round, or a whole prompt.

    Attributes:
      kind: "decode" or "prefill".
      rows: sequences decoding, or prompt tokens.
      engine_s, bound_s: least times.
      bound_all_logits_s: the bound with the head for every row; the same as `bound_s` in decoding.
      ratio: bound_s / engine_s.
      median_ratio: median of the repetitions' own ratios.
      layers_form, head_form: the products' best formulations.
      context: mean positions attended to.
      bandwidth_ratio, flops_ratio: of what the machine was measured to reach, at the engine's least time.
      engine_samples_s, bound_samples_s: per repetition.
    """

    kind: str
    rows: int
    engine_s: float
    bound_s: float
    bound_all_logits_s: float
    ratio: float
    median_ratio: float
    layers_form: str
    head_form: str
    context: float
    bandwidth_ratio: float
    flops_ratio: float
    engine_samples_s: tuple[float, ...]
    bound_samples_s: tuple[float, ...]

    @property
    def goal(self) -> float | None:
        return GOALS.get((self.kind, self.rows))


class Visits:
    """What was measured so far: the products by number of rows, the engine by case."""

    def __init__(self):
        self.products: dict[int, list[ProductTimes]] = {}
        self.decode: dict[int, list[DecodeTimes]] = {}
        self.prefill: dict[int, list[float]] = {}


def run_steps(command: Steps) -> int:
    """Loads, measures and prints; returns the exit code."""
    loaded = LLM(**flat_options(command.engine, max_num_seqs=max(command.rows, default=1))).loaded
    probe = MachineProbe()
    visits = measure(loaded, command, probe)
    machine = probe.rates()
    cases = [decode_figures(loaded, rows, visits, machine) for rows in command.rows]
    cases += [prefill_figures(loaded, tokens, visits, machine) for tokens in command.prompts]
    record = {
        "where": where_measured(),
        "model": loaded.source,
        "dtype": loaded.dtype,
        "config": dataclasses.asdict(loaded.config),
        "machine": dataclasses.asdict(machine),
        "cases": [dataclasses.asdict(case) | {"goal": case.goal} for case in cases],
        "products": {rows: [dataclasses.asdict(v) for v in found] for rows, found in visits.products.items()},
    }
    show(record, cases)
    write_json(command.json, record)
    return 0


def measure(loaded: LoadedEngine, command: Steps, probe: MachineProbe) -> Visits:
    """All repetitions, after one of the engine alone that is not counted."""
    visits = Visits()
    bound = ProductBound(loaded.arch, loaded.dtype, loaded.engine.scheduler.limits.rounds_per_dispatch)
    head_only_last = (1,) if command.prompts else ()
    for rows in command.rows:
        time_decode(loaded, rows, command.context, 1)
    for i in range(command.repeat):
        probe.visit()
        for rows in dict.fromkeys((*head_only_last, *command.rows, *command.prompts)):
            visits.products.setdefault(rows, []).append(bound.visit(rows))
            if rows in command.rows:
                found = time_decode(loaded, rows, command.context, command.dispatches)
                visits.decode.setdefault(rows, []).append(found)
            if rows in command.prompts:
                visits.prefill.setdefault(rows, []).append(time_prefill(loaded, rows, f"prefill {rows} {i}"))
    return visits


def decode_figures(loaded: LoadedEngine, rows: int, visits: Visits, machine: MachineRates) -> CaseFigures:
    """A decode round of `rows` sequences."""
    found, products = visits.decode[rows], visits.products[rows]
    context = statistics.fmean(d.mean_context for d in found)
    # A cost is linear in the contexts unless a window cuts them, so the mean will do.
    num_attended = rows * attended(loaded.arch, [round(context) - 1])
    cost = _cost(loaded, rows, rows, num_attended, num_attended)
    samples = tuple(min(d.round_s) for d in found)
    return _figures("decode", rows, samples, products, products, context, cost, machine)


def prefill_figures(loaded: LoadedEngine, num_tokens: int, visits: Visits, machine: MachineRates) -> CaseFigures:
    """One prompt of `num_tokens`, nothing cached; the head for its last row."""
    positions = range(num_tokens)
    cost = _cost(loaded, num_tokens, 1, attended(loaded.arch, positions), attended(loaded.arch, positions[-1:]))
    samples = tuple(visits.prefill[num_tokens])
    products = visits.products[num_tokens]
    return _figures("prefill", num_tokens, samples, products, visits.products[1], num_tokens / 2, cost, machine)


def _figures(
    kind: str,
    rows: int,
    engine_s: tuple[float, ...],
    layer_visits: Sequence[ProductTimes],
    head_visits: Sequence[ProductTimes],
    context: float,
    cost: Cost,
    machine: MachineRates,
) -> CaseFigures:
    bound = bound_of(layer_visits, head_visits)
    bound_s = tuple(bound_of([a], [b]).seconds for a, b in zip(layer_visits, head_visits, strict=True))
    least = min(engine_s)
    return CaseFigures(
        kind=kind,
        rows=rows,
        engine_s=least,
        bound_s=bound.seconds,
        bound_all_logits_s=bound_of(layer_visits, layer_visits).seconds,
        ratio=bound.seconds / least,
        median_ratio=statistics.median(b / e for b, e in zip(bound_s, engine_s, strict=True)),
        layers_form=bound.layers_form,
        head_form=bound.head_form,
        context=context,
        bandwidth_ratio=cost.bytes / least / machine.read_bytes_per_s,
        flops_ratio=cost.flops / least / machine.flops_per_s,
        engine_samples_s=engine_s,
        bound_samples_s=bound_s,
    )


def _cost(loaded: LoadedEngine, num_tokens: int, num_head_rows: int, num_attended: int, num_read: int) -> Cost:
    """Least work of one pass; `num_read` positions' keys and values are read from memory."""
    arch, kv_dtype = loaded.arch, loaded.config.model.kv_cache_dtype
    item_bytes = kv_item_bytes(arch, loaded.dtype if kv_dtype == "auto" else kv_dtype)
    flops = product_flops(arch, num_tokens, num_head_rows) + attention_flops(arch, num_attended)
    weight_bytes = product_weights(arch) * jnp.dtype(loaded.dtype).itemsize
    return Cost(flops, weight_bytes + kv_bytes(arch, num_read, item_bytes))


def show(record: dict[str, Any], cases: Sequence[CaseFigures]) -> None:
    """The table on the terminal."""
    machine = record["machine"]
    print_table(
        f"{record['model']} {record['dtype']}, {record['where']['processor']}: reads "
        f"{machine['read_bytes_per_s'] / 1e9:.1f} GB/s, computes {machine['flops_per_s'] / 1e9:.1f} GFLOP/s",
        [
            "case",
            "engine",
            "tokens/s",
            "products",
            "tokens/s",
            "best form",
            "ratio",
            "median",
            "goal",
            "GB/s",
            "GFLOP/s",
        ],
        [_row(case) for case in cases],
    )
    for case in cases:
        if case.kind == "prefill":
            print(
                f"prefill {case.rows} with logits of every position: products {ms(case.bound_all_logits_s)}, "
                f"{case.rows / case.bound_all_logits_s:.1f} tokens/s"
            )


def _row(case: CaseFigures) -> list[str]:
    return [
        f"{case.kind} {case.rows}" + (f" at {case.context:.0f}" if case.kind == "decode" else ""),
        ms(case.engine_s),
        f"{case.rows / case.engine_s:.1f}",
        ms(case.bound_s),
        f"{case.rows / case.bound_s:.1f}",
        f"{case.layers_form}, {case.head_form}",
        f"{case.ratio:.2f}",
        f"{case.median_ratio:.2f}",
        "-" if case.goal is None else f"{case.goal:.2f}",
        share(case.bandwidth_ratio),
        share(case.flops_ratio),
    ]
