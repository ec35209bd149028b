"""The tuner's search, with costs that are made up; and its clock, on this machine's own device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import pytest
import tune_kernels
from kernel_model.shapes import MODELS, Workload
from kernel_model.tpu_cost import TpuKernelCost, TpuReport
from kernel_model.units import core_rates
from tune_kernels import NoCost, best_of, jobs, main, measured, modelled, parse_flags, seconds_of, tune, workloads

from jaxinfer.plan.targets import find_target
from pallas_kernels.block_sizes import parse

LLAMA = "decode/K8/G4/H128/Z64/bfloat16"


def loads_of(*flags: str) -> list[Workload]:
    return workloads(parse_flags([*flags]))


def test_models_of_one_shape_are_tuned_once():
    loads = loads_of("--context", "300")
    assert len({(load.mode, load.shape) for load in loads}) == len(loads)
    assert {load.model for load in loads if load.mode == "decode"} == set(MODELS) - {"qwen3-8b"}
    assert {load.chunk for load in loads} == {300}, "a chunk is no longer than its row"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "llama-3.1-9b"], "did you mean 'llama-3.1-8b'"),
        (["--mode", "prefill"], "there are: decode, mixed"),
        (["--kv-dtype", "int4"], "there are: float32"),
        (["--page-size", "64,0"], "no list of positive whole numbers"),
        (["--target", "v9", "--dry-run"], "'v9' is unknown"),
        (["--target", "h200", "--dry-run"], "no cost model is known for NVIDIA H200"),
        (["--dry-run"], "there is no TPU or GPU here"),
    ],
)
def test_what_cannot_be_tuned_says_so(flags, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert message in capsys.readouterr().err


def test_of_sizes_within_the_tolerance_the_largest_block_is_taken():
    found = [tune_kernels.Found({"n": n}, cost) for n, cost in ((1, 100.0), (2, 101.5), (4, 101.9), (8, 103.0))]
    assert best_of(found, "n", 0.02).sizes == {"n": 4}
    assert best_of(found, "n", 0.0).sizes == {"n": 1}
    assert best_of([], "n", 0.0) is None


def test_each_shape_has_its_own_best_and_contexts_weigh_alike():
    def cost(load: Workload, sizes: dict[str, int]) -> float:
        best = {128: 8, 256: 16}[load.shape.head_dim]
        return load.context * (1 + abs(sizes["pages_per_block"] - best))

    loads = loads_of("--model", "llama-3.1-8b,gemma-2-9b", "--mode", "decode")
    entries = tune("tpu", loads, ["decode"], cost, 0.0)
    assert entries == {LLAMA: {"pages_per_block": 8}, "decode/K8/G2/H256/Z64/bfloat16": {"pages_per_block": 16}}


def test_sizes_of_the_work_list_are_those_that_cost_all_shapes_least():
    def cost(load: Workload, sizes: dict[str, int]) -> float:
        """One shape likes 256 queries a little, the other 64 a lot."""
        likes = {128: {64: 1.2, 128: 1.1, 256: 1.0}, 256: {64: 1.0, 128: 1.5, 256: 2.0}}[load.shape.head_dim]
        return likes[sizes["queries_per_tile"]] * (1 + sizes["pages_per_block"] / 1000)

    loads = loads_of("--model", "llama-3.1-8b,gemma-2-9b", "--mode", "mixed")
    entries = tune("tpu", loads, ["mixed"], cost, 0.0)
    assert entries.pop("work/Z64") == {"queries_per_tile": 64}
    assert set(entries) == {"mixed/K8/G4/H128/Z64/bfloat16", "mixed/K8/G2/H256/Z64/bfloat16"}
    assert all(sizes == {"pages_per_block": 4} for sizes in entries.values())


def test_what_does_not_run_is_never_chosen(capsys):
    def cost(load: Workload, sizes: dict[str, int]) -> float:
        if sizes["pages_per_block"] > 8 or (sizes["queries_per_tile"] == 256 and load.shape.head_dim == 256):
            raise NoCost("out of memory")
        return 1000.0 / sizes["queries_per_tile"] / sizes["pages_per_block"]

    loads = loads_of("--model", "llama-3.1-8b,gemma-2-9b")
    entries = tune("tpu", loads, ["decode", "mixed"], cost, 0.0)
    assert entries["work/Z64"] == {"queries_per_tile": 128}, "256 does not run for every shape"
    assert {sizes["pages_per_block"] for key, sizes in entries.items() if "/K" in key} == {8}
    assert "pages_per_block 16, queries_per_tile 128: out of memory" in capsys.readouterr().out
    assert tune("tpu", loads, ["decode"], lambda load, sizes: (_ for _ in ()).throw(NoCost("never")), 0.0) == {}


def test_a_gpu_is_searched_over_fields_that_its_kernel_has():
    loads = loads_of("--model", "llama-3.1-8b", "--context", "300")
    entries = tune("gpu", loads, ["decode", "mixed"], lambda load, sizes: 1.0 + sum(sizes.values()), 0.0)
    known = set(tune_kernels.defaults("gpu", loads[0]))
    assert set(entries) == {"work/Z64", LLAMA, LLAMA.replace("decode", "mixed")}
    assert all(set(sizes) <= known for sizes in entries.values())


def test_a_modelled_cost_is_the_larger_of_bundles_and_cycles_of_memory(monkeypatch: pytest.MonkeyPatch):
    target, (load,) = find_target("v5e"), loads_of("--model", "llama-3.1-8b", "--mode", "decode", "--context", "512")
    rates = core_rates(target.chip)
    asked: list[Any] = []

    def report_of(bundles: int | None, num_bytes: int | None):
        call = TpuKernelCost("attention", 10, 0, 0, None, bundles, None, num_bytes, 0, None if bundles else "a loop")

        def report(kernel, target, load, block_sizes):
            asked.append((kernel, target, block_sizes))
            return TpuReport(kernel, target, load, rates, calls=(call,))

        return report

    cost = modelled(target)
    monkeypatch.setattr(tune_kernels, "report", report_of(10**9, 1000))
    assert cost(load, {"pages_per_block": 4}) == pytest.approx(1e9)
    assert asked == [("tpu", "v5e:2x2", {"pages_per_block": 4})]
    monkeypatch.setattr(tune_kernels, "report", report_of(1, 10**9))
    assert cost(load, {}) == pytest.approx(rates.cycles(10**9))
    monkeypatch.setattr(tune_kernels, "report", report_of(None, None))
    with pytest.raises(NoCost, match="a loop"):
        cost(load, {})


def test_a_measured_cost_is_the_time_of_a_call(monkeypatch: pytest.MonkeyPatch):
    """With the implementation that runs here in place of a kernel."""
    monkeypatch.setattr(tune_kernels, "MEASURED_RUNS", 2)
    flags = ["--model", "smollm2-135m", "--mode", "decode", "--context", "64", "--batch", "2", "--kv-dtype", "int8"]
    (load,) = loads_of(*flags)
    assert 1e-7 < seconds_of("xla", find_target(), load, None) < 1.0
    with pytest.raises(NoCost, match="no module"):
        measured("nothing", find_target())(load, {})


def test_entries_are_written_beside_those_of_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    old = {"TPU v6 lite": {LLAMA: {"pages_per_block": 3}}, "TPU v5 lite": {"work/Z32": {"queries_per_tile": 32}}}
    (tmp_path / "tuned.json").write_text(json.dumps(old))
    monkeypatch.setattr(tune_kernels, "OP_FOLDER", tmp_path)
    monkeypatch.setattr(
        tune_kernels, "jobs", lambda names: [(find_target("v5e"), "TPU v5 lite", lambda load, sizes: 1.0, 0.02)]
    )
    flags = ["--model", "llama-3.1-8b", "--mode", "decode"]
    main([*flags, "--dry-run"])
    assert parse((tmp_path / "tuned.json").read_text(), "x") == old
    main(flags)
    new = {"TPU v5 lite": {"work/Z32": {"queries_per_tile": 32}, LLAMA: {"pages_per_block": 32}}}
    assert parse((tmp_path / "tuned.json").read_text(), "x") == old | new


def test_the_accelerator_that_is_here_is_tuned_by_time(monkeypatch: pytest.MonkeyPatch):
    here = find_target("v5e")
    monkeypatch.setattr(tune_kernels, "find_target", lambda: here)
    ((target, kind, _, tolerance),) = jobs([])
    assert (target, kind, tolerance) == (here, "TPU v5 lite", 0.0)
    assert jax.devices()[0].platform == "cpu", "nothing was started to find out"
