"""Searches the block sizes of the attention kernels and writes them to `tuned.json`.

    python scripts/tune_kernels.py                         # on the TPU or GPU of this machine: by time
    python scripts/tune_kernels.py --target v5e,v6e        # for TPUs that are not here: by modelled cost

Without a device a candidate costs what `kernel_model` counts in the schedule that the chip's own compiler made: the
larger of the bundles that a core issues and of the cycles in which memory delivers the bytes read. The model knows no
latency of a copy, which larger blocks hide better: of candidates within MODEL_TOLERANCE of the best, the one with the
largest blocks is taken. There is no such model of a GPU: it is tuned where there is one.

Sizes of a kernel's call are chosen for each shape. Those that the work list is made with hold for all shapes of a page
size, so they are the ones that cost least over all models given: give all that matter in one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax
from kernel_model.kernels import CannotRun, build
from kernel_model.shapes import ITEM_BYTES, MODELS, Workload
from kernel_model.tpu_cost import report

from jaxinfer.errors import ConfigError
from jaxinfer.plan.targets import Target, find_target, missing_compiler
from pallas_kernels.block_sizes import FILE, MODES, parse, shape_bucket, work_bucket, write
from pallas_kernels.ragged_paged_attention import gpu, tpu

OP_FOLDER = Path(tpu.__file__).parent
MODEL_TOLERANCE = 0.02
POSITIONS = (256, 512, 1024, 2048)  # of a TPU's block
MEASURED_CALLS = 20  # chained in one program, so that sending it is no part of the time
MEASURED_RUNS = 5

Sizes = dict[str, int]
Cost = Callable[[Workload, Sizes], float]


class NoCost(Exception):
    """This candidate does not run, or cannot be judged; the message says why."""


@dataclass(frozen=True)
class Space:
    """What is searched on a platform.

    Attributes:
      work_mode: the mode that decides on the sizes of the work list.
      work: values of those sizes, by field.
      shape: by mode, page size -> values of the sizes of a call, by field.
      largest: field that a block's size grows with.
    """

    work_mode: str
    work: Mapping[str, Sequence[int]]
    shape: Mapping[str, Callable[[int], Mapping[str, Sequence[int]]]]
    largest: str


def _tpu_blocks(page_size: int) -> dict[str, Sequence[int]]:
    return {"pages_per_block": sorted({max(1, positions // page_size) for positions in POSITIONS})}


SPACES = {
    "tpu": Space(
        work_mode="mixed",
        work={"queries_per_tile": (64, 128, 256)},
        shape={"decode": _tpu_blocks, "mixed": _tpu_blocks},
        largest="pages_per_block",
    ),
    "gpu": Space(
        work_mode="decode",
        work={"split_keys": (128, 256, 512)},
        shape={
            "decode": lambda page_size: {
                "decode_keys": (16, 32, 64, 128),
                "decode_warps": (2, 4, 8),
                "decode_stages": (3, 5),
            },
            "mixed": lambda page_size: {
                "prefill_rows": (32, 64, 128),
                "prefill_keys": (16, 32, 64, 128),
                "prefill_warps": (4, 8),
                "prefill_stages": (3, 5),
            },
        },
        largest="decode_keys",
    ),
}


def grid(values: Mapping[str, Sequence[int]]) -> list[Sizes]:
    """Every combination."""
    return [dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())]


def defaults(platform: str, load: Workload) -> Sizes:
    """What the implementation takes where nothing is tuned."""
    shape, kv_dtype = load.shape, jnp.dtype(load.kv_dtype)
    if platform == "tpu":
        sizes = tpu.default_block_sizes(shape.num_kv_heads, shape.head_dim, load.page_size, kv_dtype)
    else:
        sizes = gpu.default_block_sizes(head_dim=shape.head_dim, dtype=jnp.dtype(load.dtype))
    return dataclasses.asdict(sizes)


def bucket_of(mode: str, load: Workload) -> str:
    """Key of the workload's shape in the table."""
    shape = load.shape
    return shape_bucket(
        mode,
        num_kv_heads=shape.num_kv_heads,
        group=shape.group,
        head_dim=shape.head_dim,
        page_size=load.page_size,
        kv_dtype=load.kv_dtype,
    )


# ---------------------------------------------------------------------------------------------------------------------
# The search


@dataclass(frozen=True)
class Found:
    """A candidate and its cost: the geometric mean over contexts."""

    sizes: Sizes
    cost: float


