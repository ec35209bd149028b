"""Reading workloads: what is right is taken, what is wrong is named by entry and field."""

import json

import pytest

from jaxinfer.bench.workload import Work, check_fits, read_expected, read_workload, synthetic_workload
from jaxinfer.errors import ConfigError

GOOD = {"id": "a", "prompt_token_ids": [1, 2], "max_tokens": 3, "ignore_eos": True}


def written(tmp_path, value, name="workload.json"):
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


def test_entries_are_read_in_order(tmp_path):
    second = {"id": "b", "prompt_token_ids": [5], "max_tokens": 1}
    assert read_workload(written(tmp_path, [GOOD, second])) == [
        Work(id="a", prompt_token_ids=(1, 2), max_tokens=3, ignore_eos=True),
        Work(id="b", prompt_token_ids=(5,), max_tokens=1, ignore_eos=False),
    ]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": 3}, "id is 3"),
        ({"id": ""}, "id is ''"),
        ({"prompt_token_ids": []}, "prompt_token_ids must be a list with at least one"),
        ({"prompt_token_ids": "text"}, "prompt_token_ids must be a list"),
        ({"prompt_token_ids": [1, -1]}, "prompt_token_ids holds -1"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids holds True"),
        ({"prompt_token_ids": [1.5]}, r"prompt_token_ids holds 1\.5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"ignore_eos": 1}, "ignore_eos is 1"),
        ({"max_token": 5}, "unknown field 'max_token'; did you mean 'max_tokens'"),
        ({"zzz": 5}, "unknown field 'zzz'; the fields are id, "),
    ],
)
def test_wrong_field_is_named_with_its_entry(tmp_path, change, said):
    good = GOOD | {"id": "other"}
    with pytest.raises(ConfigError, match=f"workload.json: entry 1: {said}"):
        read_workload(written(tmp_path, [good, GOOD | change]))


@pytest.mark.parametrize("name", ["id", "prompt_token_ids", "max_tokens"])
def test_missing_field_is_named(tmp_path, name):
    entry = {k: v for k, v in GOOD.items() if k != name}
    with pytest.raises(ConfigError, match=f"entry 0: field '{name}' is missing"):
        read_workload(written(tmp_path, [entry]))


def test_id_used_twice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="entry 1: id 'a' is used twice"):
        read_workload(written(tmp_path, [GOOD, GOOD]))


@pytest.mark.parametrize("value", [[], {}, "7", "not json", [3]])
def test_something_else_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"workload\.json"):
        read_workload(written(tmp_path, value))


def test_absent_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json"):
        read_workload(tmp_path / "none.json")


@pytest.mark.parametrize("value", [[], {"a": 3}, {"a": [1, "x"]}])
def test_wrong_expectation_is_refused(tmp_path, value):
    with pytest.raises(ConfigError, match=r"ids\.json"):
        read_expected(written(tmp_path, value, "ids.json"))


def test_synthetic_workload_is_always_the_same_and_in_the_vocabulary():
    works = synthetic_workload(100)
    assert works == synthetic_workload(100)
    assert len({w.id for w in works}) == len(works) == 16
    assert all(16 <= len(w.prompt_token_ids) <= 256 and 16 <= w.max_tokens <= 64 and w.ignore_eos for w in works)
    check_fits(works, 100, 320)


def test_workload_that_the_model_cannot_run_is_refused():
    work = Work(id="w", prompt_token_ids=(1, 9), max_tokens=4)
    check_fits([work], 10, 6)
    with pytest.raises(ConfigError, match=r"'w'.* holds 9; this model's ids end at 8"):
        check_fits([work], 9, 6)
    with pytest.raises(ConfigError, match="'w' needs 6 positions; max_model_len is 5"):
        check_fits([work], 10, 5)
