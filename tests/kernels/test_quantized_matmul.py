"""Every implementation against the product written out in numpy float64.

Weights are normal draws, rounded to a group's own scale, and groups have magnitudes of their own, so that a scale of a
wrong group shows. Differences are counted in units of an output's spread: sqrt(sum of (x w)^2), what a sum of as many
products of either sign comes to.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels.quantized_matmul import SCHEMES, MatmulNeeds, QuantizedWeight, get_matmul, gpu, tpu
from pallas_kernels.quantized_matmul.cases import CASES, MatmulCase

# Largest difference, in units of an output's spread. A mutant must exceed ten times as much.
TOLERANCES = {
    "float32": 5e-6,  # sums of at most 1024 products in another order: measured 4e-7
    # The output is rounded to 8 bits: of values up to 5 spreads, half a unit in the last place is 5 x 2**-9 = 1e-2.
    # Weights rounded to bfloat16 move it by 2**-9 / sqrt(3) of a spread, five times that at most: 6e-3.
    "bfloat16": 1.6e-2,
    # The TPU kernel rounds scales too. Where one group outweighs the others, that is as much as rounding the output.
    "bfloat16 scales": 2.6e-2,
}
BY_NAME = {case.name: case for case in CASES}
IMPLEMENTATIONS = {
    "reference": get_matmul("reference", MatmulNeeds(platform="cpu", scheme="w4a16")).op,
    "xla": get_matmul("xla", MatmulNeeds(platform="cpu", scheme="w4a16")).op,
    "tpu": tpu.make_op(interpret=True),
    "gpu": gpu.make_op(interpret=True),
}
KERNELS = ("tpu", "gpu")  # w4a16 alone, bfloat16 alone


@dataclass(frozen=True)
class Drawn:
    """A case's arrays.

    Attributes:
      values_IO: the stored integers, as int8.
      scale_UO: of groups; one group for int8.
      is_group_wise: w4a16.
    """

    x_TI: np.ndarray
    values_IO: np.ndarray
    scale_UO: np.ndarray
    is_group_wise: bool

    def weight(self) -> QuantizedWeight:
        """As the op takes it."""
        if self.is_group_wise:
            return QuantizedWeight(jnp.asarray(self.values_IO, jnp.int4), jnp.asarray(self.scale_UO))
        return QuantizedWeight(jnp.asarray(self.values_IO), jnp.asarray(self.scale_UO[0]))

    def weight_IO(self) -> np.ndarray:
        """float64, dequantized."""
        size = self.values_IO.shape[0] // self.scale_UO.shape[0]
        return self.values_IO.astype(np.float64) * np.repeat(self.scale_UO.astype(np.float64), size, axis=0)


@functools.cache
def draw(case: MatmulCase, scheme: str) -> Drawn:
    rng = np.random.default_rng(zlib.crc32(f"{case.name} {scheme}".encode()))
    is_group_wise = scheme == "w4a16"
    size, limit = (case.group_size, 7) if is_group_wise else (case.num_inputs, 127)
    groups = case.num_inputs // size
    spread_UO = np.exp(rng.normal(size=(groups, case.num_outputs))) / np.sqrt(case.num_inputs)
    w_UEO = rng.normal(size=(groups, size, case.num_outputs)) * spread_UO[:, None]
    scale_UO = (np.abs(w_UEO).max(axis=1) / limit).astype(np.float32)
    values_UEO = np.rint(w_UEO / scale_UO[:, None]).astype(np.int8)
    # The lowest int4 has no positive twin: symmetric rounding never makes it, and other quantizers do.
    values_UEO[:, 0] = -8 if is_group_wise else values_UEO[:, 0]
    x_TI = rng.standard_normal((case.num_rows, case.num_inputs)).astype(jnp.dtype(case.dtype))
    if scheme == "w8a8":
        x_TI = clear_of_ties(x_TI)
    return Drawn(x_TI, values_UEO.reshape(case.num_inputs, -1), scale_UO, is_group_wise)


def clear_of_ties(x_TI: np.ndarray, x_scale: float | None = None) -> np.ndarray:
    """Without values that the last bit of a scale would round to another step: that bit is XLA's to choose."""
    while True:
        steps_TI = x_TI.astype(np.float64) / activation_scale(x_TI, x_scale)
        is_tie_TI = np.abs(steps_TI % 1 - 0.5) < 1e-4
        if not is_tie_TI.any():
            return x_TI
        x_TI = np.where(is_tie_TI, x_TI * np.asarray(0.97, x_TI.dtype), x_TI)


