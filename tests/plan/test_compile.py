"""Which programs are compiled, and what is kept of each."""

from __future__ import annotations

import pytest

from jaxinfer.errors import ConfigError
from jaxinfer.plan.compile import ProgramReport, choose_programs, compile_programs, program_name
from jaxinfer.step import CompileCounter

KEYS = [("admit",), ("mixed", 32), ("mixed", 16), ("decode", 4), ("scrub",)]


def test_programs_are_chosen_by_name_in_the_programs_own_order():
    assert choose_programs("all", KEYS) == KEYS
    assert choose_programs("none", KEYS) == []
    assert choose_programs("decode:4, mixed:16", KEYS) == [("mixed", 16), ("decode", 4)]


@pytest.mark.parametrize(
    ("asked", "says"), [("decode:5", "did you mean 'decode:4'"), ("xyz", "there are: all, none, admit"), (",", "empty")]
)
def test_a_wrong_program_says_what_there_is(asked, says):
    with pytest.raises(ConfigError, match=says):
        choose_programs(asked, KEYS)


def test_reports_come_in_order_and_know_the_pool(make_layout):
    layout = make_layout(num_pages=100)
    programs = layout.programs(CompileCounter())
    told: list[str] = []
    keys = [("scrub",), ("admit",), ("decode", 1)]
    reports = compile_programs(programs, keys, 2, lambda report: told.append(report.name))
    assert [report.name for report in reports] == [program_name(key) for key in keys]
    assert sorted(told) == sorted(report.name for report in reports)
    scrub, _, decode = reports
    assert all(report.is_compiled and report.compile_s > 0 for report in reports)
    assert scrub.alias_bytes == layout.memory.pool_bytes
    weights_and_pool = layout.memory.weight_bytes + layout.memory.pool_bytes
    assert weights_and_pool < decode.argument_bytes < 1.5 * weights_and_pool
    assert decode.flops > 2 * 1 * 65536, "at least the products of one token"


class Broken:
    """Programs of which one cannot be lowered, and one not compiled."""

    def lower(self, key):
        if key == ("admit",):
            raise NotImplementedError("no\n  such op")
        return self

    def compile(self):
        raise RuntimeError("Ran out of memory on HBM")


def test_a_program_that_does_not_compile_keeps_the_compilers_words():
    reports = compile_programs(Broken(), [("admit",), ("decode", 4)], 1, lambda report: None)
    assert [report.reason for report in reports] == [
        "NotImplementedError: no such op",
        "RuntimeError: Ran out of memory on HBM",
    ]
    assert not any(report.is_compiled for report in reports)


def test_a_program_needs_its_temporaries_new_results_and_code():
    report = ProgramReport(name="x", output_bytes=100, alias_bytes=90, temporary_bytes=5, code_bytes=3)
    assert report.own_bytes == 18
