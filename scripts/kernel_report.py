"""What the attention kernels cost on chips that are not here: a report from the chips' own compilers.

    python scripts/kernel_report.py --target v5e,v6e --model llama-3.1-8b
    python scripts/kernel_report.py --target h200 --model llama-3.1-8b,gemma-2-9b --json

For TPUs it compiles our kernel and JAX's own at the same shapes, runs the scalar part of their schedules on the batch
and prints, side by side, bundles of the loop over KV blocks against the DMA cycles of their pages, VMEM, and bytes read
against the least possible. For GPUs: registers, spills, shared memory, and tensor-core instructions.

It needs libtpu, or jax's CUDA plugin with NVIDIA's compiler; `make aot` installs both. docs/kernels.md explains the
figures.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from kernel_model.gpu_cost import NoAssembler
from kernel_model.gpu_cost import report as gpu_report
from kernel_model.shapes import ITEM_BYTES, MODELS, MODES, Workload
from kernel_model.show import show_gpu, show_tpu
from kernel_model.tpu_cost import report as tpu_report
from rich.console import Console

from jaxinfer.errors import ConfigError
from jaxinfer.plan.targets import Target, find_target, missing_compiler

KERNELS = {"tpu": ("tpu", "jax", "tpu-write"), "gpu": ("gpu", "gpu-write")}
FILE_WIDTH = 200  # of tables that do not go to a terminal
DEFAULT_KERNELS = {"tpu": ("tpu", "jax"), "gpu": ("gpu",)}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags; what is wrong with them ends the program with a message."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = Workload(model="llama-3.1-8b")
    parser.add_argument("--target", type=_names, default=["v5e", "v6e"], help="chips, by comma (default: v5e,v6e)")
    parser.add_argument("--model", type=_names, default=[default.model], help=f"by comma, of: {', '.join(MODELS)}")
    parser.add_argument("--mode", type=_names, default=["decode"], help=f"by comma, of: {', '.join(MODES)}")
    parser.add_argument("--kernel", type=_names, help="by comma; for TPUs of tpu, jax, tpu-write; for GPUs of gpu")
    parser.add_argument("--kv-dtype", type=_names, default=[default.kv_dtype], help="of pages, by comma")
    parser.add_argument("--dtype", default=default.dtype, choices=("bfloat16", "float32"), help="of activations")
    for name, what in (
        ("page-size", "positions per page"),
        ("batch", "rows"),
        ("context", "positions of every row"),
        ("chunk", "query tokens of a prefill row"),
    ):
        value = getattr(default, name.replace("-", "_"))
        parser.add_argument(f"--{name}", type=_positive, default=value, help=f"{what} (default: {value})")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--dumps", type=Path, help="folder that keeps the compilers' dumps")
    options = parser.parse_args(arguments)
    for name, allowed in (("model", tuple(MODELS)), ("mode", MODES), ("kv_dtype", tuple(ITEM_BYTES))):
        for given in getattr(options, name):
            _check(name, given, allowed)
    for given in options.kernel or ():
        _check("kernel", given, tuple(itertools.chain(*KERNELS.values())))
    if options.chunk > options.context and set(options.mode) != {"decode"}:
        _fail(f"--chunk is {options.chunk}; a row's context of {options.context} must hold it: raise --context")
    return options


def _names(text: str) -> list[str]:
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("give at least one name")
    return names


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def _check(flag: str, given: str, allowed: Sequence[str]) -> None:
    if given not in allowed:
        near = difflib.get_close_matches(given, allowed, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        _fail(f"--{flag.replace('_', '-')}: {given!r} is unknown{hint} There are: {', '.join(allowed)}")


def _fail(message: str) -> NoReturn:
    print(f"kernel_report: {message}", file=sys.stderr)
    raise SystemExit(2)


def targets(names: Sequence[str]) -> list[Target]:
    """Targets by name, with a compiler for each."""
    found = []
    for name in names:
        try:
            target = find_target(name)
        except ConfigError as why:
            _fail(f"--target: {why}")
        if target.chip.platform not in KERNELS:
            _fail(f"--target: {name!r} has no compiler whose dumps are read here; give a TPU or a GPU")
        if why := missing_compiler(target.chip.platform):
            _fail(why.format(name=target.name))
        found.append(target)
    return found


def workloads(options: argparse.Namespace) -> list[Workload]:
    """Every combination asked for."""
    return [
        Workload(
            model=model,
            mode=mode,
            batch=options.batch,
            context=options.context,
            chunk=options.chunk,
            page_size=options.page_size,
            dtype=options.dtype,
            kv_dtype=kv_dtype,
        )
        for model, mode, kv_dtype in itertools.product(options.model, options.mode, options.kv_dtype)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else FILE_WIDTH)
    everything = []
    for target, load in itertools.product(targets(options.target), workloads(options)):
        platform = target.chip.platform
        asked = options.kernel or DEFAULT_KERNELS[platform]
        kernels = [kernel for kernel in asked if kernel in KERNELS[platform]]
        measure, show = {"tpu": (tpu_report, show_tpu), "gpu": (gpu_report, show_gpu)}[platform]
        reports = []
        for kernel in kernels:
            folder = options.dumps and options.dumps / f"{target.chip.name}-{load.model}-{load.mode}-{kernel}"
            try:
                reports.append(measure(kernel, target.name, load, folder))
            except NoAssembler as why:
                _fail(str(why))
        everything += [report.to_dict() for report in reports]
        if reports and not options.json:
            show(console, reports)
    if options.json:
        json.dump(everything, sys.stdout, indent=1)
        print()


if __name__ == "__main__":
    main()