def activation_scale(x_TI: np.ndarray, x_scale: float | None) -> np.ndarray:
    """float32 [T, 1]: the calibrated one, or each row's own."""
    if x_scale is not None:
        return np.full((x_TI.shape[0], 1), x_scale, np.float32)
    scale_T1 = np.abs(x_TI.astype(np.float32)).max(axis=1, keepdims=True) / np.float32(127)
    return np.where(scale_T1 == 0, np.float32(1), scale_T1)


def rounded(x_TI: np.ndarray, x_scale: float | None = None) -> np.ndarray:
    """float64 values of activations as int8 holds them. The steps are found in float32, as the contract has it."""
    x_TI = x_TI.astype(np.float32)
    scale_T1 = activation_scale(x_TI, x_scale)
    return np.clip(np.rint(x_TI / scale_T1), -127, 127).astype(np.float64) * scale_T1.astype(np.float64)


def expected(drawn: Drawn, scheme: str, x_scale: float | None = None) -> np.ndarray:
    x_TI = rounded(drawn.x_TI, x_scale) if scheme == "w8a8" else drawn.x_TI.astype(np.float64)
    return x_TI @ drawn.weight_IO()


def run(name: str, drawn: Drawn, scheme: str, **options) -> np.ndarray:
    op = IMPLEMENTATIONS[name]
    y_TO = jax.jit(functools.partial(op.matmul, scheme=scheme))(drawn.x_TI, drawn.weight(), **options)
    assert y_TO.dtype == drawn.x_TI.dtype
    return np.asarray(y_TO, np.float64)


def tolerance(name: str, dtype: str) -> float:
    """Of an implementation."""
    return TOLERANCES["bfloat16 scales" if name == "tpu" else dtype]


def difference(y_TO, drawn: Drawn, wanted_TO) -> float:
    spread_TO = np.sqrt(drawn.x_TI.astype(np.float64) ** 2 @ drawn.weight_IO() ** 2)
    return float(np.max(np.abs(y_TO - wanted_TO) / spread_TO))


RUNS = [(name, scheme, case) for name in ("reference", "xla") for scheme in SCHEMES for case in CASES] + [
    (name, "w4a16", replace(case, dtype="bfloat16")) for name in KERNELS for case in CASES
]


@pytest.mark.parametrize(("name", "scheme", "case"), [pytest.param(*r, id=f"{r[0]}-{r[1]}-{r[2].name}") for r in RUNS])
def test_product_is_that_of_the_dequantized_weight(name, scheme, case):
    drawn = draw(case, scheme)
    assert difference(run(name, drawn, scheme), drawn, expected(drawn, scheme)) < tolerance(name, case.dtype)


def wrong_group(drawn: Drawn) -> Drawn:
    return replace(drawn, scale_UO=np.roll(drawn.scale_UO, 1, axis=0))


def wrong_column(drawn: Drawn) -> Drawn:
    return replace(drawn, scale_UO=np.roll(drawn.scale_UO, 1, axis=1))


def doubled_scale(drawn: Drawn) -> Drawn:
    return replace(drawn, scale_UO=drawn.scale_UO * np.float32(2))


