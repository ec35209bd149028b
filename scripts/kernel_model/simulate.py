"""Runs the scalar part of a TPU kernel's schedule on a real batch, and counts.

Which bundles run, how often, and which pages are fetched depends only on scalars: context lengths, page table, loop
counters. So the scalar operations are executed here with the batch's own numbers and everything else is counted:

    bundles executed (cycles when nothing stalls), by address      bytes of each DMA, by address

A scalar that comes from a vector unit is unknown; the run stops with an error if a branch depends on one. Bounds checks
are taken as passed.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .bundles import BRANCH_DELAY, GRANULE_BYTES, Bundle, Operation, Schedule

MAX_BUNDLES = 50_000_000  # executed; beyond, the run does not end


class NotSimulated(Exception):
    """The schedule does something this model does not know; the message says what."""


class Pointer(NamedTuple):
    """An address: words (or granules) from the start of a named buffer."""

    buffer: str
    offset: int


@dataclass(frozen=True)
class Counts:
    """What a run did.

    Attributes:
      executed: times each bundle ran, by address.
      dma_bytes: (direction such as `hbm_to_vmem`, address) -> bytes.
    """

    executed: np.ndarray
    dma_bytes: dict[tuple[str, int], int]

    def bundles(self, start: int, end: int) -> int:
        """Bundles executed at these addresses."""
        return int(self.executed[start:end].sum())

    def moved(self, direction: str, start: int = 0, end: int | None = None) -> int:
        """Bytes of DMAs of one direction issued at these addresses."""
        end = len(self.executed) if end is None else end
        return sum(size for (d, address), size in self.dma_bytes.items() if d == direction and start <= address < end)


def _signed(x: int) -> int:
    return ((x + 0x80000000) & 0xFFFFFFFF) - 0x80000000


def _unsigned(x: int) -> int:
    return x & 0xFFFFFFFF


def _word(function: Callable[..., int]):
    """A 32-bit operation; unknown in, unknown out; a pointer moves by what an integer would."""

    def run(*args):
        if any(a is None for a in args):
            return None
        pointers = [a for a in args if isinstance(a, Pointer)]
        if not pointers:
            return _signed(function(*(int(a) for a in args)))
        if len(pointers) > 1:
            return None
        result = function(*(a.offset if isinstance(a, Pointer) else int(a) for a in args))
        return Pointer(pointers[0].buffer, result)

    return run


def _compare(function: Callable[[int, int], bool], view: Callable[[int], int]):
    def run(a, b):
        if a is None or b is None or isinstance(a, Pointer) or isinstance(b, Pointer):
            return None
        return function(view(a), view(b))

    return run


def _or(a, b):
    if a is True or b is True:
        return True
    return None if a is None or b is None else bool(a or b)


def _and(a, b):
    if a is False or b is False:
        return False
    return None if a is None or b is None else bool(a and b)


def _not(a):
    return None if a is None else not a


_SCALAR: dict[str, Callable[..., Any]] = {
    "sadd.s32": _word(operator.add),
    "ssub.s32": _word(operator.sub),
    "smul.u32": _word(operator.mul),
    "smul.s32": _word(operator.mul),
    "sshll.u32": _word(lambda a, b: a << b),
    "sshrl.u32": _word(lambda a, b: _unsigned(a) >> b),
    "sshra.s32": _word(operator.rshift),
    "sand.u32": _word(operator.and_),
    "sor.u32": _word(operator.or_),
    "sxor.u32": _word(operator.xor),
    "smin.u32": _word(lambda a, b: min(_unsigned(a), _unsigned(b))),
    "smax.u32": _word(lambda a, b: max(_unsigned(a), _unsigned(b))),
    "smin.s32": _word(min),
    "smax.s32": _word(max),
    "por": _or,
    "pand": _and,
    "pnand": lambda a, b: _not(_and(a, b)),
    "pnor": lambda a, b: _not(_or(a, b)),
    "pneg": _not,
    "pxor": lambda a, b: None if a is None or b is None else a != b,
}
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _SCALAR[f"scmp.{_name}.s32.totalorder"] = _compare(getattr(operator, _name), _signed)
    _SCALAR[f"scmp.{_name}.u32.totalorder"] = _compare(getattr(operator, _name), _unsigned)

_NO_EFFECT = ("sphi", "shalt", "sfence", "vsync", "vtrace", "strace", "vdelay", "snop", "sdelay", "dma.done")
_REGISTER = re.compile(r"^(!?)%([sp]\d+(?:_([sp]\d+))?)$")


class Machine:
    """One core's scalar state while a schedule runs."""

    def __init__(self, schedule: Schedule, operands: Mapping[int, np.ndarray]):
        self._operands = operands
        self._registers: dict[str, Any] = {}
        self._defined: dict[str, Any] = {}  # by full name, in this bundle
        # On chips with two cores a device, the number of the core that runs.
        self._memory: dict[tuple[str, int], Any] = {("allocation0", 0): 0}
        self._dma_bytes: dict[tuple[str, int], int] = {}
        self._target: int | None = None
        self._work = [self._scalar_work(bundle) for bundle in schedule.bundles]

    def run(self) -> Counts:
        """Runs to the end.

        Raises:
          NotSimulated: a branch depends on something unknown, or there is no end.
        """
        executed = np.zeros(len(self._work), np.int64)
        address, total, until_branch = 0, 0, None
        while address < len(self._work):
            executed[address] += 1
            total += 1
            if self._work[address]:
                self._step(address)
            if self._target is not None and until_branch is None:
                until_branch = BRANCH_DELAY + 1
            if until_branch is not None:
                until_branch -= 1
                if until_branch == 0:
                    address, self._target, until_branch = self._target, None, None
                    assert address is not None
                    continue
            address += 1
            if total > MAX_BUNDLES:
                raise NotSimulated(f"more than {MAX_BUNDLES} bundles were executed; the loop has no end in this model")
        return Counts(executed, self._dma_bytes)

    def _scalar_work(self, bundle: Bundle) -> Bundle:
        def matters(op: Operation) -> bool:
            if op.opcode.startswith(_NO_EFFECT):
                return False
            is_scalar_result = op.dest[0] in "sp"
            return is_scalar_result or op.opcode.startswith(("sst", "sbr", "dma."))

        return tuple(op for op in bundle if matters(op))

    def _step(self, address: int) -> None:
        """Operations of a bundle read what was there before it; only names defined in it are read from it."""
        self._defined = {}
        stores: list[tuple[tuple[str, int], Any]] = []
        for op in self._work[address]:
            if op.predicate is not None:
                negated, name = op.predicate
                holds = self._read(f"%{name}")
                if holds is None:
                    if op.opcode.startswith(("sbr", "dma.", "sst")):
                        raise NotSimulated(f"{op.opcode} at {address:#x} depends on an unknown predicate {name}")
                    self._define(op.dest, None)
                    continue
                if holds == negated:
                    continue
            self._do(op, address, stores)
        for name, value in self._defined.items():
            self._registers[name.rsplit("_", 1)[-1]] = value
        self._memory.update(stores)

    def _do(self, op: Operation, address: int, stores) -> None:
        opcode = op.opcode
        if opcode.startswith("sbr"):
            if op.target is None:
                raise NotSimulated(f"the branch at {address:#x} names no target: {op.rest}")
            self._target = op.target
        elif opcode.startswith("dma."):
            self._dma(op, address)
        elif opcode == "sst":
            place, value = op.rest.rsplit(" ", 1)
            pointer = self._address(place)
            if pointer is None:
                raise NotSimulated(f"the address of the store at {address:#x} is unknown: {place}")
            stores.append(((pointer.buffer, pointer.offset), self._read(value)))
        elif opcode == "sld":
            pointer = self._address(op.rest)
            self._define(op.dest, None if pointer is None else self._memory.get((pointer.buffer, pointer.offset)))
        else:
            self._define(op.dest, self._result(op))

    def _result(self, op: Operation):
        opcode = op.opcode
        if opcode.startswith("inlined_call_operand"):
            return self._operand(op)
        if opcode == "smov":
            return self._move(op.rest)
        if opcode == "scalar_select":
            chosen, on_true, on_false = (self._read(x.strip()) for x in op.rest.split(","))
            return None if chosen is None else (on_true if chosen else on_false)
        if opcode.startswith("scalar_lea"):
            return self._lea(op.rest)
        if opcode.startswith("int_to_ptr"):
            return self._read(re.sub(r"\[resolvable:\$\w+\]", "", op.rest).strip())
        if opcode in _SCALAR:
            return _SCALAR[opcode](*(self._read(x.strip()) for x in op.rest.split(",")))
        return None

    def _define(self, dest: str, value) -> None:
        self._defined[dest] = value

    def _read(self, text: str):
        match = _REGISTER.match(text)
        if match:
            negated, name, register = match.groups()
            value = self._defined[name] if name in self._defined else self._registers.get(register or name)
            return _not(value) if negated else value
        if text.startswith("[#") or text.startswith("[%"):
            return self._address(text)
        try:
            return _signed(int(text, 0))
        except ValueError:
            return None

    def _move(self, rest: str):
        match = re.match(r"^\((!?%\S+), (\S+)\), (\S+)$", rest)
        if not match:
            return self._read(rest)
        chosen, on_false, on_true = (self._read(x) for x in match.groups())
        return None if chosen is None else (on_true if chosen else on_false)

    def _lea(self, rest: str):
        base, _, offset = rest.partition(",")
        offset = re.sub(r"\[#allocation\d+\]", "", offset).strip()
        return _SCALAR["sadd.s32"](self._read(base.strip()), self._read(offset) if offset else 0)

    def _address(self, text: str) -> Pointer | None:
        """`smem:[#allocation8 + %s1_s0]` and the like: one buffer, and terms that are added."""
        inside = re.search(r"\[([#%].*?)\]?$", text.strip().removesuffix("]"))
        assert inside, text
        pointer: Any = 0
        for term in inside.group(1).split(" + "):
            term = term.strip().lstrip("$")
            value = Pointer(term[1:], 0) if term.startswith("#") else self._read(term)
            pointer = _SCALAR["sadd.s32"](pointer, value)
        return pointer if isinstance(pointer, Pointer) else None

    def _operand(self, op: Operation):
        index = re.search(r"index: (\d+)", op.rest)
        assert index, op
        number = int(index.group(1))
        if op.opcode.startswith("inlined_call_operand.<"):  # a scalar given by value
            values = self._operands.get(number)
            return None if values is None else int(np.ravel(values)[0])
        return Pointer(f"operand{number}", 0)

    def _dma(self, op: Operation, address: int) -> None:
        direction = op.opcode.removeprefix("dma.")
        bare = [self._read(part.strip()) for part in re.sub(r"\[thread:\S+\]", "", op.rest).split(",")]
        source, granules, destination = bare[0], bare[1], bare[2]
        if not isinstance(granules, int):
            raise NotSimulated(f"the size of the DMA at {address:#x} is unknown")
        key = (direction, address)
        self._dma_bytes[key] = self._dma_bytes.get(key, 0) + granules * GRANULE_BYTES
        if direction.endswith("to_smem") and isinstance(source, Pointer) and isinstance(destination, Pointer):
            values = (
                self._operands.get(int(source.buffer.removeprefix("operand"))) if "operand" in source.buffer else None
            )
            if values is not None:
                for i, value in enumerate(smem_words(values)):
                    self._memory[destination.buffer, i] = int(value)


def smem_words(values: np.ndarray) -> np.ndarray:
    """The words of an int32 array as they lie in scalar memory: the last axis is padded to 128 words."""
    if values.ndim < 2:
        return values.ravel()
    rows = values.reshape(-1, values.shape[-1])
    padded = np.zeros((rows.shape[0], -(-rows.shape[1] // 128) * 128), rows.dtype)
    padded[:, : rows.shape[1]] = rows
    return padded.ravel()


def simulate(schedule: Schedule, operands: Mapping[int, np.ndarray]) -> Counts:
    """Runs a schedule.

    Args:
      operands: integer operands of the kernel, by position.
    """
    return Machine(schedule, operands).run()
