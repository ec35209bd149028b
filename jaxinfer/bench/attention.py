"""`bench attention`: the op alone, every implementation in turn, beside the time to read the pages it must read.

Each repetition visits every implementation and case once, over several page pools so that none is found in a cache.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.bench.machine import MachineProbe
from jaxinfer.bench.options import Attention
from jaxinfer.bench.report import print_table, where_measured, write_json
from jaxinfer.config import native_folder
from jaxinfer.errors import ConfigError
from jaxinfer.step.compiled import traced_once
from pallas_kernels.ragged_paged_attention import (
    AttentionNeeds,
    AttentionOp,
    RaggedBatch,
    attention_names,
    get_attention,
)

VERIFIED_ROWS = 8


@dataclass(frozen=True)
class Case:
    """A ragged batch: rows' contexts, and the query tokens of each."""

    name: str
    contexts: tuple[int, ...]
    queries: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.queries)


@dataclass(frozen=True)
class Timed:
    """One implementation at one case. Seconds are of one layer.

    Attributes:
      kv_bytes: keys and values of the positions that are attended to, scales included; each read once.
      read_s: time to read them at the machine's measured bandwidth.
    """

    case: str
    implementation: str
    page_size: int
    seconds: float
    kv_bytes: int
    read_s: float


def run_attention(command: Attention) -> int:
    """Measures and prints; returns the exit code.

    Raises:
      ConfigError: an implementation that was named cannot run; the message says why.
    """
    rng = np.random.default_rng(0)
    ops = _operations(command)
    cases = _cases(command, rng)
    programs = {(case, op.name): _program(command, case, op, rng) for op in ops for case in cases}
    probe, best = MachineProbe(), dict.fromkeys(programs, math.inf)
    for _ in range(command.repeat):
        probe.visit()
        for key, call in programs.items():
            jax.block_until_ready(call())
            start = time.perf_counter()
            jax.block_until_ready(call())
            best[key] = min(best[key], (time.perf_counter() - start) / command.layers)
    machine = probe.rates()
    timed = []
    for (case, name), seconds in best.items():
        op = next(op for op in ops if op.name == name)
        size = command.page_size or op.default_page_size
        num_bytes = round(_position_bytes(op, command, size) * sum(case.contexts))
        timed.append(Timed(case.name, name, size, seconds, num_bytes, num_bytes / machine.read_bytes_per_s))
    timed.sort(key=lambda t: [c.name for c in cases].index(t.case))
    print_table(
        f"attention, one layer, {command.kv_dtype} pages, {where_measured()['processor']}: reads "
        f"{machine.read_bytes_per_s / 1e9:.1f} GB/s",
        ["case", "implementation", "page size", "time", "reading its pages", "ratio", "GB/s"],
        [_row(t) for t in timed],
    )
    write_json(
        command.json,
        {
            "where": where_measured(),
            "machine": dataclasses.asdict(machine),
            "cases": [dataclasses.asdict(t) for t in timed],
        },
    )
    return 0


def _row(timed: Timed) -> list[str]:
    return [
        timed.case,
        timed.implementation,
        str(timed.page_size),
        f"{timed.seconds * 1e6:,.0f} us",
        f"{timed.read_s * 1e6:,.0f} us",
        f"{timed.seconds / timed.read_s:.2f}",
        f"{timed.kv_bytes / timed.seconds / 1e9:.1f}",
    ]


def _operations(command: Attention) -> list[AttentionOp]:
    needs = AttentionNeeds(
        platform=jax.devices()[0].platform,
        head_dim=command.head_dim,
        group=command.group,
        page_size=command.page_size,
        dtype="float32",
        kv_dtype=command.kv_dtype,
        native_folder=native_folder(),
    )
    found = []
    for name in command.implementations or attention_names():
        try:
            found.append(get_attention(name, needs).op)
        except NotImplementedError as why:
            if command.implementations:
                raise ConfigError(str(why)) from why
    return [op for op in found if command.implementations or op.name != "reference"]


def _cases(command: Attention, rng: np.random.Generator) -> list[Case]:
    low, high = command.context // 2, command.context * 3 // 2
    scattered = tuple(int(c) for c in rng.integers(low, high + 1, command.rows))
    verified = tuple(c + command.draft_tokens for c in (*scattered, *scattered)[:VERIFIED_ROWS])
    return [
        Case(f"decode {command.rows} at {command.context}", scattered, (1,) * command.rows),
        Case(f"decode 1 at {command.long_context}", (command.long_context,), (1,)),
        Case(f"verify {command.draft_tokens} in {len(verified)}", verified, (command.draft_tokens,) * len(verified)),
        Case(f"prefill {command.prompt}", (command.prompt,), (command.prompt,)),
    ]


def _batch(case: Case, page_size: int, rng: np.random.Generator) -> RaggedBatch:
    """Pages lie scattered over the pool, as they do in a server that has run for a while."""
    counts = [-(-context // page_size) for context in case.contexts]
    ids = rng.permutation(np.arange(1, sum(counts) + 1, dtype=np.int32))
    table_BM = np.zeros((len(counts), max(counts)), np.int32)
    for row, count in enumerate(counts):
        table_BM[row, :count], ids = ids[:count], ids[count:]
    starts_R = np.concatenate([[0], np.cumsum(case.queries)])
    return RaggedBatch(*(jnp.asarray(x, jnp.int32) for x in (table_BM, case.contexts, starts_R)))


def _program(command: Attention, case: Case, op: AttentionOp, rng: np.random.Generator):
    """A call without arguments that attends in `layers` layers, each with pages of its own."""
    size = command.page_size or op.default_page_size
    batch = _batch(case, size, rng)
    num_pages = int(batch.page_table_BM.max()) + 1
    shapes = op.page_shapes(num_pages, command.num_kv_heads, command.head_dim, size, jnp.dtype(command.kv_dtype))
    pools = [jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), shapes) for _ in range(command.layers)]
    heads = (command.num_kv_heads, command.group, command.head_dim)
    q_TKGH = jnp.asarray(rng.standard_normal((case.num_tokens, *heads)), jnp.float32)

    def layers(q_TKGH, pools, batch):
        work = op.prepare(
            batch,
            num_tokens=case.num_tokens,
            max_query_len=max(case.queries),
            page_size=size,
            sliding_window=None,
        )
        out_TKGH = q_TKGH
        for pages in pools:  # each layer's queries hang on the layer before, so that none runs beside another
            out_TKGH = op.attend(q_TKGH + 1e-3 * out_TKGH, pages, work, scale=command.head_dim**-0.5)
        return out_TKGH

    program = traced_once(layers, 0)
    return lambda: program(q_TKGH, pools, batch)


def _position_bytes(op: AttentionOp, command: Attention, page_size: int) -> float:
    shapes: Sequence[Any] = jax.tree.leaves(
        op.page_shapes(1, command.num_kv_heads, command.head_dim, page_size, jnp.dtype(command.kv_dtype))
    )
    return sum(math.prod(s.shape) * s.dtype.itemsize for s in shapes) / page_size
