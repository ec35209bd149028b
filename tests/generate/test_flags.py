"""The command line: every field has its flag, values arrive in their fields, mistakes are named."""

import dataclasses

import pytest

from jaxinfer.config import EngineConfig
from jaxinfer.flags import attribute_texts
from jaxinfer.generate.flags import DEFAULTS, ENGINE_DEFAULTS, parse, usage_error
from jaxinfer.request import SamplingParams

PARTS = [f.default_factory for f in dataclasses.fields(EngineConfig) if f.default_factory is not dataclasses.MISSING]
SAMPLING = [f.name for f in dataclasses.fields(SamplingParams)]
ENGINE = [f.name for part in PARTS for f in dataclasses.fields(part)]


def help_text(capsys):
    with pytest.raises(SystemExit) as left:
        parse(["--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", [*SAMPLING, *ENGINE, "engine_seed"])
def test_every_field_has_a_flag(name, capsys):
    assert "--" + name.replace("_", "-") in help_text(capsys)


@pytest.mark.parametrize("cls", [SamplingParams, *PARTS])
def test_every_field_is_documented_where_its_help_comes_from(cls):
    assert set(attribute_texts(cls)) >= {f.name for f in dataclasses.fields(cls)}


def test_attribute_texts_joins_lines_and_gives_a_shared_entry_to_each_name():
    class Example:
        """An example.

        Attributes:
          a: first line,
            second line.
          b, c: both.

        Not an attribute:
          d: text.
        """

    assert attribute_texts(Example) == {"a": "first line, second line.", "b": "both.", "c": "both."}


def test_without_flags_the_classes_own_defaults_are_used_but_for_three():
    options = parse(["hi"])
    assert SamplingParams(**options.sampling) == SamplingParams(**DEFAULTS)
    assert EngineConfig.from_flat(**options.engine) == EngineConfig.from_flat(**ENGINE_DEFAULTS)
    assert options.command.prompts == ("hi",)
    assert options.command.stream
    assert not options.command.json


def test_values_arrive_in_their_fields():
    line = "--temperature 0.5 --top-k 7 --max-tokens None --ignore-eos --page-size 16 --no-prefix-caching"
    options = parse(line.split())
    params = SamplingParams(**options.sampling)
    config = EngineConfig.from_flat(**options.engine)
    assert (params.temperature, params.top_k, params.max_tokens, params.ignore_eos) == (0.5, 7, None, True)
    assert (config.cache.page_size, config.cache.enable_prefix_caching) == (16, False)


def test_lists_are_given_by_repeating_the_flag_and_swallow_no_prompt():
    line = ["--stop", "a", "--stop", "b", "--logit-bias", "3", "-100", "--logit-bias", "4", "2.5"]
    line += ["--allowed-token-ids", "5", "--allowed-token-ids", "6", "--bad-words", "w", "prompt"]
    options = parse(line)
    assert options.command.prompts == ("prompt",)
    assert options.sampling["stop"] == ("a", "b")
    assert options.sampling["logit_bias"] == {3: -100.0, 4: 2.5}
    assert options.sampling["allowed_token_ids"] == (5, 6)
    assert options.sampling["bad_words"] == ("w",)


def test_the_two_seeds_have_two_flags():
    options = parse(["--seed", "5", "--engine-seed", "6"])
    assert (options.sampling["seed"], options.engine["seed"]) == (5, 6)


def test_a_negative_number_and_a_prompt_after_two_dashes_are_no_flags():
    options = parse(["--temperature", "-1", "--", "--hello"])
    assert options.sampling["temperature"] == -1.0
    assert options.command.prompts == ("--hello",)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("--temprature 1", "unknown flag --temprature; did you mean --temperature?"),
        ("--top-pp=1", "unknown flag --top-pp; did you mean --top-p?"),
        ("--temp 1", "unknown flag --temp; did you mean --temperature?"),
        ("--no-prefix-cache", "unknown flag --no-prefix-cache; did you mean"),
        ("--qqqqqq", "unknown flag --qqqqqq (see"),
        ("-q", "unknown flag -q (see"),
        ("a --json --stop=x b", "unexpected argument 'b'"),
        ("--temperature abc", "could not convert string to float"),
        ("--max-tokens", "--max-tokens"),
    ],
)
def test_wrong_usage_is_named_and_leaves_with_code_2(line, reason, capsys):
    with pytest.raises(SystemExit) as left:
        parse(line.split())
    assert left.value.code == 2
    said = capsys.readouterr()
    assert reason in said.err
    assert said.out == ""


def test_usage_error_points_to_the_help(capsys):
    with pytest.raises(SystemExit, match="2"):
        usage_error("no")
    assert capsys.readouterr().err == "error: no (see python -m jaxinfer.generate --help)\n"
