"""What quantized products cost on chips that are not here, in XLA's forms and ours, by the chips' own compilers.

    python scripts/quantized_matmul_report.py --target v5e,v6e,h200 --rows 8,32,128
    python scripts/quantized_matmul_report.py --target v6e --model llama-3.1-8b --form w4a16-xla,w4a16-kernel --json

    bf16           a product of bfloat16, to compare with
    w8a16, w8a8    `pallas_kernels/quantized_matmul/xla.py`
    w4a16-naive    the weight dequantized as [in, out], then a product
    w4a16-xla      `xla.py`; -grouped and -dequantized: one of its two forms
    w4a16-kernel   `tpu.py` or `gpu.py`

`moved` is bytes read and written in the device's memory: arguments, results, and temporaries twice. On a TPU `bundles`
are those that the compiled kernels execute (temporaries may lie in VMEM, and cost bundles alone); on a GPU they are
replaced by the product's time at peak rate. `cost` is the larger of the two, in microseconds; `x least` is it over the
time in which the arguments and results alone are moved.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from kernel_model.bundles import parse_schedule
from kernel_model.gpu_cost import assemble, parse_assembler, parse_launches, tensor_ops
from kernel_model.simulate import NotSimulated, simulate
from kernel_model.units import core_rates
from rich.console import Console
from rich.table import Table

from jaxinfer.errors import ConfigError
from jaxinfer.plan.targets import Target, find_target, missing_compiler
from pallas_kernels.quantized_matmul import gpu, tpu, xla
from pallas_kernels.quantized_matmul.cases import MODELS
from pallas_kernels.quantized_matmul.contract import QuantizedWeight

KERNEL = "quantized_matmul"
_SCHEDULE = re.compile(r"^\d+-(?P<name>.+?)-\d+-packed-bundles-post-ra\.txt$")


@dataclass(frozen=True)
class Job:
    """One program. `group` is the number of inputs that share a scale, in w4a16."""

    target: str
    form: str
    rows: int
    inputs: int
    outputs: int
    group: int


@dataclass(frozen=True)
class Cost:
    """What a program costs.

    Attributes:
      least_bytes: of arguments and results.
      temporary_bytes: in the device's memory.
      bundles: executed on a TPU; None where a kernel could not be simulated, and on a GPU.
      notes: of a GPU kernel of ours: registers, spills, tensor instructions, launch.
    """

    least_bytes: int
    temporary_bytes: int
    bundles: int | None = None
    notes: str = ""

    @property
    def moved_bytes(self) -> int:
        return self.least_bytes + 2 * self.temporary_bytes

    def seconds(self, job: Job, target: Target) -> float:
        """The larger of moving bytes and of computing."""
        chip = target.chip
        assert chip.bytes_per_s is not None
        if chip.platform == "tpu":
            rates = core_rates(chip)
            return max(self.moved_bytes / rates.bytes_per_s, (self.bundles or 0) / rates.clock_hz)
        flop = 2 * job.rows * job.inputs * job.outputs
        rate = chip.flops_per_s["int8" if job.form == "w8a8" and "int8" in chip.flops_per_s else "bfloat16"]
        return max(self.moved_bytes / chip.bytes_per_s, flop / rate)


def _bf16(x_TI, w_IO):
    return jnp.matmul(x_TI, w_IO, preferred_element_type=jnp.float32).astype(x_TI.dtype)


def _naive(x_TI, values_IO, scale_UO):
    num_groups, num_outputs = scale_UO.shape
    values_UEO = values_IO.astype(x_TI.dtype).reshape(num_groups, -1, num_outputs)
    return _bf16(x_TI, (values_UEO * scale_UO.astype(x_TI.dtype)[:, None, :]).reshape(values_IO.shape))


def _op(op, scheme: str):
    return lambda x_TI, *weight: op.matmul(x_TI, QuantizedWeight(*weight), scheme=scheme)


def _form(inner):
    """One of the two forms of `xla.py`, whatever the rows."""
    return lambda x_TI, *weight: inner(x_TI, QuantizedWeight(*weight)).astype(x_TI.dtype)


FORMS = {
    "bf16": _bf16,
    "w8a16": _op(xla.OP, "w8a16"),
    "w8a8": _op(xla.OP, "w8a8"),
    "w4a16-naive": _naive,
    "w4a16-grouped": _form(xla.grouped),
    "w4a16-dequantized": _form(xla.dequantized),
    "w4a16-xla": _op(xla.OP, "w4a16"),
    "w4a16-kernel": None,  # by platform
}
DEFAULT_FORMS = ["bf16", "w8a16", "w8a8", "w4a16-naive", "w4a16-xla", "w4a16-kernel"]


def shapes_of(job: Job) -> list[jax.ShapeDtypeStruct]:
    """x, and the weight as its form stores it."""
    weight = jax.ShapeDtypeStruct(
        (job.inputs, job.outputs),
        {"b": "bfloat16", "8": "int8", "4": "int4"}["b" if job.form == "bf16" else job.form[1]],
    )
    scale = (job.inputs // job.group, job.outputs) if job.form.startswith("w4") else (job.outputs,)
    scales = [] if job.form == "bf16" else [jax.ShapeDtypeStruct(scale, "float32")]
    return [jax.ShapeDtypeStruct((job.rows, job.inputs), "bfloat16"), weight, *scales]


def compile_here(job: Job) -> dict[str, int]:
    """Compiles in this process, which was started with the compilers' dump flags."""
    target = find_target(job.target)
    function = FORMS[job.form] or _op({"tpu": tpu.OP, "gpu": gpu.OP}[target.chip.platform], "w4a16")
    mesh = target.mesh()
    place = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=place) for s in shapes_of(job)]
    with jax.set_mesh(mesh):
        memory = jax.jit(function).lower(*shapes).compile().memory_analysis()
    assert memory is not None
    return {
        "least_bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
    }


