"""`python -m jaxinfer.plan`: exit code 0 when all programs compile and fit, 1 when not or after an error that names its
cause, 2 for a wrong command line, 130 after Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from jaxinfer.config import EngineConfig
from jaxinfer.errors import JaxInferError
from jaxinfer.plan.options import Command, parse

FAILED, INTERRUPTED = 1, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses `arguments` (None: the process's own), plans, prints, and returns the exit code."""
    try:
        return show(*parse(arguments))
    except JaxInferError as why:
        print(f"error: {why}", file=sys.stderr)
        return FAILED


def show(command: Command, config: EngineConfig) -> int:
    """Makes the plan and prints it."""
    # After parsing: these import jax.
    from jaxinfer.plan.report import print_json, print_tables
    from jaxinfer.plan.run import make_plan

    with _Progress() as progress:
        plan = make_plan(command, config, progress)
    (print_json if command.json else print_tables)(plan, sys.stdout)
    return 0 if plan.works else FAILED


class _Progress:
    """A bar on the standard error, when that is a terminal."""

    def __init__(self):
        self._bar: Any = None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, report: Any, total: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, desc="Compiling programs", leave=False, dynamic_ncols=True, disable=None)
        if report is not None:
            self._bar.set_postfix_str(f"{report.name} {report.compile_s:.1f} s", refresh=False)
            self._bar.update()


def _leave_at_once(*_: Any) -> None:
    """There is nothing to put in order, and threads that compile take minutes."""
    os.write(sys.stderr.fileno(), b"\ninterrupted\n")
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, _leave_at_once)
    sys.exit(main())
