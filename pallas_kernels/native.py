"""Compiles C++ kernels for this machine and loads them into jax. Optional: where nothing is built, XLA's own code runs.

A library's name carries a hash of its source, the flags, the processor and jaxlib, so that a folder may be shared by
machines and versions: what was built for another is not found.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import jax
import jaxlib

COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-shared", "-fPIC", "-w")


class NativeBuildError(Exception):
    """A native kernel could not be built; the message says why and that nothing depends on it."""


def library_path(source: Path, folder: Path) -> Path:
    """Where the library of `source` for this machine lies, built or not."""
    parts = (source.read_text(encoding="utf-8"), *FLAGS, _processor(), jaxlib.version.__version__)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return folder / f"{source.parent.name}_{source.stem}_{digest}.so"


@functools.cache
def _processor() -> str:
    """What `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else [platform.processor()]
    kept = {line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")}
    return "\n".join([platform.machine(), platform.system(), *sorted(kept)])


def build(source: Path, folder: Path) -> Path:
    """Compiles `source` unless its library is there. Safe when several processes do it at once.

    Raises:
      NativeBuildError: no compiler, or it failed.
    """
    path = library_path(source, folder)
    if path.exists():
        return path
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NativeBuildError(f"no C++ compiler found (looked for {', '.join(COMPILERS)}); install g++ and try again")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        made = Path(work) / path.name
        command = [compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(source), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NativeBuildError(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
        os.replace(made, path)
    return path


@functools.cache
def load(path: Path, targets: tuple[tuple[str, str], ...]) -> None:
    """Loads a library and registers its functions for the CPU, once per process.

    Args:
      targets: (name of the ffi target, symbol in the library).

    Raises:
      OSError: the library cannot be loaded.
    """
    library = ctypes.cdll.LoadLibrary(str(path))
    for name, symbol in targets:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
