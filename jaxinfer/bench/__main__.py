"""Command line of `python -m jaxinfer.bench`. Exit code 1 when something failed or token ids are not those expected."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from jaxinfer.bench.options import Attention, Offline, Start, Steps
from jaxinfer.errors import JaxInferError

Command = (
    Annotated[Offline, tyro.conf.subcommand("offline")]
    | Annotated[Steps, tyro.conf.subcommand("steps")]
    | Annotated[Attention, tyro.conf.subcommand("attention")]
    | Annotated[Start, tyro.conf.subcommand("start")]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses `arguments` (None: the process's own), measures, prints, and returns the exit code."""
    try:
        command = tyro.cli(
            Command,  # pyright: ignore[reportArgumentType]  # a union of dataclasses is what tyro calls subcommands
            prog="python -m jaxinfer.bench",
            args=arguments,
            config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
        )
        return _run(command)
    except (JaxInferError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _run(command: Offline | Steps | Attention | Start) -> int:
    # After parsing, so that --help is quick.
    if isinstance(command, Offline):
        from jaxinfer.bench.offline import run_offline

        return run_offline(command)
    if isinstance(command, Steps):
        from jaxinfer.bench.steps import run_steps

        return run_steps(command)
    if isinstance(command, Attention):
        from jaxinfer.bench.attention import run_attention

        return run_attention(command)
    from jaxinfer.bench.start import run_start

    return run_start(command)


if __name__ == "__main__":
    sys.exit(main())
