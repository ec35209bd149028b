"""Command line of `python -m jaxinfer.native`. Exit code 0 when the kernels are built, else 1 and the reason.

Nothing needs them: without, attention on a CPU runs through XLA and is slower.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses `arguments` (None: the process's own), builds, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxinfer.native",
        description="Compiles the native CPU kernels for this machine, once: attention on a CPU is then two to three "
        "times as fast. Needs a C++ compiler (g++ or clang++); nothing else needs the kernels.",
    )
    parser.add_argument(
        "--cache-dir", type=Path, help="cache folder to build into; default: $JAXINFER_CACHE, else ~/.cache/jaxinfer"
    )
    options = parser.parse_args(arguments)

    # After parsing, so that --help is quick.
    from jaxinfer.config import native_folder
    from pallas_kernels.native import NativeBuildError, build
    from pallas_kernels.ragged_paged_attention import NATIVE_SOURCE

    try:
        path = build(NATIVE_SOURCE, native_folder(options.cache_dir))
    except (NativeBuildError, OSError) as error:
        print(f"error: {error}\nWithout native kernels, attention on a CPU runs through XLA.", file=sys.stderr)
        return 1
    print(f"The native attention kernel is {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
