"""The command line: the engine's options that a plan depends on have the engine's own flags."""

from __future__ import annotations

from dataclasses import fields

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError
from jaxinfer.plan.options import ENGINE_FIELDS, Command, parse


def test_every_engine_field_named_is_one():
    config = EngineConfig()
    parts = (config.model, config.cache, config.scheduler, config.parallel, config.compile)
    assert set(ENGINE_FIELDS) <= {f.name for part in parts for f in fields(part)}


def test_without_flags_the_defaults_are_those_of_the_engine():
    assert parse([]) == (Command(), EngineConfig())


def test_values_arrive_in_their_fields():
    line = "--target v5e:2x4 --model m.json --tensor-parallel-size 8 --kv-cache-dtype bf16 --rows 1 --rows 64 --json"
    command, config = parse(line.split())
    assert command == Command(target="v5e:2x4", rows=(1, 64), json=True)
    assert config == EngineConfig.from_flat(model="m.json", tensor_parallel_size=8, kv_cache_dtype="bfloat16")


@pytest.mark.parametrize("line", ["--kv-cache-dtype int3", "--threads 0", "--contexts 0", "--memory-utilization 2"])
def test_impossible_values_are_refused(line):
    with pytest.raises(ConfigError):
        parse(line.split())


def test_what_a_plan_does_not_depend_on_has_no_flag(capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(["--eviction-policy", "lru"])
    assert "unknown flag --eviction-policy" in capsys.readouterr().err