def swapped_half_bytes(drawn: Drawn) -> Drawn:
    inputs, outputs = drawn.values_IO.shape
    return replace(
        drawn, values_IO=drawn.values_IO.reshape(inputs, outputs // 2, 2)[:, :, ::-1].reshape(inputs, outputs)
    )


def swapped_inputs(drawn: Drawn) -> Drawn:
    inputs, outputs = drawn.values_IO.shape
    return replace(drawn, values_IO=drawn.values_IO.reshape(inputs // 2, 2, outputs)[:, ::-1].reshape(inputs, outputs))


def unsigned_half_bytes(drawn: Drawn) -> Drawn:
    return replace(drawn, values_IO=drawn.values_IO & 15)


MUTANTS = (wrong_group, wrong_column, doubled_scale, swapped_half_bytes, swapped_inputs, unsigned_half_bytes)


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("name", ["xla", *KERNELS])
@pytest.mark.parametrize("case", ["eight_rows", "fewest_dequantized_rows", "bfloat16_rows"])
def test_mutant_of_the_weight_exceeds_the_tolerance_tenfold(mutant, name, case):
    case = replace(BY_NAME[case], dtype="bfloat16" if name in KERNELS else BY_NAME[case].dtype)
    drawn = draw(case, "w4a16")
    y_TO = expected(mutant(drawn), "w4a16")
    assert difference(run(name, drawn, "w4a16"), drawn, y_TO) > 10 * tolerance(name, case.dtype)


@pytest.mark.parametrize("scheme", ["w8a16", "w8a8"])
@pytest.mark.parametrize("mutant", [wrong_column, doubled_scale])
def test_mutant_of_a_column_scale_exceeds_the_tolerance_tenfold(mutant, scheme):
    drawn = draw(BY_NAME["eight_rows"], scheme)
    y_TO = expected(mutant(drawn), scheme)
    assert difference(run("xla", drawn, scheme), drawn, y_TO) > 10 * TOLERANCES["float32"]


def test_rounding_activations_costs_what_theory_says():
    drawn = draw(BY_NAME["many_rows"], "w8a8")
    error_TO = run("xla", drawn, "w8a8") - drawn.x_TI.astype(np.float64) @ drawn.weight_IO()
    # An error spread evenly over a step has the standard deviation step / sqrt(12).
    step_T1 = np.abs(drawn.x_TI).max(axis=1, keepdims=True).astype(np.float64) / 127
    theory_TO = step_T1 / np.sqrt(12) * np.sqrt((drawn.weight_IO() ** 2).sum(axis=0))[None, :]
    assert np.sqrt(np.mean((error_TO / theory_TO) ** 2)) == pytest.approx(1, rel=0.05)  # 19,200 outputs: 1 % at most


@pytest.mark.parametrize("name", ["reference", "xla"])
@pytest.mark.parametrize("x_scale", [4 / 127, 1 / 127])  # of all values, and of two thirds of them
def test_calibrated_activation_scale_rounds_and_cuts_off(name, x_scale):
    drawn = draw(BY_NAME["eight_rows"], "w8a8")
    drawn = replace(drawn, x_TI=clear_of_ties(drawn.x_TI, x_scale))
    y_TO = run(name, drawn, "w8a8", x_scale=jnp.float32(x_scale))
    assert difference(y_TO, drawn, expected(drawn, "w8a8", x_scale)) < TOLERANCES["float32"]


@pytest.mark.parametrize(
    ("name", "scheme"), [*((n, s) for n in ("reference", "xla") for s in SCHEMES), *((n, "w4a16") for n in KERNELS)]
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("is_calibrated", [False, True])
def test_bad_row_shows_and_spoils_no_other(name, scheme, bad, is_calibrated):
    if is_calibrated and scheme != "w8a8":
        pytest.skip("only w8a8 has activation scales")
    options = {"x_scale": jnp.float32(4 / 127)} if is_calibrated else {}
    drawn = draw(replace(BY_NAME["eight_rows"], dtype="bfloat16"), scheme)
    good_TO = run(name, drawn, scheme, **options)
    x_TI = drawn.x_TI.copy()
    x_TI[3, 17] = bad
    y_TO = run(name, replace(drawn, x_TI=x_TI), scheme, **options)
    assert not np.isfinite(y_TO[3]).any()
    np.testing.assert_array_equal(np.delete(y_TO, 3, axis=0), np.delete(good_TO, 3, axis=0))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_row_of_zeros_gives_zeros(scheme):
    drawn = draw(BY_NAME["eight_rows"], scheme)
    assert not run("xla", replace(drawn, x_TI=np.zeros_like(drawn.x_TI)), scheme).any()


@pytest.mark.parametrize("split", ["inputs", "outputs"])
@pytest.mark.parametrize(("name", "scheme"), [*(("xla", s) for s in SCHEMES), *((n, "w4a16") for n in KERNELS)])
def test_sharded_product_is_the_whole_one(split, name, scheme):
    case = replace(BY_NAME["eight_rows"], dtype="bfloat16" if name in KERNELS else "float32")
    drawn = draw(case, scheme)
    mesh = Mesh(np.array(jax.devices()[:4]), ("model",))
    scales = {("inputs", True): P("model", None), ("inputs", False): P(None), ("outputs", True): P(None, "model")}
    scale_spec = scales.get((split, drawn.is_group_wise), P("model"))
    values_spec, x_spec, out_spec = (
        (P("model", None), P(None, "model"), P()) if split == "inputs" else (P(None, "model"), P(), P(None, "model"))
    )

    def part(x_TI, values_IO, scale):
        y_TO = IMPLEMENTATIONS[name].matmul(x_TI, QuantizedWeight(values_IO, scale), scheme=scheme)
        return jax.lax.psum(y_TO, "model") if split == "inputs" else y_TO

    sharded = jax.shard_map(
        part, mesh=mesh, in_specs=(x_spec, values_spec, scale_spec), out_specs=out_spec, check_vma=False
    )
    y_TO = np.asarray(jax.jit(sharded)(drawn.x_TI, *drawn.weight()), np.float64)
    if scheme == "w8a8" and split == "inputs":
        parts = np.split(drawn.x_TI, 4, axis=1)
        wanted_TO = np.concatenate([rounded(x_TI) for x_TI in parts], axis=1) @ drawn.weight_IO()
    else:
        wanted_TO = expected(drawn, scheme)
    # Adding four rounded parts rounds five times.
    assert difference(y_TO, drawn, wanted_TO) < (5 if split == "inputs" else 1) * tolerance(name, case.dtype)


def test_gpu_splits_inputs_and_walks_several_groups_a_step():
    """The sizes that the defaults give at the cases' shapes never split; those of real models do."""
    sizes = gpu.BlockSizes(rows=16, outputs=64, splits=5, warps=4, stages=3)  # 9 steps over 5 splits: the last is short
    op = gpu.make_op(interpret=True, block_sizes=sizes)
    drawn = draw(replace(BY_NAME["bfloat16_rows"], num_rows=20), "w4a16")
    assert drawn.scale_UO.shape[0] == 18
    y_TO = np.asarray(op.matmul(jnp.asarray(drawn.x_TI), drawn.weight(), scheme="w4a16"), np.float64)
    assert difference(y_TO, drawn, expected(drawn, "w4a16")) < TOLERANCES["bfloat16"]


@pytest.mark.parametrize("num_rows", [1, 8, 32, 128, 256])
@pytest.mark.parametrize("shape", [(4096, 6144), (4096, 28672), (14336, 4096), (576, 960)])
def test_gpu_default_sizes_keep_the_parts_smaller_than_the_dequantized_weight(num_rows, shape):
    sizes = gpu.default_block_sizes(num_rows, *shape)
    assert sizes.rows >= min(num_rows, 128)
    assert sizes.splits * num_rows * shape[1] * 4 <= 2 * shape[0] * shape[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "tpu"}, "NVIDIA"),
        ({"scheme": "w8a16"}, "reads the weight once"),
        ({"dtype": "float32"}, "bfloat16 is supported"),
        ({"num_rows": 512}, "512 rows"),
        ({"group_size": 48}, "powers of two"),
        ({"num_outputs": 130}, "multiple of 4"),
    ],
)
def test_gpu_refuses_what_it_cannot_run(changes, reason):
    needs = MatmulNeeds(platform="cuda", scheme="w4a16", dtype="bfloat16", num_rows=8, num_outputs=128, group_size=128)
    assert get_matmul("auto", needs).op.name == "gpu"
    needs = replace(needs, **changes)
    with pytest.raises(NotImplementedError, match=reason):
        get_matmul("gpu", needs)
    assert get_matmul("auto", needs).op.name == ("tpu" if needs.platform == "tpu" else "xla")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"platform": "gpu"}, "Mosaic"),
        ({"scheme": "w8a8"}, "reads the weight once"),
        ({"device_kind": "TPU v5 lite"}, "no bfloat16 vector unit"),
        ({"dtype": "float32"}, "bfloat16 is supported"),
        ({"num_rows": 1024}, "1024 rows"),
        ({"group_size": 16}, "groups of 16"),
        ({"num_inputs": 96}, "multiple of 64"),
    ],
)
def test_tpu_refuses_what_it_cannot_run(changes, reason):
    needs = MatmulNeeds(
        platform="tpu",
        scheme="w4a16",
        dtype="bfloat16",
        num_rows=8,
        num_inputs=128,
        group_size=32,
        device_kind="TPU v6 lite",
    )
    assert get_matmul("auto", needs).op.name == "tpu"
    needs = replace(needs, **changes)
    with pytest.raises(NotImplementedError, match=reason):
        get_matmul("tpu", needs)
    assert get_matmul("auto", needs).op.name == ("gpu" if needs.platform == "gpu" else "xla")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_platform_without_a_kernel_takes_xla(scheme):
    assert get_matmul("auto", MatmulNeeds(platform="cpu", scheme=scheme)).op.name == "xla"


