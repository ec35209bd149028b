"""Where prompts come from, and what is refused before a model is loaded."""

import io

import pytest

from jaxinfer.errors import RequestError
from jaxinfer.generate.flags import Command
from jaxinfer.generate.prompts import parse_lines, read_prompts

USER = {"role": "user", "content": "hi"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def read(stdin="", **command):
    return read_prompts(Command(**command), io.StringIO(stdin))


@pytest.mark.parametrize(
    ("command", "stdin", "prompts"),
    [
        ({"prompts": ("a", "b\nc")}, "unread", ["a", "b\nc"]),
        ({}, "line one\nline two\n", ["line one\nline two"]),
        ({"prompts": ("-",)}, "from there\n", ["from there"]),
        ({"prompts": ("a", "-", "c")}, "b", ["a", "b", "c"]),
        ({"file": "-"}, "one\n\n  \ntwo\n", ["one", "two"]),
        ({}, '{"prompt": "a"}\n{"messages": [{"role": "user", "content": "hi"}]}\n', ["a", [USER]]),
        ({}, '{"other": 1}', ['{"other": 1}']),
        ({"prompts": ("hi",), "chat": True}, "", [[USER]]),
        ({"prompts": ("hi",), "chat": True, "system": "s"}, "", [[{"role": "system", "content": "s"}, USER]]),
        ({"chat": True, "system": "s"}, '{"messages": [{"role": "user", "content": "hi"}]}', [[USER]]),
    ],
)
def test_prompts_are_read_in_order(command, stdin, prompts):
    assert read(stdin, **command) == prompts


def test_a_file_holds_a_prompt_on_each_line_or_json_lines(tmp_path):
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("one\n\ntwo")
    lines.write_text('\n{"prompt": "one"}\n')
    assert read(file=str(plain)) == ["one", "two"]
    assert read(file=str(lines)) == ["one"]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ({"prompts": ("a",), "system": "s"}, "add --chat"),
        ({"prompts": ("a",), "file": "f"}, "not both"),
        ({"prompts": ("-", "-")}, "may be given once"),
        ({}, "no prompt; give one"),
    ],
)
def test_a_command_line_that_makes_no_sense_leaves_with_code_2(command, reason, capsys):
    with pytest.raises(SystemExit, match="2"):
        read_prompts(Command(**command), Terminal())
    assert reason in capsys.readouterr().err


def test_a_closed_standard_input_counts_as_none(capsys):
    with pytest.raises(SystemExit, match="2"):
        read_prompts(Command(), None)
    assert "no prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "stdin", "reason"),
    [
        ({"prompts": ("",)}, "", "the prompt is empty"),
        ({"prompts": ("a", " \n")}, "", "prompt 2 is empty"),
        ({}, "\n", "the prompt is empty"),
        ({"file": "-"}, "\n\n", "standard input holds no prompt"),
        ({"prompts": ("\udcff",)}, "", "not valid UTF-8"),
    ],
)
def test_an_empty_or_broken_prompt_is_refused(command, stdin, reason):
    with pytest.raises(RequestError, match=reason):
        read(stdin, **command)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    binary = tmp_path / "b.txt"
    binary.write_bytes(b"\xff\xfe")
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "directory"), (binary, "not UTF-8")):
        with pytest.raises(RequestError, match=reason) as why:
            read(file=str(path))
        assert str(path) in str(why.value)


def test_standard_input_that_is_no_text_is_refused():
    stdin = io.TextIOWrapper(io.BytesIO(b"ok \xff"), encoding="utf-8")
    with pytest.raises(RequestError, match="standard input is not UTF-8"):
        read_prompts(Command(), stdin)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "a line is"),
        ("{}", "a line is"),
        ('{"prompt": "a", "messages": []}', "a line is"),
        ('{"prompt": 1}', "prompt must be text"),
        ('{"messages": []}', "messages must be a list"),
        ('{"messages": ["a"]}', "messages must be a list"),
        ('{"prompt": "a", "temprature": 1}', "'temprature' is not known"),
    ],
)
def test_a_wrong_json_line_is_named_by_its_number(line, reason):
    with pytest.raises(RequestError, match=reason) as why:
        parse_lines(f'{{"prompt": "ok"}}\n\n{line}\n', "p.jsonl")
    assert str(why.value).startswith("p.jsonl, line 3: ")