def mean_cost(cost: Cost, loads: Sequence[Workload], sizes: Sizes) -> float | None:
    """Geometric mean over the loads; None where one of them does not run."""
    try:
        return math.exp(sum(math.log(cost(load, sizes)) for load in loads) / len(loads))
    except NoCost as why:
        print(f"    {_spelt(sizes)}: {why}")
        return None


def best_of(found: Iterable[Found], largest: str, tolerance: float) -> Found | None:
    """The largest of those that cost within `tolerance` of the least."""
    candidates = list(found)
    if not candidates:
        return None
    least = min(f.cost for f in candidates)
    near = [f for f in candidates if f.cost <= least * (1 + tolerance)]
    return max(near, key=lambda f: (f.sizes.get(largest, 0), -f.cost))


def tune_mode(
    space: Space, platform: str, mode: str, by_shape: Mapping[str, Sequence[Workload]], cost: Cost, tolerance: float
) -> tuple[Sizes | None, dict[str, Found]]:
    """Searches one mode at one page size.

    Args:
      by_shape: workloads by shape bucket.

    Returns:
      Sizes of the work list, if this mode decides on them and they are not the default's; and the best of each shape.
    """
    asked = grid(space.work) if mode == space.work_mode else [{}]
    results: list[tuple[float, Sizes, dict[str, Found]]] = []
    for work in asked:
        best: dict[str, Found] = {}
        for name, loads in by_shape.items():
            base = defaults(platform, loads[0]) | work
            print(f"  {name} {_spelt(work)}")
            trials = []
            for sizes in grid(space.shape[mode](loads[0].page_size)):
                value = mean_cost(cost, loads, base | sizes)
                if value is not None:
                    print(f"    {_spelt(sizes)}: {value:.4g}")
                    trials.append(Found(sizes, value))
            chosen = best_of(trials, space.largest, tolerance)
            if chosen is not None:
                best[name] = chosen
        if best:
            overall = math.exp(sum(math.log(f.cost) for f in best.values()) / len(best))
            results.append((overall, work, best))
    # A choice that does not run everywhere is worth less than any that does.
    ran = max((len(best) for _, _, best in results), default=0)
    results = [r for r in results if len(r[2]) == ran]
    if not results:
        return None, {}
    _, work, best = min(results, key=lambda r: r[0])
    return work or None, best


def tune(
    platform: str, loads: Sequence[Workload], modes: Sequence[str], cost: Cost, tolerance: float
) -> dict[str, Sizes]:
    """Entries of a device's table, by bucket."""
    entries: dict[str, Sizes] = {}
    space = SPACES[platform]
    for page_size, mode in itertools.product(sorted({load.page_size for load in loads}), modes):
        by_shape: dict[str, list[Workload]] = {}
        for load in loads:
            if load.page_size == page_size and (load.mode == "decode") == (mode == "decode"):
                by_shape.setdefault(bucket_of(mode, load), []).append(load)
        work, best = tune_mode(space, platform, mode, by_shape, cost, tolerance)
        if work is not None:
            entries[work_bucket(page_size)] = work
        for name, found in best.items():
            entries[name] = found.sizes
            print(f"  -> {name}: {_spelt(found.sizes)} at {found.cost:.4g}")
    return entries


def _spelt(sizes: Sizes) -> str:
    return ", ".join(f"{name} {value}" for name, value in sizes.items())


# ---------------------------------------------------------------------------------------------------------------------
# Costs


def modelled(target: Target) -> Cost:
    """Cycles of a TPU's core, by the schedule that its compiler makes."""

    def cost(load: Workload, sizes: Sizes) -> float:
        found = report("tpu", target.name, load, block_sizes=sizes)
        ratio = found.figures().get("call_ratio")
        if ratio is None:
            call = found.main_call
            raise NoCost(found.refused or (call.not_simulated if call else None) or "no cost is known")
        return ratio * found.rates.cycles(found.least_bytes)

    return cost


def measured(kernel: str, target: Target) -> Cost:
    """Seconds of a call on the device that is here."""

    def cost(load: Workload, sizes: Sizes) -> float:
        try:
            return seconds_of(kernel, target, load, sizes)
        except (CannotRun, NotImplementedError, ValueError, AssertionError, jax.errors.JaxRuntimeError) as why:
            raise NoCost(f"{type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}") from why

    return cost