@pytest.mark.parametrize(
    ("num_inputs", "group", "most", "wanted"),
    [
        (4096, 128, 8192, 4096),
        (14336, 128, 8192, 7168),
        (576, 64, 8192, 576),
        (576, 64, 512, 576),  # 512 does not divide it
        (4096, 256, 3000, 2048),
    ],
)
def test_tpu_block_holds_whole_groups_in_whole_tiles(num_inputs, group, most, wanted):
    assert tpu.block_inputs(num_inputs, group, most) == wanted


def test_tpu_adds_up_blocks_of_inputs():
    """The defaults at the cases' shapes have one block."""
    op = tpu.make_op(interpret=True, block_sizes=tpu.BlockSizes(inputs=256, outputs=128))
    drawn = draw(replace(BY_NAME["bfloat16_row"], num_outputs=192, num_rows=9, group_size=32), "w4a16")
    assert tpu.block_inputs(1024, 32, 256) == 256
    y_TO = np.asarray(op.matmul(jnp.asarray(drawn.x_TI), drawn.weight(), scheme="w4a16"), np.float64)
    assert difference(y_TO, drawn, expected(drawn, "w4a16")) < tolerance("tpu", "bfloat16")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_wrong_arguments_are_named(name):
    drawn = draw(replace(BY_NAME["eight_rows"], dtype="bfloat16"), "w4a16")
    x_TI, (values_IO, scale_UO) = jnp.asarray(drawn.x_TI), drawn.weight()
    matmul = functools.partial(IMPLEMENTATIONS[name].matmul, scheme="w4a16")
    with pytest.raises(AssertionError, match="int4 weights"):
        matmul(x_TI, QuantizedWeight(values_IO.astype(jnp.int8), scale_UO))
    with pytest.raises(AssertionError, match="scales are"):
        matmul(x_TI, QuantizedWeight(values_IO, scale_UO[0]))
    with pytest.raises(AssertionError, match="equal groups"):
        matmul(x_TI, QuantizedWeight(values_IO, scale_UO[:7]))
    with pytest.raises(AssertionError, match="x is"):
        matmul(x_TI[:, :-1], QuantizedWeight(values_IO, scale_UO))
