"""`bench start`: how long a person waits for the first text, from the start of the process.

Each start is a process of its own: `python -m jaxinfer.generate PROMPT`. The time runs from just before the process
is made to the first byte on its standard output: the interpreter, imports, weights, compiled programs from the cache
(or compiling, when cold), prefill, first token. The rest of the answer, and the exit, are not counted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxinfer.bench.options import Start
from jaxinfer.bench.report import Spread, print_table, where_measured, write_json
from jaxinfer.errors import JaxInferError

NUM_TOKENS = 4


@dataclass(frozen=True)
class StartTimes:
    """Seconds to the first byte.

    Attributes:
      cold: with an empty compilation cache, or None when not asked for.
      warm: with the usual cache, filled by a start before.
    """

    cold: float | None
    warm: tuple[float, ...]


def run_start(command: Start) -> int:
    """Measures and prints; returns the exit code."""
    line = [sys.executable, "-m", "jaxinfer.generate", command.prompt, "--model", command.model]
    line += ["--max-tokens", str(NUM_TOKENS)]
    times = measure(line, command)
    rows = [["cold compilation cache", f"{times.cold:.2f} s"]] if times.cold is not None else []
    warm = Spread.of(times.warm)
    assert warm is not None, "repeat is at least 1"
    each = ", ".join(f"{s:.2f}" for s in times.warm)
    rows.append(["warm compilation cache", f"{warm.p50:.2f} s ({each})"])
    where = where_measured()
    print_table(f"process start to first text, {command.model}, {where['processor']}", ["", "median"], rows)
    write_json(command.json, {"where": where, "command": line[1:], "cold_s": times.cold, "warm_s": list(times.warm)})
    return 0


def measure(line: Sequence[str], command: Start) -> StartTimes:
    """One cold start if asked for; then a start that fills the usual cache, and the counted ones."""
    cold = None
    if command.cold:
        with tempfile.TemporaryDirectory(prefix="jaxinfer-cold-") as folder:
            cold = first_byte_seconds([*line, "--compilation-cache", folder], command.timeout_s)
    first_byte_seconds(line, command.timeout_s)
    return StartTimes(cold, tuple(first_byte_seconds(line, command.timeout_s) for _ in range(command.repeat)))


def first_byte_seconds(line: Sequence[str], timeout_s: float) -> float:
    """Seconds from starting a command to its first byte on standard output; it is then left to end.

    Raises:
      JaxInferError: it failed, printed nothing, or took too long.
    """
    start = time.perf_counter()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdout is not None
        alarm = threading.Timer(timeout_s, process.kill)
        alarm.start()
        try:
            first = process.stdout.read(1)
            seconds = time.perf_counter() - start
            process.stdout.read()
            code = process.wait()
        finally:
            alarm.cancel()
            process.kill()
        if code or not first:
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()[-2000:]
            reason = f"exit code {code}" if seconds < timeout_s else f"no end within {timeout_s} s"
            raise JaxInferError(f"{' '.join(line[1:])}: {reason}\n{said}")
    return seconds
