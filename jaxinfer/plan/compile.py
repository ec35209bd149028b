"""Compiles programs for devices that need not be here, and keeps what the compiler says of each."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.plan.exchanges import exchanged_bytes
from jaxinfer.step import Programs

MAX_REASON_CHARS = 2000


@dataclass(frozen=True, kw_only=True)
class ProgramReport:
    """One program; bytes and counts are of one device.

    Attributes:
      name: as `decode:32`.
      reason: why it does not compile, in the compiler's words; None when it does.
      lower_s, compile_s: time of tracing and lowering, and of compiling.
      argument_bytes, output_bytes, alias_bytes: in; out; of these, written over their arguments.
      temporary_bytes, code_bytes: while it runs; of the program itself.
      flops, accessed_bytes: counted by the compiler, the body of a loop once; None where it gives none.
      compiler_s: the compiler's own estimate of its time under ideal conditions, the body of a loop once; as above.
      exchanged_bytes: results of operations between devices, by kind, the body of a loop once.
    """

    name: str
    reason: str | None = None
    lower_s: float = 0.0
    compile_s: float = 0.0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    code_bytes: int = 0
    flops: float | None = None
    accessed_bytes: float | None = None
    compiler_s: float | None = None
    exchanged_bytes: dict[str, int] = field(default_factory=dict, hash=False)

    @property
    def is_compiled(self) -> bool:
        return self.reason is None

    @property
    def own_bytes(self) -> int:
        """What it needs beside the arguments: temporaries, results that overwrite no argument, code."""
        return self.temporary_bytes + max(0, self.output_bytes - self.alias_bytes) + self.code_bytes


def program_name(key: tuple) -> str:
    """A program's key as a user writes it."""
    return ":".join(map(str, key))


def choose_programs(asked: str, keys: Sequence[tuple]) -> list[tuple]:
    """The keys of a list of names, in the order of `keys`.

    Raises:
      ConfigError: there is no such program.
    """
    if asked in ("all", "none"):
        return list(keys) if asked == "all" else []
    known = {program_name(key): key for key in keys}
    names = [name.strip() for name in asked.split(",") if name.strip()]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"programs: {name!r} is none{hint}; there are: all, none, {', '.join(known)}")
    if not names:
        raise ConfigError("programs is empty; give all, none, or names with commas between")
    return [key for name, key in known.items() if name in names]


def compile_programs(
    programs: Programs, keys: Sequence[tuple], num_threads: int, on_done: Callable[[ProgramReport], None]
) -> list[ProgramReport]:
    """Compiles, and gives one report for each key, in order.

    Args:
      on_done: called with each report when it is there, in this thread.
    """
    done: dict[tuple, ProgramReport] = {}
    with ThreadPoolExecutor(num_threads) as pool:
        waiting = {pool.submit(_compile, programs, key): key for key in keys}
        for future in as_completed(waiting):
            report = done[waiting[future]] = future.result()
            on_done(report)
    return [done[key] for key in keys]


def _compile(programs: Programs, key: tuple) -> ProgramReport:
    name, started, lowered_at = program_name(key), time.perf_counter(), None
    try:
        lowered = programs.lower(key)
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
    except Exception as why:  # whatever the tracer, a kernel's lowering or the compiler raises is this program's report
        text = " ".join(str(why).split()) or repr(why)
        ended = time.perf_counter()
        return ProgramReport(
            name=name,
            reason=f"{type(why).__name__}: {text}"[:MAX_REASON_CHARS],
            lower_s=(lowered_at or ended) - started,
            compile_s=0.0 if lowered_at is None else ended - lowered_at,
        )
    compile_s = time.perf_counter() - lowered_at
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    assert memory is not None, "every back end of jax accounts for its memory"
    return ProgramReport(
        name=name,
        lower_s=lowered_at - started,
        compile_s=compile_s,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        flops=_positive(cost, "flops"),
        accessed_bytes=_positive(cost, "bytes accessed"),
        compiler_s=_positive(cost, "optimal_seconds"),
        exchanged_bytes=exchanged_bytes(compiled.as_text() or ""),
    )


def _positive(cost: dict[str, Any], name: str) -> float | None:
    """A figure, or None: the compiler gives negative ones where it does not know."""
    value = cost.get(name)
    return float(value) if value is not None and value > 0 else None
