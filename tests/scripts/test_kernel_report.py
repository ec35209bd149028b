"""The report's flags, its workloads, and the figures it makes from a run."""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernel_model.compile_one import UNKNOWN, pallas_operands
from kernel_model.shapes import MODELS, AttentionShape, Workload
from kernel_model.show import show_tpu
from kernel_model.tpu_cost import LoopCost, TpuKernelCost, TpuReport
from kernel_model.units import core_rates
from kernel_report import parse, targets, workloads
from rich.console import Console

from jaxinfer.plan.targets import CHIPS


def test_every_model_mode_and_dtype_is_one_workload():
    options = parse(["--model", "llama-3.1-8b,gemma-2-9b", "--mode", "decode,prefill", "--kv-dtype", "int8"])
    loads = workloads(options)
    assert {(w.model, w.mode) for w in loads} == {
        (m, d) for m in ("llama-3.1-8b", "gemma-2-9b") for d in ("decode", "prefill")
    }
    assert {w.kv_dtype for w in loads} == {"int8"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "llama-3.1-9b"], "did you mean 'llama-3.1-8b'"),
        (["--mode", "decodes"], "did you mean 'decode'"),
        (["--kernel", "tpu,jacks"], "'jacks' is unknown"),
        (["--kv-dtype", "int4"], "There are: float32"),
        (["--page-size", "0"], "'0' is not a positive whole number"),
        (["--context", "100", "--mode", "prefill"], "raise --context"),
        (["--targets", "v5e"], "unrecognized arguments: --targets"),
    ],
)
def test_wrong_flags_end_with_what_is_allowed(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(flags)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("name", "message"), [("v5x", "did you mean 'v5"), ("cpu", "give a TPU or a GPU")])
def test_wrong_targets_end_with_what_is_allowed(name, message, capsys):
    with pytest.raises(SystemExit):
        targets([name])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("window", [None, 1, 16, 17, 100, 1000])
def test_pages_to_read_and_products_are_those_that_some_query_sees(window, monkeypatch):
    shape = AttentionShape(num_kv_heads=2, group=3, head_dim=8, window=window)
    monkeypatch.setitem(MODELS, "mine", shape)
    load = Workload(model="mine", mode="mixed", batch=3, context=77, chunk=20, page_size=16)
    pages, seen = set(), 0
    for row, length in enumerate(load.query_lens):
        for query in range(load.context - length, load.context):
            keys = range(max(0, query + 1 - (window or load.context)), query + 1)
            pages |= {(row, key // load.page_size) for key in keys}
            seen += len(keys)
    assert load.pages_to_read == len(pages)
    assert load.product_flop == seen * 2 * 3 * 8 * 4


def test_page_bytes_count_scales_of_quantized_pages():
    plain = Workload(model="llama-3.1-8b", page_size=16)
    assert plain.page_bytes == 2 * 16 * 8 * 128 * 2
    assert Workload(model="llama-3.1-8b", page_size=16, kv_dtype="int8").page_bytes == 2 * 16 * 8 * (128 + 4)


def test_a_table_names_every_page_but_the_null_page_once():
    table = Workload(model="llama-3.1-8b", batch=5, context=100, page_size=16).table()
    assert sorted(table.ravel()) == list(range(1, 36))


def test_clocks_follow_from_peak_rates():
    clocks = {chip.name: core_rates(chip).clock_hz / 1e9 for chip in CHIPS if chip.platform == "tpu"}
    assert {name: round(hz, 2) for name, hz in clocks.items()} == {
        "v4": 1.05,
        "v5e": 1.5,
        "v5p": 1.75,
        "v6e": 1.75,
        "tpu7x": 2.2,
    }


def report_of(loop_bundles: int, bundles: int, bytes_read: int) -> TpuReport:
    load = Workload(model="llama-3.1-8b", batch=2, context=256, page_size=128)
    call = TpuKernelCost(
        name="attention",
        static_bundles=100,
        vmem_bytes=1 << 20,
        num_spills=3,
        loop=LoopCost(50, 2, loop_bundles / 2, {"MXU": 0.5, "VALU": 0.25}),
        executed_bundles=bundles,
        loop_bundles=loop_bundles,
        bytes_read=bytes_read,
        bytes_written=0,
    )
    chip = next(chip for chip in CHIPS if chip.name == "v5e")
    return TpuReport("tpu", "v5e", load, core_rates(chip), calls=(call,))


def test_figures_compare_bundles_with_the_cycles_of_reading_each_page_once():
    least = 4 * 2 * 128 * 8 * 128 * 2
    cycles = least / 819e9 * 197e12 / 131072
    figures = report_of(loop_bundles=4000, bundles=5000, bytes_read=2 * least).figures()
    assert figures["loop_bundles_per_page"] == 1000
    assert figures["page_cycles"] == pytest.approx(cycles / 4)
    assert figures["loop_ratio"] == pytest.approx(4000 / cycles)
    assert figures["bytes_ratio"] == 2
    # Here reading takes longer than the bundles; there the bundles do.
    assert figures["call_ratio"] == pytest.approx(2)
    assert report_of(4000, 50000, least).figures()["call_ratio"] == pytest.approx(50000 / cycles)


def test_tables_show_kernels_beside_each_other_and_why_one_was_refused():
    console = Console(width=250, record=True, file=io.StringIO())
    good = report_of(4000, 5000, 1 << 20)
    refused = TpuReport("jax", "v5e", good.workload, good.rates, refused="NotImplementedError: heads\n of 64")
    show_tpu(console, [good, refused])
    text = console.export_text()
    assert "2000 x 2" in text
    assert "MXU 50%" in text
    assert "refused: NotImplementedError: heads of 64" in text


def test_reports_are_json():
    data = json.loads(json.dumps(report_of(4000, 5000, 1 << 20).to_dict()))
    assert data["figures"]["loop_bundles_per_page"] == 1000
    assert data["calls"][0]["loop"]["unit_ratios"]["MXU"] == 0.5


def test_integers_that_a_kernel_is_given_are_worked_out_up_to_the_call():
    def kernel(rows_ref, x_ref, out_ref):
        out_ref[...] = x_ref[...] * rows_ref[0].astype(jnp.float32)

    def program(lengths, x):
        pages = jax.jit(lambda n: (n + 15) // 16)(lengths)
        order = jnp.argsort(pages, stable=True).astype(jnp.int32)
        return pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(1,),
                in_specs=[pl.BlockSpec((8, 128), lambda *_: (0, 0))],
                out_specs=pl.BlockSpec((8, 128), lambda *_: (0, 0)),
            ),
            out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
            name="small",
        )(order, x)

    lengths = np.array([40, 3, 17], np.int32)
    jaxpr = jax.make_jaxpr(program)(lengths, jax.ShapeDtypeStruct((8, 128), jnp.float32))
    ((name, operands),) = pallas_operands(jaxpr, [lengths, UNKNOWN])
    assert name == "small"
    assert list(operands) == [0]
    np.testing.assert_array_equal(operands[0], [1, 2, 0])
