"""Tests that compile for chips that are not here; skipped where the chips' compilers are not installed.

`make aot` installs them into an environment of their own and runs these tests.
"""

import sys
from pathlib import Path

import pytest

from jaxinfer.plan.targets import Target, find_target, missing_compiler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))


@pytest.fixture
def target(request) -> Target:
    """The target of this name; parametrized indirectly."""
    found = find_target(request.param)
    if why := missing_compiler(found.chip.platform):
        pytest.skip(why.format(name=found.name))
    return found
