"""Reads the VLIW schedule that the TPU compiler dumps for one Pallas kernel (`*-packed-bundles-post-ra.txt`).

A bundle is what a core issues in one cycle. The dump gives one bundle a line, by address; where a result is not there
yet, the schedule waits in empty bundles. (The dump named `final_bundles` has them taken out: the chip waits by itself.)

    0x18e LB: > { %s6_s1 = sadd.s32 1, %s5_s24  ;;  %v7_v2 = vld [vmem:[%s3_s4]] }
    0x18f   :  {}
    0x190   : > { %9 = sbr.rel (!%p4_p0) target bundleno = 398 (0x18e), region = 7 }
                    |- operations of a bundle are separated by `;;`

This file knows the text only; `simulate.py` knows what the operations do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

GRANULE_BYTES = 32  # of a DMA size in the dump: pages of known size show it, on v5e, v5p, v6e and tpu7x
SPILL_BYTES = 8 * 128 * 4  # a vector register
BRANCH_DELAY = 4  # bundles that still run behind a branch, on every generation dumped so far (v5e, v5p, v6e, tpu7x)

_BUNDLE = re.compile(r"^\s*(0x[0-9a-f]+|0)\s+(?:[A-Z]{2})?\s*:\s*>*\s*\{(.*)$")
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_ASSIGN = re.compile(r"^%(\S+) = (.*)$", re.DOTALL)
_PREDICATE = re.compile(r"\((!?)%(p\d+(?:_p\d+)?)\)\s*,?")
_TARGET = re.compile(r"target bundleno = (\d+)")
_ALLOCATION = re.compile(
    r"#allocation\d+ \[shape = '([^']*)', space=vmem, size = 0x([0-9a-f]+)(?:, scoped)?(?:, tag = '([^']*)')?"
)
_VMEM_SPILL = re.compile(r"vmem:\[#allocation(\d+)_spill")


@dataclass(frozen=True)
class Operation:
    """One operation of a bundle.

    Attributes:
      dest: name of its result, e.g. `s6_s1`: value 6, kept in scalar register 1.
      opcode: e.g. `sadd.s32`.
      rest: operands as text, without predicate and comments.
      predicate: (is negated, name) that must hold for it to act, or None.
    """

    dest: str
    opcode: str
    rest: str
    predicate: tuple[bool, str] | None = None

    @property
    def target(self) -> int | None:
        """Address that a branch goes to; None for all else."""
        match = _TARGET.search(self.rest) if self.opcode == "sbr.rel" else None
        return int(match.group(1)) if match else None


Bundle = tuple[Operation, ...]


@dataclass(frozen=True)
class Loop:
    """A loop: bundles `start` to `end` (not included); `depth` loops hold it, itself included."""

    start: int
    end: int
    depth: int


@dataclass(frozen=True)
class Schedule:
    """A kernel's bundles.

    Attributes:
      bundles: by address.
      num_vmem_spills: vector registers that have a place in VMEM to be saved to.
    """

    bundles: tuple[Bundle, ...]
    num_vmem_spills: int

    @cached_property
    def loops(self) -> list[Loop]:
        """By where they begin, outer before inner. A loop ends with the last branch back to its start."""
        ends: dict[int, int] = {}
        for address, bundle in enumerate(self.bundles):
            for op in bundle:
                if op.target is not None and op.target <= address:
                    ends[op.target] = max(ends.get(op.target, 0), address + 1 + BRANCH_DELAY)
        spans = sorted(ends.items(), key=lambda span: (span[0], -span[1]))
        return [Loop(a, b, sum(c <= a and b <= d for c, d in spans)) for a, b in spans]


def parse_schedule(text: str) -> Schedule:
    """Reads a dump of bundles.

    Raises:
      ValueError: there is no bundle in the text.
    """
    bodies: list[str] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            assert int(match.group(1), 16) == len(bodies), f"bundle {match.group(1)} is out of order"
            bodies.append(match.group(2))
        elif bodies:  # comments may run over several lines
            bodies[-1] += f"\n{line}"
    if not bodies:
        raise ValueError("no bundles in this dump; expected lines such as '0x1f   : > { ... }'")
    return Schedule(tuple(map(_operations, bodies)), len(set(_VMEM_SPILL.findall(text))))


def _operations(body: str) -> Bundle:
    bare = _COMMENT.sub("", body).rsplit("}", 1)[0]
    return tuple(op for part in bare.split(";;") if (op := _operation(part.strip())) is not None)


def _operation(text: str) -> Operation | None:
    match = _ASSIGN.match(text)
    if not match:
        return None
    dest, body = match.groups()
    opcode, _, rest = body.partition(" ")
    predicate = None
    # `smov (%p, %a), %b` is a choice, not a predicate: its brackets hold two operands.
    found = _PREDICATE.search(rest)
    if found:
        predicate = (found.group(1) == "!", found.group(2))
        rest = rest[: found.start()] + rest[found.end() :]
    return Operation(dest, opcode, rest.strip(), predicate)


@dataclass(frozen=True)
class Allocation:
    """A buffer of the kernel in VMEM.

    Attributes:
      tag: what the compiler says it is for.
    """

    shape: str
    num_bytes: int
    tag: str


def parse_vmem(text: str) -> list[Allocation]:
    """VMEM buffers named in a dump of the kernel before scheduling (`*-original.txt`)."""
    return [Allocation(shape, int(size, 16), tag or "") for shape, size, tag in _ALLOCATION.findall(text)]


_CAPACITY = re.compile(r"^== CAPAC.*?:\s*\n([^\n]+)\n([^\n]+)\n== UTILIZATION:\s*\n(.*)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class UnitUse:
    """Use of the core's units by bundle, from `*pre-delay_hlo-static-per-bundle-utilization.txt`.

    Attributes:
      capacity: slots of each unit in a bundle.
      used: per bundle, slots used, in the order of `capacity`.
    """

    capacity: dict[str, int]
    used: tuple[tuple[int, ...], ...]

    def ratios(self, start: int, end: int) -> dict[str, float]:
        """Used slots over all slots, in these bundles."""
        rows = self.used[start:end]
        return {
            unit: sum(row[i] for row in rows) / (slots * len(rows))
            for i, (unit, slots) in enumerate(self.capacity.items())
        }


def parse_units(text: str) -> UnitUse:
    """Reads the table of unit use."""
    match = _CAPACITY.search(text)
    if not match:
        raise ValueError("no table of unit use in this dump; expected '== CAPACTIY:' and '== UTILIZATION:'")
    names = [name.strip() for name in match.group(1).split(",")]
    capacity = dict(zip(names, map(int, match.group(2).split()), strict=True))
    return UnitUse(
        capacity, tuple(tuple(map(int, line.split())) for line in match.group(3).splitlines() if line.strip())
    )
