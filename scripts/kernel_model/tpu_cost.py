"""A TPU kernel's modelled cost: compile it, read its schedule, run the schedule's scalars on the batch, and count.

    bundles of the loop over KV blocks     against     cycles in which the batch's pages can be read, each once
    bytes of all DMAs from HBM             against     bytes of those pages

A bundle takes one cycle, and the schedule counts the cycles in which it waits for results; what it cannot know, such as
waiting for a DMA, comes on top. So bundles are a floor of the time. DMA runs beside them.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from jaxinfer.plan.targets import find_target

from .bundles import SPILL_BYTES, Loop, Schedule, UnitUse, parse_schedule, parse_units, parse_vmem
from .shapes import Workload
from .simulate import Counts, NotSimulated, simulate
from .units import CoreRates, core_rates

_DUMP = re.compile(
    r"^\d+-(?P<name>.+?)-\d+-(?P<step>packed-bundles-post-ra|original|pre-delay_hlo-static-per-bundle-utilization)\.txt$"
)
SCHEDULE, UNITS = "packed-bundles-post-ra", "pre-delay_hlo-static-per-bundle-utilization"
MIN_LOOP_SHARE = 0.9  # of a kernel's products that its loop over KV blocks holds


@dataclass(frozen=True)
class LoopCost:
    """The loop over KV blocks.

    Attributes:
      static_bundles: in the schedule, inner loops once.
      iterations: in the run.
      bundles_per_iteration: executed, inner loops and skipped branches as they ran.
      unit_ratios: use of the core's units over the loop's schedule.
    """

    static_bundles: int
    iterations: int
    bundles_per_iteration: float
    unit_ratios: dict[str, float]


@dataclass(frozen=True)
class TpuKernelCost:
    """One Pallas call.

    Attributes:
      name: of the call.
      static_bundles: in its schedule.
      vmem_bytes: buffers and places for spilled registers.
      num_spills: vector registers with a place to be spilled to.
      loop: over KV blocks; None where the schedule has none.
      executed_bundles: in the run; None where it could not be simulated.
      loop_bundles: of them, in that loop.
      bytes_read: by DMA from HBM to VMEM, in the run.
      bytes_written: by DMA from VMEM to HBM.
      not_simulated: why there was no run, or None.
    """

    name: str
    static_bundles: int
    vmem_bytes: int
    num_spills: int
    loop: LoopCost | None
    executed_bundles: int | None
    loop_bundles: int | None
    bytes_read: int | None
    bytes_written: int | None
    not_simulated: str | None = None


@dataclass(frozen=True)
class TpuReport:
    """A kernel at a workload on a target.

    Attributes:
      refused: what the kernel or the compiler said, where it does not compile.
      notes: choices made for this compile.
      calls: its Pallas calls.
      pages: to be read at least.
      least_bytes: of those pages, unpadded.
      rates: of the target's core.
    """

    kernel: str
    target: str
    workload: Workload
    rates: CoreRates
    refused: str | None = None
    notes: str = ""
    calls: tuple[TpuKernelCost, ...] = ()

    @property
    def pages(self) -> int:
        return self.workload.pages_to_read

    @property
    def least_bytes(self) -> int:
        return self.pages * self.workload.page_bytes

    @property
    def main_call(self) -> TpuKernelCost | None:
        """The call that reads most; the first where none was simulated."""
        return max(self.calls, key=lambda c: c.bytes_read or 0, default=None)

    def figures(self) -> dict[str, float]:
        """The figures that goals are set on, as far as there are any.

        loop_bundles_per_page and page_cycles: bundles of the loop over KV blocks, and DMA cycles, for one page;
        loop_ratio: the first over the second; call_ratio: all bundles, or DMA cycles of all bytes read where they are
        more, over the DMA cycles of the pages; bytes_ratio: bytes read over those of the pages; product_rate: cycles of
        the products of queries and the keys they see, at peak, over those same cycles of the call.
        """
        call = self.main_call
        if call is None or call.executed_bundles is None or call.bytes_read is None or not self.pages:
            return {}
        least_cycles = self.rates.cycles(self.least_bytes)
        busy = max(call.executed_bundles, self.rates.cycles(call.bytes_read))
        figures = {
            "page_cycles": least_cycles / self.pages,
            "call_bundles_per_page": call.executed_bundles / self.pages,
            "call_ratio": busy / least_cycles,
            "bytes_ratio": call.bytes_read / self.least_bytes,
            "product_rate": self.workload.product_flop / self.rates.flop_per_cycle / busy,
        }
        if call.loop is not None and call.loop_bundles is not None:
            figures["loop_bundles_per_page"] = call.loop_bundles / self.pages
            figures["loop_ratio"] = call.loop_bundles / least_cycles
        return figures

    def to_dict(self) -> dict:
        """For JSON."""
        return asdict(self) | {"pages": self.pages, "least_bytes": self.least_bytes, "figures": self.figures()}


def report(
    kernel: str,
    target: str,
    workload: Workload,
    folder: Path | None = None,
    block_sizes: dict[str, int] | None = None,
) -> TpuReport:
    """Compiles a kernel for a TPU in a process of its own, and reads what the compiler wrote.

    Args:
      folder: where the dumps stay; None removes them.
      block_sizes: of ours, by field; None for those it takes by itself.
    """
    rates = core_rates(find_target(target).chip)
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) if folder is None else folder
        facts = run_compiler(kernel, target, workload, place, tpu_dump=True, block_sizes=block_sizes)
        if "refused" in facts:
            return TpuReport(kernel, target, workload, rates, refused=facts["refused"])
        calls = tuple(read_call(place, n, name) for n, name in enumerate(facts["calls"]))
    return TpuReport(kernel, target, workload, rates, notes=facts["notes"], calls=calls)


def run_compiler(
    kernel: str,
    target: str,
    workload: Workload,
    folder: Path,
    *,
    tpu_dump: bool,
    block_sizes: dict[str, int] | None = None,
) -> dict:
    """Runs `compile_one` and returns its facts; dumps lie in `folder / "dump"`."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = {
        "kernel": kernel,
        "target": target,
        "workload": asdict(workload),
        "folder": str(folder),
        "block_sizes": block_sizes,
    }
    env = dict(os.environ, JAX_PLATFORMS="cpu")
    paths = [str(Path(__file__).resolve().parents[1]), env.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    dump = folder / "dump"
    if tpu_dump:
        env["LIBTPU_INIT_ARGS"] = (
            f"{env.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true".strip()
        )
    else:
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_dump_to={dump}".strip()
    command = [sys.executable, "-m", "kernel_model.compile_one", json.dumps(spec)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    facts = folder / "facts.json"
    if not facts.exists():
        raise RuntimeError(f"compiling {kernel} for {target} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return json.loads(facts.read_text())


def read_call(folder: Path, number: int, name: str) -> TpuKernelCost:
    """Reads the dumps of a program's Pallas call.

    Args:
      number: of the call among all calls of the program, in order.
    """
    texts = _dumps(folder / "dump", name)
    if SCHEDULE not in texts:
        raise RuntimeError(f"the compiler wrote no schedule of the kernel {name!r}")
    with np.load(folder / "operands.npz") as stored:
        mine = {int(key.rsplit("/", 1)[1]): stored[key] for key in stored.files if key.startswith(f"{number}/")}
    schedule = parse_schedule(texts[SCHEDULE])
    units = parse_units(texts[UNITS])
    vmem = sum(a.num_bytes for a in parse_vmem(texts["original"])) + schedule.num_vmem_spills * SPILL_BYTES
    return cost_of(name, schedule, units, vmem, mine)


def cost_of(
    name: str, schedule: Schedule, units: UnitUse, vmem_bytes: int, operands: dict[int, np.ndarray]
) -> TpuKernelCost:
    """The figures of one schedule, run on these integer operands."""
    try:
        counts, why = simulate(schedule, operands), None
    except NotSimulated as failed:
        counts, why = None, str(failed)
    loop = find_kv_loop(schedule, counts)
    return TpuKernelCost(
        name=name,
        static_bundles=len(schedule.bundles),
        vmem_bytes=vmem_bytes,
        num_spills=schedule.num_vmem_spills,
        loop=_loop_cost(loop, units, counts) if loop else None,
        executed_bundles=int(counts.executed.sum()) if counts else None,
        loop_bundles=counts.bundles(loop.start, loop.end) if counts and loop else None,
        bytes_read=counts.moved("hbm_to_vmem") if counts else None,
        bytes_written=counts.moved("vmem_to_hbm") if counts else None,
        not_simulated=why,
    )


def find_kv_loop(schedule: Schedule, counts: Counts | None) -> Loop | None:
    """The innermost loop that holds nearly all products and issues DMAs; products as often as they ran, if known."""
    matmuls = np.array([sum(op.opcode.startswith("vmatmul") for op in bundle) for bundle in schedule.bundles])
    if counts is not None:
        matmuls = matmuls * counts.executed
    total = matmuls.sum()
    issues_dma = np.array([any(op.opcode == "dma.hbm_to_vmem" for op in bundle) for bundle in schedule.bundles])
    holding = [
        loop
        for loop in schedule.loops
        if total
        and matmuls[loop.start : loop.end].sum() >= MIN_LOOP_SHARE * total
        and issues_dma[loop.start : loop.end].any()
    ]
    return max(holding, key=lambda loop: loop.depth, default=None)


def _loop_cost(loop: Loop, units: UnitUse, counts: Counts | None) -> LoopCost:
    iterations = int(counts.executed[loop.start]) if counts else 0
    executed = counts.bundles(loop.start, loop.end) if counts else 0
    return LoopCost(
        static_bundles=loop.end - loop.start,
        iterations=iterations,
        bundles_per_iteration=executed / iterations if iterations else float("nan"),
        unit_ratios=units.ratios(loop.start, loop.end),
    )


def _dumps(folder: Path, name: str) -> dict[str, str]:
    """The dumps that are read, of the call of this name, by step."""
    texts = {}
    for path in sorted(folder.glob("*.txt")):
        match = _DUMP.match(path.name)
        if match and re.sub(r"\.\d+$", "", match["name"]) == name:
            texts[match["step"]] = path.read_text(errors="replace")
    return texts