def seconds_of(kernel: str, target: Target, load: Workload, sizes: Sizes | None) -> float:
    """The best of several runs; each calls the kernel many times, with its outputs as its next queries."""
    program = build(kernel, load, target.chip, sizes)
    keys = iter(jax.random.split(jax.random.key(0), 8))
    q_TKGH, pages = jax.tree.map(
        lambda a: jax.random.normal(next(keys), a.shape, jnp.float32).astype(a.dtype), program.arrays
    )

    def chain(q_TKGH, pages, numbers):
        return lax.fori_loop(0, MEASURED_CALLS, lambda _, q: program.function(q, pages, *numbers), q_TKGH)

    run = jax.jit(chain)
    jax.block_until_ready(run(q_TKGH, pages, program.numbers))
    best = math.inf
    for _ in range(MEASURED_RUNS):
        start = time.perf_counter()
        jax.block_until_ready(run(q_TKGH, pages, program.numbers))
        best = min(best, time.perf_counter() - start)
    return best / MEASURED_CALLS


# ---------------------------------------------------------------------------------------------------------------------
# The command


def parse_flags(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", type=_names, default=[], help="TPUs by comma; none: the accelerator that is here")
    parser.add_argument("--model", type=_names, default=list(MODELS), help=f"by comma, of: {', '.join(MODELS)}")
    parser.add_argument("--mode", type=_names, default=list(MODES), help=f"by comma, of: {', '.join(MODES)}")
    parser.add_argument("--kv-dtype", type=_names, default=["bfloat16"], help="of pages, by comma")
    parser.add_argument("--page-size", type=_numbers, default=[64], help="by comma (default: 64)")
    parser.add_argument("--context", type=_numbers, default=[300, 2000], help="positions of a row (default: 300,2000)")
    parser.add_argument("--batch", type=_numbers, default=[8], help="rows (default: 8)")
    parser.add_argument("--chunk", type=_numbers, default=[512], help="most query tokens of a row (default: 512)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    options = parser.parse_args(arguments)
    for name, allowed in (("model", tuple(MODELS)), ("mode", MODES), ("kv_dtype", tuple(ITEM_BYTES))):
        for given in getattr(options, name):
            if given not in allowed:
                near = difflib.get_close_matches(given, allowed, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                _fail(f"--{name.replace('_', '-')}: {given!r} is unknown{hint}; there are: {', '.join(allowed)}")
    return options


def _names(text: str) -> list[str]:
    names = [name.strip().lower() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("give at least one name")
    return names


def _numbers(text: str) -> list[int]:
    if not all(part.strip().isdigit() and int(part) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of positive whole numbers")
    return [int(part) for part in text.split(",")]


def _fail(message: str) -> NoReturn:
    print(f"tune_kernels: {message}", file=sys.stderr)
    raise SystemExit(2)


def workloads(options: argparse.Namespace) -> list[Workload]:
    """Every combination asked for; models of one shape once."""
    loads: dict[Any, Workload] = {}
    combinations = itertools.product(
        options.mode, options.model, options.kv_dtype, options.page_size, options.context, options.batch, options.chunk
    )
    for mode, model, kv_dtype, page_size, context, batch, chunk in combinations:
        load = Workload(
            model=model,
            mode=mode,
            batch=batch,
            context=context,
            chunk=min(chunk, context),
            page_size=page_size,
            kv_dtype=kv_dtype,
        )
        loads.setdefault((load.shape, dataclasses.replace(load, model="")), load)
    return list(loads.values())


def jobs(names: Sequence[str]) -> list[tuple[Target, str, Cost, float]]:
    """(target, device kind, cost, tolerance) of each thing to tune."""
    if not names:
        target = find_target()
        if target.chip.platform not in SPACES:
            _fail(
                f"there is no TPU or GPU here, only {target.chip.title}; give --target, one of v4, v5e, v5p, v6e, tpu7x"
            )
        return [(target, target.chip.kinds[0], measured(target.chip.platform, target), 0.0)]
    found = []
    for name in names:
        try:
            target = find_target(name)
        except ConfigError as why:
            _fail(f"--target: {why}")
        if target.chip.platform != "tpu":
            _fail(f"--target: no cost model is known for {target.chip.title}; run without --target where there is one")
        if why := missing_compiler("tpu"):
            _fail(why.format(name=target.name))
        found.append((target, target.chip.kinds[0], modelled(target), MODEL_TOLERANCE))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_flags(arguments)
    loads = workloads(options)
    for target, kind, cost, tolerance in jobs(options.target):
        print(f"{kind}:")
        entries = tune(target.chip.platform, loads, options.mode, cost, tolerance)
        if options.dry_run:
            continue
        path = OP_FOLDER / FILE
        table = parse(path.read_text(encoding="utf-8"), str(path)) if path.exists() else {}
        table[kind] = table.get(kind, {}) | entries
        write(OP_FOLDER, table)
        print(f"{len(entries)} entries written to {path.name}")


if __name__ == "__main__":
    main()
