"""The choice is measured once, remembered, and a bad or read-only memory costs a measurement only."""

from __future__ import annotations

import json

import jax.numpy as jnp
import pytest
from tiny import tiny_architecture

from jaxinfer.step import weight_order
from jaxinfer.step.weight_order import choose_weight_order

ARCH = tiny_architecture()


@pytest.fixture
def measured(monkeypatch):
    """Replaces the measurement; gives the list of orders measured."""
    calls: list[str] = []
    seconds = {"in_out": 1.0, "out_in": 0.5}

    def measure(arch, dtype, order):
        calls.append(order)
        return seconds[order]

    monkeypatch.setattr(weight_order, "_measure", measure)
    measure.seconds = seconds
    measure.calls = calls
    return measure


@pytest.mark.parametrize(("out_in", "want"), [(0.5, "out_in"), (0.89, "out_in"), (0.95, "in_out"), (2.0, "in_out")])
def test_the_other_order_must_be_clearly_faster(measured, out_in, want):
    measured.seconds["out_in"] = out_in
    assert choose_weight_order(ARCH, jnp.float32, None) == want


def test_a_choice_is_measured_once(measured, tmp_path):
    path = tmp_path / "new folder" / "order.json"
    assert choose_weight_order(ARCH, jnp.float32, path) == "out_in"
    measured.seconds["out_in"] = 2.0
    assert choose_weight_order(ARCH, jnp.float32, path) == "out_in"
    assert measured.calls == ["in_out", "out_in"]
    assert [p.name for p in path.parent.iterdir()] == ["order.json"], "no temporary file is left"


def test_sizes_and_dtypes_are_remembered_apart(measured, tmp_path):
    path = tmp_path / "order.json"
    choose_weight_order(ARCH, jnp.float32, path)
    choose_weight_order(ARCH, jnp.bfloat16, path)
    choose_weight_order(tiny_architecture(intermediate_size=256), jnp.float32, path)
    assert len(measured.calls) == 6
    assert len(json.loads(path.read_text())) == 3


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"in_out"',
        b"\xff\xfe",
        b'{"a": 3}',
        b'{"a": ["in_out"]}',
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "null", "text", "not UTF-8", "number", "list inside", "deep"],
)
def test_a_corrupt_memory_is_measured_anew_and_replaced(measured, tmp_path, content):
    path = tmp_path / "order.json"
    path.write_bytes(content)
    assert choose_weight_order(ARCH, jnp.float32, path) == "out_in"
    assert list(json.loads(path.read_text()).values()) == ["out_in"]


def test_an_unknown_order_in_the_memory_is_not_taken(measured, tmp_path):
    path = tmp_path / "order.json"
    choose_weight_order(ARCH, jnp.float32, path)
    path.write_text(path.read_text().replace("out_in", "sideways"))
    assert choose_weight_order(ARCH, jnp.float32, path) == "out_in"
    assert len(measured.calls) == 4


def test_a_folder_that_cannot_be_written_costs_nothing_more(measured, tmp_path):
    """A file where the folder should be: fails for every user, root included, as a read-only folder does for others."""
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert choose_weight_order(ARCH, jnp.float32, blocker / "order.json") == "out_in"
    assert choose_weight_order(ARCH, jnp.float32, blocker / "order.json") == "out_in"
    assert len(measured.calls) == 4


def test_a_memory_that_is_a_folder_is_left_alone(measured, tmp_path):
    assert choose_weight_order(ARCH, jnp.float32, tmp_path) == "out_in"
    assert tmp_path.is_dir()


def test_the_measurement_itself_runs():
    assert weight_order._measure(ARCH, jnp.float32, "out_in") > 0
