"""Building and finding native libraries, on a source of three lines."""

from __future__ import annotations

import ctypes
import shutil
import threading

import pytest

from pallas_kernels import native

SOURCE = 'extern "C" int answer() { return 42; }\n'

needs_compiler = pytest.mark.skipif(not any(map(shutil.which, native.COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "op" / "cpu.cc"
    path.parent.mkdir()
    path.write_text(SOURCE)
    return path


@needs_compiler
def test_a_library_is_built_once_and_found_again(source, tmp_path, monkeypatch):
    path = native.build(source, tmp_path / "out")
    assert path == native.library_path(source, tmp_path / "out")
    assert ctypes.cdll.LoadLibrary(str(path)).answer() == 42
    monkeypatch.setattr(native.subprocess, "run", None)
    assert native.build(source, tmp_path / "out") == path
    assert [p.name for p in (tmp_path / "out").iterdir()] == [path.name], "nothing else is left behind"


@needs_compiler
def test_processes_that_build_at_once_do_not_disturb_each_other(source, tmp_path):
    threads = [threading.Thread(target=native.build, args=(source, tmp_path / "out")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [p.suffix for p in (tmp_path / "out").iterdir()] == [".so"]


def test_the_name_follows_source_flags_processor_and_jaxlib(source, tmp_path, monkeypatch):
    names = {native.library_path(source, tmp_path).name}
    source.write_text(SOURCE + "// changed")
    names.add(native.library_path(source, tmp_path).name)
    monkeypatch.setattr(native, "FLAGS", ("-O0",))
    names.add(native.library_path(source, tmp_path).name)
    monkeypatch.setattr(native, "_processor", lambda: "another")
    names.add(native.library_path(source, tmp_path).name)
    monkeypatch.setattr(native.jaxlib.version, "__version__", "9.9")
    names.add(native.library_path(source, tmp_path).name)
    assert len(names) == 5


def test_without_a_compiler_it_says_what_to_install(source, tmp_path, monkeypatch):
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    with pytest.raises(native.NativeBuildError, match=r"no C\+\+ compiler found \(looked for g\+\+.*install g\+\+"):
        native.build(source, tmp_path / "out")


@needs_compiler
def test_a_source_that_does_not_compile_shows_the_compilers_words(source, tmp_path):
    source.write_text("int answer( {")
    with pytest.raises(native.NativeBuildError, match=r"failed:\n.*error"):
        native.build(source, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
