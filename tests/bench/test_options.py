"""The command line."""

import pytest

from jaxinfer.bench import __main__ as command
from jaxinfer.bench.options import Attention, Offline, Start, Steps, flat_options
from jaxinfer.config import EngineConfig
from jaxinfer.errors import ConfigError


@pytest.fixture
def parsed(monkeypatch):
    """Runs the command line up to what would be measured, and gives the parsed command."""

    def parse(*arguments):
        found = []
        monkeypatch.setattr(command, "_run", lambda parsed: found.append(parsed) or 0)
        code = command.main(arguments)
        return found[0] if found else code

    return parse


def test_engine_options_are_flags(parsed):
    found = parsed("offline", "--baseline", "--repeat", "3", "--max-num-seqs", "8", "--model", "x.gguf", "--seed", "5")
    assert isinstance(found, Offline)
    assert (found.baseline, found.repeat) == (True, 3)
    assert found.engine == EngineConfig.from_flat(max_num_seqs=8, model="x.gguf", seed=5)


def test_lists_of_cases_are_flags(parsed):
    found = parsed("steps", "--rows", "2", "4", "--prompts", "64")
    assert isinstance(found, Steps)
    assert (found.rows, found.prompts) == ((2, 4), (64,))


def test_attention_has_its_own_flags(parsed):
    found = parsed("attention", "--implementations", "xla", "cpu", "--page-size", "32")
    assert isinstance(found, Attention)
    assert (found.implementations, found.page_size) == (("xla", "cpu"), 32)


def test_start_has_its_own_flags(parsed):
    found = parsed("start", "--cold")
    assert isinstance(found, Start)
    assert found.cold


def test_wrong_value_is_an_error_in_one_line(parsed, capsys):
    assert parsed("offline", "--repeat", "0") == 1
    assert capsys.readouterr().err == "error: repeat is 0; it must be at least 1\n"


def test_flat_options_make_the_same_configuration_and_fill_what_is_open():
    config = EngineConfig.from_flat(page_size=16, dtype="float32", seed=None)
    assert EngineConfig.from_flat(**flat_options(config)) == config
    assert flat_options(config, max_num_seqs=3)["max_num_seqs"] == 3
    assert flat_options(EngineConfig.from_flat(max_num_seqs=7), max_num_seqs=3)["max_num_seqs"] == 7


@pytest.mark.parametrize("change", [{"rows": (0,)}, {"context": 1}, {"repeat": 0}, {"rows": (), "prompts": ()}])
def test_impossible_steps_are_refused(change):
    with pytest.raises(ConfigError):
        Steps(**change)
