"""Time to the first byte of a process."""

import sys

import pytest

from jaxinfer.bench.options import Start
from jaxinfer.bench.start import first_byte_seconds, measure
from jaxinfer.errors import JaxInferError


def line(code):
    return [sys.executable, "-c", code]


def test_first_byte_ends_the_time_but_not_the_process(tmp_path):
    after = tmp_path / "after"
    code = f"import time; print('x', flush=True); time.sleep(0.2); open({str(after)!r}, 'w').close()"
    assert first_byte_seconds(line(code), 60) > 0
    assert after.exists()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import sys; sys.exit('no model')", "exit code 1\nno model"),
        ("print('x'); raise SystemExit(3)", "exit code 3"),
        ("pass", "exit code 0"),
    ],
)
def test_failure_says_why(code, said):
    with pytest.raises(JaxInferError, match=said):
        first_byte_seconds(line(code), 60)


def test_process_that_hangs_is_ended():
    with pytest.raises(JaxInferError, match=r"no end within 0\.3 s"):
        first_byte_seconds(line("import time; time.sleep(60)"), 0.3)


def test_cold_start_has_an_empty_cache_of_its_own():
    check = "assert len(sys.argv) == 1 or (sys.argv[1] == '--compilation-cache' and not os.listdir(sys.argv[2]))"
    code = f"import os, sys; {check}; print('x')"
    times = measure(line(code), Start(cold=True, repeat=2))
    assert times.cold is not None
    assert len(times.warm) == 2
