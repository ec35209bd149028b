"""Tables of the figures, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from .gpu_cost import GpuReport
from .shapes import Workload
from .tpu_cost import TpuReport

LOOP_GOAL = 1.15  # bundles of the loop over KV blocks against the DMA cycles of their pages, in decode
KERNEL_TITLES = {"jax": "JAX's own", "tpu": "ours", "gpu": "ours"}


def title(target: str, load: Workload) -> str:
    """One line about a workload."""
    rows = {
        "decode": f"{load.batch} rows decode",
        "prefill": f"one row, {load.chunk} query tokens",
        "mixed": f"{load.batch - 1} rows decode, one of {load.chunk} query tokens",
    }[load.mode]
    pages = f"pages of {load.page_size} in {load.kv_dtype}"
    return f"{target}, {load.model}: {rows}, contexts of {load.context}, {pages}"


def show_tpu(console: Console, reports: Sequence[TpuReport]) -> None:
    """Kernels side by side at one workload on one target."""
    first = reports[0]
    table = Table(title=title(first.target, first.workload), title_justify="left")
    names = ("loop: bundles", "per page", "DMA cycles per page", "ratio", "call ratio", "bytes read", "products")
    for name in ("kernel", *names):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    for name in ("VMEM MiB", "spills", "busiest units of the loop", "notes"):
        table.add_column(name, justify="right" if name in ("VMEM MiB", "spills") else "left")
    for report in reports:
        table.add_row(*_tpu_row(report))
    console.print(table)


def show_gpu(console: Console, reports: Sequence[GpuReport]) -> None:
    """Every kernel of the programs of one workload on one target."""
    first = reports[0]
    table = Table(title=title(first.target, first.workload), title_justify="left")
    for name in ("kernel", "registers", "spilled bytes", "shared KiB", "threads", "blocks", "blocks per core"):
        table.add_column(name, justify="left" if name == "kernel" else "right")
    table.add_column("tensor-core instructions")
    for report in reports:
        if report.refused is not None:
            table.add_row(report.kernel, *["-"] * 6, f"refused: {_shortened(' '.join(report.refused.split()))}")
        for call in report.calls:
            table.add_row(
                call.name,
                str(call.registers),
                str(call.spill_bytes),
                f"{call.shared_bytes / 1024:.1f}",
                str(call.threads),
                str(call.num_blocks),
                str(call.blocks_per_core),
                ", ".join(f"{count} {kind}" for kind, count in call.tensor_ops.items()) or "none",
            )
    console.print(table)


def _tpu_row(report: TpuReport) -> list[str]:
    name = KERNEL_TITLES.get(report.kernel, report.kernel)
    call = report.main_call
    if report.refused is not None or call is None:
        why = report.refused or "the program holds no Pallas kernel"
        return [name, *["-"] * 10, f"refused: {_shortened(' '.join(why.split()))}"]
    figures, loop = report.figures(), call.loop
    units = sorted(loop.unit_ratios.items(), key=lambda item: -item[1])[:3] if loop else []
    return [
        name,
        f"{loop.bundles_per_iteration:.0f} x {loop.iterations}" if loop and loop.iterations else "-",
        _number(figures.get("loop_bundles_per_page"), 0),
        _number(figures.get("page_cycles"), 0),
        _number(figures.get("loop_ratio"), 2),
        _number(figures.get("call_ratio"), 2),
        _number(figures.get("bytes_ratio"), 3),
        f"{figures['product_rate']:.0%}" if figures else "-",
        f"{call.vmem_bytes / 2**20:.1f}",
        str(call.num_spills),
        ", ".join(f"{unit} {ratio:.0%}" for unit, ratio in units),
        call.not_simulated or report.notes,
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _shortened(text: str, limit: int = 240) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ..."
