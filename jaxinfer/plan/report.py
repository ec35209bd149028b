"""A plan as one JSON object, and as tables for a person."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, TextIO

import jax
from rich.console import Console
from rich.table import Table

from jaxinfer.plan.roofline import Prediction
from jaxinfer.plan.run import Plan
from jaxinfer.version import __version__

GIB, MIB = 1 << 30, 1 << 20
GATHERS_WEIGHTS = 0.1  # of the weights' bytes: hidden states and logits are far less
METHOD = (
    "Predicted times are lower bounds from published rates: max(bytes / bandwidth, operations / peak) + bytes sent / "
    "links, of one device. Weights are read once a step, keys and values once a token; norms, sampling and start-up of "
    "programs are left out."
)


def to_dict(plan: Plan) -> dict[str, Any]:
    """Everything a plan says; bytes, seconds and rates are of one device, tokens per second of all together."""
    layout, chip = plan.layout, plan.target.chip
    peak = chip.peak(layout.dtype)
    return {
        "jaxinfer": __version__,
        "jax": jax.__version__,
        "model": {
            "source": plan.source,
            "num_parameters": plan.num_parameters,
            "architecture": asdict(layout.arch),
            "dtype": layout.dtype,
            "kv_cache_dtype": str(layout.page_format.dtype),
        },
        "target": {
            "name": plan.target.name,
            "title": chip.title,
            "num_devices": plan.target.num_devices,
            "num_chips": plan.target.num_chips,
            "num_devices_used": plan.config.parallel.tensor_parallel_size,
            "memory_bytes": chip.memory_bytes,
            "usable_bytes": plan.usable_bytes,
            "bytes_per_s": chip.bytes_per_s,
            "flops_per_s": peak[0] if peak else None,
            "flops_dtype": peak[1] if peak else None,
            "link_bytes_per_s": chip.link_bytes_per_s,
            "source": chip.source,
        },
        "attention": {"implementation": layout.page_format.op.name, "reason": layout.attention_reason},
        "page_size": layout.page_format.page_size,
        "sizes": asdict(layout.sizes),
        "memory": asdict(plan.fit) | {"total_bytes": plan.fit.total_bytes, "is_enough": plan.fit.is_enough},
        "engine_memory": layout.memory.to_dict(),
        "sequences": [asdict(room) for room in plan.rooms],
        "programs": [asdict(p) | {"is_compiled": p.is_compiled, "own_bytes": p.own_bytes} for p in plan.programs],
        "decode": [
            {"rows": s.rows, "context": s.context, "is_room": s.is_room, "tokens_per_s": s.tokens_per_s}
            | _prediction(s.prediction)
            for s in plan.decode
        ],
        "prefill": [
            {"tokens": p.tokens, "tokens_per_s": p.tokens_per_s} | _prediction(p.prediction) for p in plan.prefill
        ],
        "method": METHOD,
        "num_failed": plan.num_failed,
        "works": plan.works,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return asdict(prediction) | {"bound_by": prediction.bound_by}


def print_json(plan: Plan, out: TextIO) -> None:
    print(json.dumps(to_dict(plan), allow_nan=False), file=out, flush=True)


def print_tables(plan: Plan, out: TextIO) -> None:
    """For a person: what it is, whether it works, memory, sequences, predicted times, programs."""
    # A pipe has no width of its own, and a table cut to 80 columns loses figures.
    console = Console(file=out, highlight=False, markup=False, width=None if out.isatty() else 120)
    for line in _head(plan):
        console.print(line, soft_wrap=True)
    for table in (_memory(plan), _rooms(plan), _decode(plan), _prefill(plan), _programs(plan)):
        if table is not None:
            console.print(table)
    for line in _notes(plan):
        console.print(line, soft_wrap=True)


def _head(plan: Plan) -> Iterator[str]:
    layout, chip, used = plan.layout, plan.target.chip, plan.config.parallel.tensor_parallel_size
    yield f"Model    {plan.source}: {plan.num_parameters / 1e9:.2f} G parameters, {layout.arch.num_layers} layers"
    yield (
        f"Target   {plan.target.name}: {used} of {plan.target.num_devices} x {chip.title}, "
        f"{plan.usable_bytes / GIB:.2f} GiB each for programs"
    )
    yield (
        f"Engine   {layout.dtype}, pages of {layout.page_format.page_size} x {layout.page_format.dtype}, "
        f"{layout.sizes.num_slots} slots, {layout.sizes.max_model_len} positions, "
        f"{layout.sizes.max_num_batched_tokens} tokens a step"
    )
    yield f"Kernels  attention: {layout.page_format.op.name} ({layout.attention_reason})"


def _memory(plan: Plan) -> Table:
    fit = plan.fit
    table = Table("memory of a device", "GiB", "share", title_justify="left")
    what = f"temporaries (most: {fit.hungriest})" if fit.hungriest else "temporaries (reserved by the engine)"
    rows = [
        ("weights", fit.weight_bytes),
        (f"{fit.num_pages} pages of {fit.page_bytes / MIB:.3f} MiB", fit.pool_bytes),
        ("slots", fit.slot_bytes),
        (what, fit.temporary_bytes),
        ("together", fit.total_bytes),
        ("usable", fit.usable_bytes),
    ]
    for name, num_bytes in rows:
        table.add_row(name, f"{num_bytes / GIB:.3f}", f"{num_bytes / fit.usable_bytes:.1%}")
    return table


def _rooms(plan: Plan) -> Table:
    table = Table("sequences of", "held by the pages", "running at once")
    for room in plan.rooms:
        table.add_row(f"{room.length} tokens", str(room.by_pages), str(room.num_sequences))
    return table


def _decode(plan: Plan) -> Table | None:
    if not plan.decode:
        return None
    table = Table(
        "decode: sequences", "context", "ms a step", "tokens/s", "bound by", "memory ms", "compute ms", "links ms"
    )
    for step in plan.decode:
        more = "" if step.is_room else " (no room)"
        table.add_row(f"{step.rows}{more}", str(step.context), *_cells(step.prediction, step.tokens_per_s))
    return table


def _prefill(plan: Plan) -> Table | None:
    if not plan.prefill:
        return None
    table = Table("prefill: tokens", "ms", "tokens/s", "bound by", "memory ms", "compute ms", "links ms")
    for prefill in plan.prefill:
        table.add_row(str(prefill.tokens), *_cells(prefill.prediction, prefill.tokens_per_s))
    return table


def _cells(prediction: Prediction, tokens_per_s: float) -> list[str]:
    parts = (prediction.memory_s, prediction.compute_s, prediction.link_s)
    return [_ms(prediction.seconds), f"{tokens_per_s:,.0f}", prediction.bound_by, *map(_ms, parts)]


def _programs(plan: Plan) -> Table | None:
    if not plan.programs:
        return None
    names = ("program", "compiles", "s", "temporaries MiB", "GFLOP", "accesses GiB", "compiler's ms", "sent MiB")
    rows = []
    for report in plan.programs:
        seconds = f"{report.lower_s + report.compile_s:.1f}"
        if not report.is_compiled:
            rows.append([report.name, "no", seconds, "", "", "", "", ""])
            continue
        figures = (
            (report.own_bytes, MIB),
            (report.flops, 1e9),
            (report.accessed_bytes, GIB),
            (report.compiler_s, 1e-3),
            (sum(report.exchanged_bytes.values()) or None, MIB),
        )
        rows.append([report.name, "yes", seconds, *("" if v is None else f"{v / unit:,.2f}" for v, unit in figures)])
    shown = [i for i in range(len(names)) if any(row[i] for row in rows)]
    table = Table(*(names[i] for i in shown))
    for row in rows:
        table.add_row(*(row[i] for i in shown))
    return table


def _notes(plan: Plan) -> Iterator[str]:
    fit = plan.fit
    for report in plan.programs:
        if not report.is_compiled:
            yield f"{report.name} does not compile: {report.reason}"
        elif (sent := sum(report.exchanged_bytes.values())) > GATHERS_WEIGHTS * fit.weight_bytes:
            yield (
                f"{report.name} sends {sent / GIB:.2f} GiB between devices, which the predicted times do not know of: "
                "weights are put together again in each dispatch"
            )
    if plan.decode:
        yield METHOD
    else:
        yield f"No published rates are known for {plan.target.chip.title}, so no times are predicted."
    if fit.hungriest and fit.slot_bytes + fit.temporary_bytes > fit.reserved_bytes:
        yield (
            f"Slots and temporaries take {(fit.slot_bytes + fit.temporary_bytes) / GIB:.2f} GiB; the engine keeps "
            f"{fit.reserved_bytes / GIB:.2f} GiB for them, and takes the rest from what memory_utilization "
            f"{plan.config.cache.memory_utilization} leaves"
        )
    if not fit.is_enough:
        yield (
            f"It does NOT fit: {(fit.total_bytes - fit.usable_bytes) / GIB:.2f} GiB too much; "
            f"--num-pages {fit.num_pages_that_fit} would fit"
        )
    failed = f"{plan.num_failed} of {len(plan.programs)} programs do NOT compile" if plan.num_failed else ""
    done = f"all {len(plan.programs)} programs compile" if plan.programs else "no program was compiled"
    yield f"{failed or done}; memory {'is enough' if fit.is_enough else 'is NOT enough'}."


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"
