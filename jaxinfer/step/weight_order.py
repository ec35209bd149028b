"""Chooses how matrices are stored, by a short measurement: [in, out] or [out, in] differ by up to 4x on some CPUs.

The choice is written down per machine and size, so that later starts make the same programs and find them compiled.
"""

from __future__ import annotations

import json
import os
import platform
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.model import Architecture
from jaxinfer.model.linear import dot

MEASURED_ROWS = (1, 8, 32, 256)
MUST_GAIN = 0.1  # [out, in] must be this much faster: noise must not decide


def choose_weight_order(arch: Architecture, dtype, memory_file: Path | None) -> str:
    """`in_out` or `out_in`. Accelerators lay matrices out themselves: `in_out` without measuring.

    Args:
      memory_file: JSON file of earlier choices, or None.
    """
    if jax.default_backend() != "cpu":
        return "in_out"
    machine = f"{platform.machine()} {_cpu_name()} {os.cpu_count()} cores, jax {jax.__version__}"
    key = f"{machine}: {arch.hidden_size}x{arch.intermediate_size} {jnp.dtype(dtype).name}"
    known = _read(memory_file)
    if key not in known:
        seconds = {order: _measure(arch, dtype, order) for order in ("in_out", "out_in")}
        known[key] = "out_in" if seconds["out_in"] < (1 - MUST_GAIN) * seconds["in_out"] else "in_out"
        _write(memory_file, known)
    return known[key]


def _measure(arch: Architecture, dtype, order: str) -> float:
    """Time of the feed-forward products at several row counts, each weighed so that none outweighs the others."""
    f, d = 2 * arch.intermediate_size, arch.hidden_size
    shape, contract = ((d, f), 0) if order == "in_out" else ((f, d), 1)
    copies = [jax.device_put(np.full(shape, 0.01, jnp.dtype(dtype))) for _ in range(4)]
    program = jax.jit(lambda x, ws: [dot(x, w, contract) for w in ws])
    total = 0.0
    for rows in MEASURED_ROWS:
        x = jnp.ones((rows, d), dtype)
        jax.block_until_ready(program(x, copies))
        best = min(_time(program, x, copies) for _ in range(5))
        total += best / (rows + 24)  # a step of few rows is bound by reading the weights, which is worth about 24 rows
    return total


def _time(program, *args) -> float:
    start = time.perf_counter()
    jax.block_until_ready(program(*args))
    return time.perf_counter() - start


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
    return " ".join(found.get(k, "") for k in ("model name", "cpu family", "model")).strip() or platform.processor()


def _read(path: Path | None) -> dict[str, str]:
    try:
        loaded = json.loads(path.read_text()) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return {k: v for k, v in loaded.items() if v in ("in_out", "out_in")} if isinstance(loaded, dict) else {}


def _write(path: Path | None, known: dict[str, str]) -> None:
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(known, indent=1))
        temporary.replace(path)
    except OSError:
        return  # a read-only cache folder costs a measurement at each start, nothing more
