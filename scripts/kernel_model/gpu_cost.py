"""A GPU kernel's resources, from NVIDIA's own assembler and from XLA's launch plan, with no GPU.

XLA dumps each kernel's PTX and its launch (grid, threads, shared memory); `ptxas -v` compiles the PTX and names the
registers and what is spilled.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from .shapes import Workload
from .tpu_cost import run_compiler

# Of a Hopper multiprocessor: CUDA programming guide, technical specifications of compute capability 9.0.
REGISTERS, SHARED_BYTES, THREADS, BLOCKS, WARP = 65536, 233472, 2048, 32, 32
RESERVED_SHARED_BYTES = 1024  # per block, taken by the system
REGISTER_UNIT = 256  # registers of a warp are given out in such pieces

_TENSOR = re.compile(r"\b(wgmma|mma)\.(?:mma_async\.)?sync\.aligned\.(m\d+n\d+k\d+)\.(\S+?)[\s;]")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")
_LAUNCH = re.compile(
    r"\] (?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<threads>[\d, ]+)\]\s+shared_memory: (?P<shared>\d+)"
)


class NoAssembler(Exception):
    """ptxas is not installed; the message says what to install."""


@dataclass(frozen=True)
class Launch:
    """How XLA starts a kernel."""

    num_blocks: int
    threads: int
    shared_bytes: int


@dataclass(frozen=True)
class GpuKernelCost:
    """One kernel.

    Attributes:
      registers: per thread.
      spill_bytes: stored and loaded per thread, because registers ran out.
      shared_bytes: of a block.
      tensor_ops: tensor-core instructions in the PTX, by kind.
      blocks_per_core: that fit on a multiprocessor at a time.
    """

    name: str
    registers: int
    spill_bytes: int
    num_blocks: int
    threads: int
    shared_bytes: int
    tensor_ops: dict[str, int]

    @property
    def blocks_per_core(self) -> int:
        warps = -(-self.threads // WARP)
        per_warp = -(-self.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        fits = (
            REGISTERS // (warps * per_warp),
            SHARED_BYTES // (self.shared_bytes + RESERVED_SHARED_BYTES),
            THREADS // (warps * WARP),
            BLOCKS,
        )
        return min(fits)


@dataclass(frozen=True)
class GpuReport:
    """A kernel at a workload on a target; `refused` is what it or the compiler said where it does not compile."""

    kernel: str
    target: str
    workload: Workload
    refused: str | None = None
    notes: str = ""
    calls: tuple[GpuKernelCost, ...] = ()

    def to_dict(self) -> dict:
        """For JSON."""
        calls = [asdict(call) | {"blocks_per_core": call.blocks_per_core} for call in self.calls]
        return asdict(self) | {"calls": calls}


def report(kernel: str, target: str, workload: Workload, folder: Path | None = None) -> GpuReport:
    """Compiles a kernel for a GPU in a process of its own, and reads what the compilers wrote.

    Args:
      folder: where the dumps stay; None removes them.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) if folder is None else folder
        facts = run_compiler(kernel, target, workload, place, tpu_dump=False)
        if "refused" in facts:
            return GpuReport(kernel, target, workload, refused=facts["refused"])
        calls = read_calls(place / "dump", facts["calls"])
    return GpuReport(kernel, target, workload, notes=facts["notes"], calls=calls)


def read_calls(folder: Path, names: list[str]) -> tuple[GpuKernelCost, ...]:
    """Reads the dumps of these kernels."""
    texts = {path: path.read_text(errors="replace") for path in sorted(folder.glob("*.ptx"))}
    launches: dict[str, Launch] = {}
    for path in folder.glob("*thunk_sequence.txt"):
        launches |= parse_launches(path.read_text(errors="replace"))
    calls = []
    for name in dict.fromkeys(names):
        found = [path for path, text in texts.items() if re.search(rf"\.entry {re.escape(name)}\b", text)]
        if not found or name not in launches:
            raise RuntimeError(f"the compiler wrote no {'PTX' if not found else 'launch'} of the kernel {name!r}")
        registers, spills, static_shared = parse_assembler(assemble(found[0]), name)
        launch = launches[name]
        calls.append(
            GpuKernelCost(
                name=name,
                registers=registers,
                spill_bytes=spills,
                num_blocks=launch.num_blocks,
                threads=launch.threads,
                shared_bytes=launch.shared_bytes + static_shared,
                tensor_ops=tensor_ops(texts[found[0]]),
            )
        )
    return tuple(calls)


def tensor_ops(ptx: str) -> dict[str, int]:
    """Tensor-core instructions in a PTX text, by kind: instruction, shape, dtype of the second operand."""

    def dtype(types: str) -> str:
        # d.a.b of wgmma; row.col.d.a.b.c of mma
        names = types.split(".")
        return names[2] if len(names) == 3 else names[4]

    return dict(Counter(f"{kind} {shape} {dtype(types)}" for kind, shape, types in _TENSOR.findall(ptx)))


def parse_launches(text: str) -> dict[str, Launch]:
    """Launches by kernel, from XLA's `*thunk_sequence.txt`."""

    def product(numbers: str) -> int:
        result = 1
        for number in numbers.split(","):
            result *= int(number)
        return result

    return {
        m["name"]: Launch(product(m["grid"]), product(m["threads"]), int(m["shared"])) for m in _LAUNCH.finditer(text)
    }


def parse_assembler(text: str, name: str) -> tuple[int, int, int]:
    """(registers, bytes spilled, static shared bytes) of a kernel, from `ptxas -v`.

    Raises:
      ValueError: the kernel is not in the text.
    """
    start = text.find(f"Compiling entry function '{name}'")
    if start < 0:
        raise ValueError(f"ptxas said nothing about {name!r}")
    next_one = text.find("Compiling entry function", start + 1)
    mine = text[start : next_one if next_one > 0 else None]
    registers, spill, shared = _REGISTERS.search(mine), _SPILL.search(mine), _STATIC_SHARED.search(mine)
    if registers is None or spill is None:
        raise ValueError(f"ptxas named no registers or spills of {name!r}:\n{mine}")
    return int(registers.group(1)), int(spill.group(2)) + int(spill.group(3)), int(shared.group(1)) if shared else 0


def assemble(ptx: Path) -> str:
    """What `ptxas -v` says about a file, for the architecture that it names."""
    target = re.search(r"^\.target (\w+)", ptx.read_text(errors="replace"), re.MULTILINE)
    if target is None:
        raise ValueError(f"{ptx} names no .target")
    command = [find_ptxas(), "-v", f"-arch={target.group(1)}", str(ptx), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refused {ptx.name}:\n{done.stderr}")
    return done.stderr


def find_ptxas() -> str:
    """NVIDIA's assembler: of the Python packages, else on the path.

    Raises:
      NoAssembler: there is none.
    """
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("*/bin/ptxas")):
            return str(path)
    found = shutil.which("ptxas")
    if found is None:
        raise NoAssembler("ptxas is not installed; run: pip install nvidia-cuda-nvcc")
    return found
