"""Both benchmarks on model T, without weights and without a look at the clock's values."""

import json

import pytest
import tiny

from jaxinfer.bench import attention, offline, report, steps
from jaxinfer.bench.bound import ProductBound
from jaxinfer.bench.dispatches import scattered_lengths, time_decode, time_prefill
from jaxinfer.bench.drive import run_at_once, run_one_by_one
from jaxinfer.bench.machine import MachineProbe
from jaxinfer.bench.options import Attention, Steps
from jaxinfer.bench.workload import Work
from jaxinfer.engine.metrics import engine_metrics
from jaxinfer.errors import ConfigError

SHARED = tuple(range(40, 72))  # two pages
WORKS = [
    Work(id=f"w{i}", prompt_token_ids=(*SHARED, *range(100 + i, 110 + 3 * i)), max_tokens=6 + 3 * i, ignore_eos=True)
    for i in range(3)
]


@pytest.fixture(scope="module")
def loaded():
    return tiny.shared_engine()


@pytest.fixture(scope="module")
def probe():
    probe = MachineProbe(read_shape=(64, 64), product_size=32)
    probe.visit()
    return probe


@pytest.mark.slow
def test_answers_are_those_of_the_engine_and_each_token_has_a_time(loaded):
    wanted = [
        tiny.run_greedy(loaded, [w.prompt_token_ids], max_tokens=w.max_tokens)[0].outputs[0].token_ids for w in WORKS
    ]
    run = run_at_once(loaded, WORKS, "e2e times")
    assert [a.id for a in run.answers] == [w.id for w in WORKS]
    assert [list(a.token_ids) for a in run.answers] == wanted
    assert all(len(a.gaps_s) == len(a.token_ids) - 1 and min(a.gaps_s) >= 0 < a.first_token_s for a in run.answers)
    assert all(a.first_token_s + sum(a.gaps_s) <= run.seconds for a in run.answers)
    assert run.num_passes >= max(w.max_tokens for w in WORKS)
    assert not loaded.engine.has_work()


@pytest.mark.slow
def test_cache_is_empty_at_the_start_of_a_run_and_shared_only_inside_one_at_once():
    # Two slots, so that the third request starts when the first prompt's pages are known.
    loaded = tiny.shared_engine(max_num_seqs=2)
    for i in range(2):
        run = run_at_once(loaded, WORKS, f"e2e cache {i}")
        assert run.answers[0].cached_tokens == 0
        assert run.answers[2].cached_tokens == len(SHARED)
    run = run_one_by_one(loaded, WORKS, "e2e cache alone")
    assert [a.cached_tokens for a in run.answers] == [0, 0, 0]


@pytest.mark.slow
def test_offline_record_and_table(loaded, probe, capsys, tmp_path):
    runs = offline.measure(loaded, WORKS, 2, True, tiny.shared_engine(attention="xla"))
    assert (len(runs.at_once), len(runs.one_by_one), len(runs.other_attention)) == (2, 2, 2)
    record = offline.summarize(loaded, runs, engine_metrics(loaded), probe.rates())
    assert record["at_once"]["output_tokens"] == sum(w.max_tokens for w in WORKS)
    assert len(record["speedups"]) == len(record["attention_speedups"]) == 2
    agreement = report.compare({"w0": (1,)}, {"w0": [2]})
    offline.show(record, [agreement])
    text = capsys.readouterr().out
    assert "output tokens/s" in text
    assert "0 of 1" in text
    assert f"{loaded.attention} / other attention" in text
    assert "ids differ in w0" in text
    report.write_json(tmp_path / "out.json", record)
    assert json.loads((tmp_path / "out.json").read_text())["max_num_seqs"] == 4


@pytest.mark.slow
def test_steps_record_and_table(loaded, probe, capsys):
    command = Steps(rows=(1, 2), prompts=(48,), context=24, dispatches=2, repeat=2)
    visits = steps.measure(loaded, command, probe)
    assert {rows: len(found) for rows, found in visits.products.items()} == {1: 2, 2: 2, 48: 2}
    cases = [steps.decode_figures(loaded, rows, visits, probe.rates()) for rows in command.rows]
    cases.append(steps.prefill_figures(loaded, 48, visits, probe.rates()))
    assert [len(c.engine_samples_s) for c in cases] == [2, 2, 2]
    assert all(abs(c.context - 24) < 3 for c in cases)
    record = {"model": "T", "dtype": "float32", "where": report.where_measured(), "machine": vars(probe.rates())}
    steps.show(record, cases)
    assert "prefill 48 with logits of every position" in capsys.readouterr().out
    assert not loaded.engine.has_work()
    loaded.engine.scheduler.audit()


@pytest.mark.slow
def test_attention_alone_is_timed_in_every_implementation_that_runs(monkeypatch, capsys, tmp_path, probe):
    monkeypatch.setattr(attention, "MachineProbe", lambda: probe)
    sizes = {"rows": 2, "context": 24, "prompt": 32, "long_context": 40, "draft_tokens": 3, "layers": 2, "repeat": 1}
    assert attention.run_attention(Attention(**sizes, head_dim=16, page_size=8, json=tmp_path / "out.json")) == 0
    cases = json.loads((tmp_path / "out.json").read_text())["cases"]
    assert {c["implementation"] for c in cases} == {"xla"}, "pages of 8 are too small for the native kernel"
    decode = next(c for c in cases if c["case"] == "decode 2 at 24")
    assert decode["kv_bytes"] % (2 * 4 * 3 * 16) == 0
    assert "prefill 32" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="page_size is 8"):
        attention.run_attention(Attention(**sizes, implementations=("cpu",), page_size=8))


@pytest.mark.slow
def test_more_rows_or_positions_than_there_are_is_an_error(loaded):
    with pytest.raises(ConfigError, match="rows is 5; max_num_seqs is 4"):
        time_decode(loaded, 5, 24, 1)
    with pytest.raises(ConfigError, match="max_model_len is 256"):
        time_prefill(loaded, 256, "too long")


@pytest.mark.parametrize(("rows", "context", "num_rounds"), [(1, 160, 32), (32, 160, 32), (2, 10, 40)])
def test_contexts_scatter_around_their_mean(rows, context, num_rounds):
    lengths = scattered_lengths(rows, context, num_rounds)
    assert len(lengths) == rows
    assert min(lengths) >= 1
    if context > num_rounds:
        assert sum(lengths) / rows == pytest.approx(context - num_rounds / 2, abs=1)


def test_products_of_a_visit_are_timed_in_every_form():
    found = ProductBound(tiny.tiny_architecture(), "float32", 2).visit(2)
    assert set(found.layers) == {"in_out", "out_in"}
    assert set(found.head) == {"in_out", "out_in", "table_first"}
