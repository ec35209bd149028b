"""Programs compiled by the real TPU and GPU compilers, for chips that are not here."""

from __future__ import annotations

import json

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.plan.__main__ import main
from jaxinfer.plan.targets import find_target, missing_compiler

pytestmark = pytest.mark.aot


@pytest.fixture(autouse=True)
def needs_the_compiler(request):
    """Skips where the compiler of the test's target is not installed."""
    if why := missing_compiler(find_target(request.getfixturevalue("name")).chip.platform):
        pytest.skip(why.format(name=request.getfixturevalue("name")))


@pytest.mark.parametrize(
    "name", ["v4", "v5e", "v5e:1x1", "v5e:2x4", "v5p", "v6e:2x4", "tpu7x", "tpu7x:1x1x1", "h100", "h200:8"]
)
def test_a_target_has_the_devices_it_says(name):
    target = find_target(name)
    devices = target.devices()
    assert len(devices) == target.num_devices
    assert {device.device_kind for device in devices} <= set(target.chip.kinds)
    assert {device.platform for device in devices} == {target.chip.platform}


@pytest.mark.parametrize("name", ["v5e:3x3"])
def test_a_topology_the_compiler_does_not_know_is_an_error(name):
    with pytest.raises(ConfigError, match="the compiler has no such topology"):
        find_target(name).devices()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("v5e", 1), ("v6e:2x2", 2), ("h200", 1), ("h200:2", 2)])
def test_serving_programs_compile_and_fit(name, size, small_model, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    line = f"--model {small_model} --target {name} --tensor-parallel-size {size} --num-pages 33 --page-size 16"
    sizes = "--max-num-seqs 2 --max-num-batched-tokens 16 --programs admit,scrub,decode:2,mixed:16 --json"
    code = main([*line.split(), *sizes.split()])
    plan = json.loads(capsys.readouterr().out)
    assert [program["reason"] for program in plan["programs"]] == [None] * 4
    assert code == 0
    assert plan["works"]
    assert plan["target"]["num_devices_used"] == size
    weights = 2 * (2 * (8192 + 4096 + 24576) + 2 * 512 * 64) // size
    assert weights < plan["memory"]["weight_bytes"] < 3 * weights, "of one device; small arrays are padded"
    assert {step["bound_by"] for step in plan["decode"]} <= {"memory", "links"}
