"""Arithmetic of the report, on runs made by hand."""

import json

import pytest

from jaxinfer.bench.drive import COUNTERS, Answer, Run
from jaxinfer.bench.report import Spread, compare, figures, median_run, ms, share, speedups, spread, write_json


def answer(work_id="a", ids=(1, 2, 3), first=0.5, gaps=(0.0, 0.2), prompt=4, cached=0):
    return Answer(work_id, tuple(ids), prompt, cached, first, tuple(gaps), "length")


def run(*answers, seconds=2.0, passes=5, **counters):
    return Run(answers, seconds, dict.fromkeys(COUNTERS, 0.0) | counters, passes)


def test_percentiles_interpolate_between_neighbours():
    found = Spread.of([3.0, 1.0, 2.0, 4.0])
    assert found is not None
    assert (found.mean, found.p50) == (2.5, 2.5)
    assert found.p99 == pytest.approx(3.97)  # 0.99 x 3 = 2.97 steps after the least
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)
    assert Spread.of([]) is None


def test_figures_of_a_run():
    counters = {
        "host_seconds_total": 0.1,
        "busy_seconds_total": 2.0,
        "query_tokens_total": 60,
        "padded_tokens_total": 80,
        "num_steps_total": 9,
        "recompiles_total": 1,
    }
    first, second = answer(first=0.5, gaps=(0.0, 0.2)), answer("b", (4,), first=1.5, gaps=(), prompt=6, cached=2)
    found = figures(run(first, second, seconds=2.0, **counters))
    assert (found.num_requests, found.prompt_tokens, found.output_tokens, found.cached_tokens) == (2, 10, 4, 2)
    assert found.output_tokens_per_s == 2.0
    assert found.total_tokens_per_s == 7.0
    assert found.ttft is not None
    assert found.ttft.mean == 1.0
    assert found.itl is not None
    assert found.itl.mean == pytest.approx(0.1)
    assert found.tpot == Spread(0.1, 0.1, 0.1)  # the answer of one token has no gap
    assert found.host_overhead_ratio == pytest.approx(0.05)
    assert found.padded_ratio == pytest.approx(0.25)
    assert (found.num_steps, found.num_passes, found.num_recompiles, found.num_preemptions) == (9, 5, 1, 0)


def test_run_without_mixed_steps_has_no_padding():
    assert figures(run(answer())).padded_ratio is None


def test_median_run_is_one_of_the_runs():
    runs = [run(answer(), seconds=s) for s in (5.0, 1.0, 3.0)]
    assert median_run(runs) is runs[2]
    assert median_run(runs[:2]) is runs[1]


def test_speedups_are_taken_pair_by_pair():
    at_once = [run(answer(), seconds=s) for s in (1.0, 2.0)]
    one_by_one = [run(answer(), seconds=s) for s in (4.0, 6.0)]
    assert speedups(at_once, one_by_one) == [pytest.approx(4.0), pytest.approx(3.0)]


def test_equal_answers_agree():
    found = compare({"a": (1, 2)}, {"a": [1, 2], "other": [3]})
    assert found.is_whole
    assert (found.num_equal, found.num_compared, found.num_equal_tokens, found.num_tokens) == (1, 1, 2, 2)


@pytest.mark.parametrize(("ids", "num_equal"), [((1, 9, 3), 1), ((1, 2), 2), ((1, 2, 3, 4), 3), ((), 0)])
def test_differing_answer_counts_tokens_up_to_the_first_difference(ids, num_equal):
    found = compare({"a": ids, "b": (5,)}, {"a": [1, 2, 3], "b": [5]})
    assert not found.is_whole
    assert found.differing == ("a",)
    assert (found.num_equal_tokens, found.num_tokens) == (num_equal + 1, 4)


def test_request_without_expectation_does_not_agree():
    assert compare({"a": (1,)}, {}).differing == ("a",)
    assert not compare({}, {}).is_whole


def test_words():
    assert (ms(0.0123), ms(None)) == ("12.3 ms", "-")
    assert (share(0.125), share(None)) == ("12.5 %", "-")
    assert spread(Spread(1.0, 0.5, 2.0)) == "1,000.0 ms / 500.0 ms / 2,000.0 ms"


def test_record_is_valid_json(tmp_path):
    path = tmp_path / "out.json"
    write_json(path, {"x": 1.5})
    assert json.loads(path.read_text()) == {"x": 1.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"x": float("nan")})
