"""Whether everything fits in a device's memory, and how many pages and sequences do.

    usable memory  ≥  weights  +  page pool  +  slots  +  what the hungriest program needs beside them
                      ──────── from the compiled programs where there are any: tilings pad arrays ────────

The pool's size is the engine's own choice (`step.memory`); here it is checked, and set against what would fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxinfer.engine.layout import Layout, shard_bytes
from jaxinfer.plan.compile import ProgramReport

LENGTHS = (1024, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """One device's memory in bytes.

    Attributes:
      usable_bytes, budget_bytes: what programs may use, and memory_utilization of it.
      weight_bytes, pool_bytes, slot_bytes: of the parameters, the page pool and the slots.
      page_bytes, num_pages: of a page, and pages of the pool, the null page included.
      temporary_bytes: what the hungriest program needs beside its arguments; what the engine reserves when none has
        been compiled.
      hungriest: that program's name; None when none has been compiled.
      reserved_bytes: what the engine keeps from the pool for slots and temporaries.
      num_pages_that_fit: pages that the budget would hold.
    """

    usable_bytes: int
    budget_bytes: int
    weight_bytes: int
    pool_bytes: int
    slot_bytes: int
    page_bytes: int
    num_pages: int
    temporary_bytes: int
    hungriest: str | None
    reserved_bytes: int
    num_pages_that_fit: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.pool_bytes + self.slot_bytes + self.temporary_bytes

    @property
    def is_enough(self) -> bool:
        """It all fits."""
        return self.total_bytes <= self.usable_bytes


def fit_of(layout: Layout, usable_bytes: int, memory_utilization: float, reports: Sequence[ProgramReport]) -> Fit:
    """The account, from what the compiler says where it has said something."""
    found = {report.name: report for report in reports if report.is_compiled}
    slots = sum(shard_bytes(a) for a in jax.tree.leaves(layout.state))
    pool, weights = layout.memory.pool_bytes, layout.memory.weight_bytes
    if "admit" in found:
        slots = found["admit"].alias_bytes
    if "scrub" in found:
        pool = found["scrub"].alias_bytes
    stepping = [report for name, report in found.items() if name.startswith(("decode:", "mixed:"))]
    if stepping and "admit" in found and "scrub" in found:
        # The packed input, a few hundred KiB, is counted with the weights.
        weights = min(report.argument_bytes for report in stepping) - pool - slots
    hungriest = max(found.values(), key=lambda report: report.own_bytes, default=None)
    reserved = layout.memory.temporary_bytes
    temporary = hungriest.own_bytes if hungriest else max(0, reserved - slots)
    page_bytes = -(-pool // layout.memory.num_pages)
    budget = int(memory_utilization * usable_bytes)
    return Fit(
        usable_bytes=usable_bytes,
        budget_bytes=budget,
        weight_bytes=weights,
        pool_bytes=pool,
        slot_bytes=slots,
        page_bytes=page_bytes,
        num_pages=layout.memory.num_pages,
        temporary_bytes=temporary,
        hungriest=hungriest.name if hungriest else None,
        reserved_bytes=reserved,
        num_pages_that_fit=max(0, budget - weights - slots - temporary) // page_bytes,
    )


@dataclass(frozen=True)
class Room:
    """Sequences of one length.

    Attributes:
      by_pages: how many the pool holds at once.
      num_sequences: how many run at once: no more than there are slots.
    """

    length: int
    by_pages: int
    num_sequences: int


def rooms(layout: Layout, lengths: Sequence[int] = LENGTHS) -> list[Room]:
    """How many sequences of each length, and of the longest there can be, fit in the pool."""
    longest, size = layout.sizes.max_model_len, layout.page_format.page_size
    chosen = sorted({*(length for length in lengths if length < longest), longest})
    found = []
    for length in chosen:
        by_pages = sequences_that_fit(layout.sizes.num_pages, size, length)
        found.append(Room(length, by_pages, min(by_pages, layout.sizes.num_slots)))
    return found


def sequences_that_fit(num_pages: int, page_size: int, length: int) -> int:
    """Whole sequences of `length` positions in a pool of `num_pages` pages, one of which is the null page."""
    return (num_pages - 1) // -(-length // page_size)
