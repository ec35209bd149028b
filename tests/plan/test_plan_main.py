"""The command from end to end on this machine, and its errors."""

from __future__ import annotations

import json
import math

import jax
import numpy as np
import pytest

from jaxinfer.plan import targets
from jaxinfer.plan.__main__ import main

SMALL = ["--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--page-size", "16", "--attention", "xla"]
KEYS = {
    *("jaxinfer", "jax", "model", "target", "attention", "page_size", "sizes", "memory", "engine_memory", "sequences"),
    *("programs", "decode", "prefill", "method", "num_failed", "works"),
}


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path, monkeypatch):
    """What planning writes down goes to a folder of the test's own."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))


def plan_json(capsys, *arguments):
    code = main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_small_model_is_planned_for_this_machine(small_model, capsys):
    code, plan = plan_json(capsys, "--model", str(small_model), "--target", "cpu", *SMALL, "--max-num-seqs", "1")
    assert code == 0
    assert plan["works"]
    assert set(plan) == KEYS
    assert {program["name"] for program in plan["programs"]} == {
        *("admit", "mixed:16", "decode:1", "score", "scrub", "copy_out", "copy_in")
    }
    assert all(program["is_compiled"] and program["reason"] is None for program in plan["programs"])
    memory = plan["memory"]
    parts = ("weight_bytes", "pool_bytes", "slot_bytes", "temporary_bytes")
    assert memory["total_bytes"] == sum(memory[part] for part in parts) <= memory["usable_bytes"]
    assert memory["hungriest"] in {program["name"] for program in plan["programs"]}
    assert plan["sequences"] == [{"length": 256, "by_pages": 1, "num_sequences": 1}]
    assert plan["model"]["num_parameters"] == 2 * (8192 + 4096 + 24576) + 2 * 512 * 64 + 5 * 64
    assert (plan["decode"], plan["prefill"]) == ([], []), "no rates of this machine are published"


def test_a_program_that_does_not_compile_fails_the_plan(small_model, monkeypatch, capsys):
    def lower(self, key):
        raise NotImplementedError("VMEM overflow")

    monkeypatch.setattr("jaxinfer.step.Programs.lower", lower)
    line = ("--model", str(small_model), "--programs", "scrub,admit", "--attention", "xla")
    code, plan = plan_json(capsys, *line)
    assert (code, plan["works"], plan["num_failed"]) == (1, False, 2)
    assert [p["reason"] for p in plan["programs"]] == ["NotImplementedError: VMEM overflow"] * 2
    assert main(line) == 1
    said = capsys.readouterr().out
    assert "scrub does not compile: NotImplementedError: VMEM overflow" in said
    assert "2 of 2 programs do NOT compile" in said


def test_the_tables_say_the_same(small_model, capsys):
    assert main(["--model", str(small_model), "--programs", "scrub", "--attention", "xla"]) == 0
    out = capsys.readouterr().out
    assert "all 1 programs compile; memory is enough." in out
    assert "No published rates are known for cpu" in out
    assert "attention: xla (asked for by name)" in out


@pytest.fixture
def borrowed(monkeypatch):
    """Targets have this machine's devices, so that all but the vendor's compiler is tested without it."""
    monkeypatch.setattr(targets.Target, "devices", lambda self: np.array(jax.devices()))


def test_times_are_predicted_for_a_chip_with_figures(small_model, borrowed, capsys):
    code, plan = plan_json(
        capsys,
        *("--model", str(small_model), "--target", "v5e:2x2", "--programs", "none", "--dtype", "bfloat16", *SMALL),
        *("--rows", "1", "--rows", "100", "--contexts", "128"),
    )
    assert code == 0
    assert plan["target"]["flops_per_s"] == 197e12
    one, hundred = plan["decode"]
    assert [one["is_room"], hundred["is_room"]] == [True, False], "there are two slots"
    for step in plan["decode"]:
        assert step["bound_by"] == "memory"
        assert step["seconds"] == max(step["memory_s"], step["compute_s"]) + step["link_s"]
        assert math.isclose(step["tokens_per_s"], step["rows"] / step["seconds"])
    assert [p["tokens"] for p in plan["prefill"]] == [256]


def test_what_does_not_fit_says_with_how_many_devices_it_would(small_model, borrowed, monkeypatch, capsys):
    # 67,121,152 bytes are reserved; weights and 17 pages take 348,800 more on one device, 174,720 on each of two.
    small = targets.CHIPS[1].__class__(**(vars(targets.CHIPS[1]) | {"usable_bytes": 67_400_000}))
    monkeypatch.setattr(targets, "CHIPS", (small,))
    line = ["--model", str(small_model), "--target", "v5e", "--programs", "none", "--dtype", "bfloat16"]
    assert main([*line, *SMALL, "--memory-utilization", "1.0", "--max-model-len", "256"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: max_model_len 256 needs 17 pages")
    assert "it fits with --tensor-parallel-size 2 --target v5e:2x2" in said


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--target v6", "did you mean 'v6e'"),
        ("--target cpu --programs decod:1", "did you mean 'decode:1'"),
        ("--target cpu --tensor-parallel-size 8", "cpu has 4 devices"),
        ("--target cpu --threads 0", "threads is 0"),
        ("--target cpu --rows 0", "rows has 0"),
        ("--target cpu --attention flash", "attention is 'flash'"),
    ],
)
def test_a_wrong_option_is_an_error_in_one_line(line, says, small_model, capsys):
    assert main(["--model", str(small_model), *line.split()]) == 1
    said = capsys.readouterr()
    assert says in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert said.out == ""


@pytest.mark.parametrize(
    ("name", "contents", "says"),
    [
        ("absent.json", None, "absent.json"),
        ("builtn", None, "did you mean 'builtin'?"),
        ("config.json", "[]", "holds one object"),
        ("config.json", "{", "Expecting property name"),
        ("config.json", '{"model_type": "lama"}', "llama"),
        ("model.bin", "x", "reads .gguf files"),
        (".", None, "the folder has no config.json"),
    ],
)
def test_a_model_that_cannot_be_read_is_named(name, contents, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if contents is not None:
        (tmp_path / name).write_text(contents)
    assert main(["--model", name, "--target", "cpu"]) == 1
    assert says in capsys.readouterr().err


def test_an_unknown_flag_leaves_with_code_2(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--modl", "x"])
    assert "unknown flag --modl; did you mean --model?" in capsys.readouterr().err
