"""The native kernels, built for the tests."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import pytest

from jaxinfer.config import native_folder
from pallas_kernels.native import COMPILERS, build
from pallas_kernels.ragged_paged_attention import NATIVE_SOURCE


@functools.cache
def _built() -> Path:
    build(NATIVE_SOURCE, native_folder())
    return native_folder()


def native_kernels() -> Path:
    """The folder they lie in. Skips the test where there is no compiler; a source that does not compile fails."""
    if not any(shutil.which(name) for name in COMPILERS):
        pytest.skip("no C++ compiler")
    return _built()
