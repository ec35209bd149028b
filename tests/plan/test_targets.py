"""Names of targets, their figures, and what is said when their compilers are not installed."""

from __future__ import annotations

import jax
import pytest

from jaxinfer.config import gpu_memory_ratio
from jaxinfer.errors import ConfigError
from jaxinfer.plan import targets
from jaxinfer.plan.targets import CHIPS, Target, find_target, missing_compiler

NAMES = [chip.name for chip in CHIPS]


@pytest.mark.parametrize(
    ("name", "num_devices", "want", "chips", "devices"),
    [
        ("v4", 1, "v4:2x2x1", 4, 4),
        ("v5e", 1, "v5e:2x2", 4, 4),
        ("v5e", 8, "v5e:2x4", 8, 8),
        ("v5e", 9, "v5e:4x4", 16, 16),
        ("V5E:1x1", 1, "v5e:1x1", 1, 1),
        ("v5p", 8, "v5p:2x2x2", 8, 8),
        ("v6e:2x4", 1, "v6e:2x4", 8, 8),
        ("tpu7x", 8, "tpu7x:2x2x1", 4, 8),
        ("tpu7x", 9, "tpu7x:2x2x2", 8, 16),
        ("h100", 1, "h100:1", 1, 1),
        ("h200", 8, "h200:8", 8, 8),
        ("h200:4", 1, "h200:4", 4, 4),
    ],
)
def test_a_name_is_a_chip_and_how_many(name, num_devices, want, chips, devices):
    target = find_target(name, num_devices)
    assert (target.name, target.num_chips, target.num_devices) == (want, chips, devices)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("v6", "did you mean 'v6e'"),
        ("h20", "did you mean 'h200'"),
        ("a100", "there are: v4, v5e, v5p, v6e, tpu7x, h100, h200, cpu"),
        ("v5e:2", r"'2' is no topology of TPU v5e; one is v5e:2x4"),
        ("v5p:2x2", r"'2x2' is no topology of TPU v5p; one is v5p:2x2x1"),
        ("v5e:0x2", "is no topology"),
        ("v5e:", "is no topology"),
        ("h200:2x4", "is no number of GPUs of NVIDIA H200 SXM; one is h200:8"),
        ("cpu:2", "cpu is this machine"),
    ],
)
def test_a_wrong_name_says_what_there_is(name, says):
    with pytest.raises(ConfigError, match=says):
        find_target(name)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_figures_are_of_one_device_and_of_the_right_size(chip):
    """A unit slipped by a thousand, or a chip's figure given for its half, is out of these ranges."""
    assert 10e9 < chip.usable_bytes <= 1.08 * chip.memory_bytes < 200e9
    assert 0.8e12 < chip.bytes_per_s < 6e12
    assert 100e12 < chip.flops_per_s["bfloat16"] < 1500e12
    assert 100e9 < chip.link_bytes_per_s < 1000e9
    intensity = chip.flops_per_s["bfloat16"] / chip.bytes_per_s
    assert 150 < intensity < 700, "operations per byte at which a chip turns from memory to compute"
    assert chip.source.startswith("https://")


def test_a_dtype_without_units_of_its_own_is_computed_in_a_wider_one():
    v5e, v7 = find_target("v5e").chip, find_target("tpu7x").chip
    assert v5e.peak("int8") == (393e12, "int8")
    assert v5e.peak("float8_e4m3fn") == (197e12, "bfloat16")
    assert v7.peak("float8_e4m3fn") == (2307e12, "float8_e4m3fn")
    assert v7.peak("int8") == (1153.5e12, "bfloat16")
    assert find_target("cpu").chip.peak("float32") is None


@pytest.mark.parametrize(("name", "package"), [("v5e", "libtpu"), ("h200", "jax-cuda13-plugin")])
def test_a_missing_compiler_says_what_to_install(name, package, monkeypatch):
    monkeypatch.setattr(targets, "_has", lambda module: False)
    target = find_target(name)
    with pytest.raises(ConfigError, match=r'pip install "jaxinfer\[aot\]"') as caught:
        target.devices()
    assert package in str(caught.value)
    assert target.name in str(caught.value)
    assert missing_compiler("cpu") is None


def test_the_machine_at_hand_has_its_own_devices():
    for name in (None, "cpu"):
        target = find_target(name)
        assert target.is_local
        assert (target.name, target.num_devices) == ("cpu", len(jax.devices()))
        assert list(target.devices()) == jax.devices()
        assert 1 << 20 < target.usable_bytes() < 1 << 50


def test_a_mesh_takes_the_first_devices_and_no_more_than_there_are():
    mesh = find_target("cpu").mesh(2)
    assert dict(mesh.shape) == {"data": 1, "model": 2}
    assert list(mesh.devices.flat) == jax.devices()[:2]
    with pytest.raises(ConfigError, match="tensor_parallel_size is 5; cpu has 4 devices"):
        find_target("cpu").mesh(5)


def test_a_gpus_memory_is_what_the_allocator_takes(monkeypatch):
    target = find_target("h200")
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert target.usable_bytes() == int(0.75 * target.chip.usable_bytes)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    assert target.usable_bytes() == int(0.9 * target.chip.usable_bytes)
    assert Target(find_target("v5e").chip, "2x2").usable_bytes() == find_target("v5e").chip.usable_bytes
    for wrong in ("x", "0", "1.5"):
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", wrong)
        with pytest.raises(ConfigError, match="XLA_CLIENT_MEM_FRACTION"):
            gpu_memory_ratio()