def cost_of(job: Job) -> Cost:
    """Compiles in a process of its own, and reads the dumps.

    Raises:
      RuntimeError: it does not compile; the message is the compiler's.
    """
    with tempfile.TemporaryDirectory() as folder:
        dumps = Path(folder) / "dump"
        env = dict(os.environ, JAX_PLATFORMS="cpu")
        is_tpu = find_target(job.target).chip.platform == "tpu"
        name, flags = (
            ("LIBTPU_INIT_ARGS", f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true")
            if is_tpu
            else ("XLA_FLAGS", f"--xla_dump_to={dumps}")
        )
        env[name] = f"{env.get(name, '')} {flags}".strip()
        command = [sys.executable, __file__, "--compile", json.dumps(asdict(job))]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{job}: {done.stderr[-2000:]}")
        facts = json.loads(done.stdout.splitlines()[-1])
        return Cost(**facts, **({"bundles": bundles_of(dumps)} if is_tpu else {"notes": notes_of(dumps)}))


def bundles_of(dumps: Path) -> int | None:
    """Bundles that the program's kernels execute; None if one cannot be simulated."""
    total = 0
    for path in dumps.iterdir():
        match = _SCHEDULE.match(path.name)
        # The program around the kernels issues a few hundred bundles, and waits.
        if match is None or match["name"].startswith(("TLP", "<")) or "schedule-analysis" in path.name:
            continue
        text = path.read_text(errors="replace")
        if not text.strip():
            continue
        try:
            total += int(simulate(parse_schedule(text), {}).executed.sum())
        except NotSimulated:
            return None
    return total


def notes_of(dumps: Path) -> str:
    """What the assembler says of our kernel; empty where it is not in the program."""
    for path in dumps.glob("*.ptx"):
        ptx = path.read_text(errors="replace")
        if f".entry {KERNEL}" not in ptx:
            continue
        launches = {}
        for listing in dumps.glob("*thunk_sequence.txt"):
            launches |= parse_launches(listing.read_text(errors="replace"))
        registers, spills, static_shared = parse_assembler(assemble(path), KERNEL)
        launch = launches[KERNEL]
        products = ", ".join(f"{count} {kind}" for kind, count in tensor_ops(ptx).items())
        return (
            f"{registers} registers, {spills} spilled, {launch.shared_bytes + static_shared} B shared, "
            f"{launch.num_blocks} x {launch.threads}; {products}"
        )
    return ""


def jobs_of(options: argparse.Namespace) -> Iterator[Job]:
    """All combinations."""
    for target in options.target:
        for model in options.model:
            group = 128 if all(inputs % 128 == 0 for inputs, _ in MODELS[model]) else 64
            for inputs, outputs in MODELS[model]:
                if options.shape and f"{inputs}x{outputs}" not in options.shape:
                    continue
                for rows in options.rows:
                    for form in options.form:
                        yield Job(target, form, rows, inputs, outputs, group)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags; what is wrong with them ends the program with a message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = functools.partial(str.split, sep=",")
    parser.add_argument("--target", type=names, default=["v5e", "v6e"], help="chips, by comma (default: v5e,v6e)")
    parser.add_argument("--model", type=names, default=["llama-3.1-8b"], help=f"by comma, of: {', '.join(MODELS)}")
    parser.add_argument("--shape", type=names, help="only these of the model, by comma, as 4096x6144")
    parser.add_argument("--form", type=names, default=DEFAULT_FORMS, help=f"by comma, of: {', '.join(FORMS)}")
    parser.add_argument("--rows", type=names, default=["1", "8", "32", "128", "512"], help="rows of x, by comma")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line and nothing else")
    parser.add_argument("--compile", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for given, known in ((options.model, MODELS), (options.form, FORMS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is unknown; there are: {', '.join(known)}")
    if not all(rows.isdecimal() and int(rows) for rows in options.rows):
        parser.error(f"--rows is {','.join(options.rows)}; positive numbers, by comma, are needed")
    options.rows = [int(rows) for rows in options.rows]
    try:
        for target in options.target:
            if why := missing_compiler(find_target(target).chip.platform):
                parser.error(why.format(name=target))
    except ConfigError as why:
        parser.error(str(why))
    return options


def show(job: Job, cost: Cost, target: Target) -> list[str]:
    """A row of the table."""
    chip = target.chip
    assert chip.bytes_per_s is not None
    share = core_rates(chip).bytes_per_s if chip.platform == "tpu" else chip.bytes_per_s
    seconds = cost.seconds(job, target)
    is_unknown = chip.platform == "tpu" and cost.bundles is None
    return [
        job.target,
        f"{job.inputs} x {job.outputs}",
        str(job.rows),
        job.form,
        f"{cost.moved_bytes / 1e6:.1f}",
        "" if cost.bundles is None else f"{cost.bundles:,}",
        "?" if is_unknown else f"{seconds * 1e6:.1f}",
        "?" if is_unknown else f"{seconds / (cost.least_bytes / share):.2f}",
        cost.notes,
    ]


def main() -> None:
    options = parse()
    if options.compile:
        print(json.dumps(compile_here(Job(**options.compile))))
        return
    table = Table("target", "in x out", "rows", "form", "moved MB", "bundles", "cost us", "x least", "kernel")
    for job in jobs_of(options):
        target = find_target(job.target)
        try:
            cost = cost_of(job)
        except RuntimeError as why:
            sys.exit(str(why))
        if options.json:
            print(json.dumps(asdict(job) | asdict(cost) | {"seconds": cost.seconds(job, target)}), flush=True)
        else:
            table.add_row(*show(job, cost, target))
    if not options.json:
        Console().print(table)


if __name__ == "__main__":
    main()
