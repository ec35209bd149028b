"""w4a16 on a TPU with bfloat16 vector units (v6e and later), in Pallas: half-bytes become bfloat16 in VMEM.

Grid: (tiles of outputs, blocks of inputs), inputs innermost; the pipeline copies the next block while this one runs.

    values [inputs, outputs] int4      VMEM, two of them  ─> bfloat16, times the group's scale ─┐
    scale  [inputs / E, outputs]       likewise                                               ├─> sum_TO, float32
    x      [T, inputs] bfloat16        likewise ─────────────────────── STEP inputs at a time ─┘   in VMEM

One product takes STEP = 256 inputs, the depth of the matrix unit, whatever the group. XLA has two forms. Products of
one group each, scaled afterwards, fill half of that depth at a group of 128, and add up [T, outputs] for every group.
One contraction of everything spends twice the vector operations on a weight.

Scales are rounded to bfloat16, 2**-9 of them at most, and so is a weight times its scale: the first costs as much as
rounding the output does, the second less. Scales that are bfloat16 numbers lose nothing.

Chips before v6e multiply in float32 only: there XLA's fused form has fewer operations than this one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.quantized_matmul.contract import MatmulNeeds, MatmulOp, QuantizedWeight, check_shapes

STEP = 256
MOST_ROWS = 512
SUBLANES = 8  # rows of a float32 tile: a block of scales is a multiple, or all of them
VMEM_LIMIT = 64 << 20
WITHOUT_BFLOAT16 = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite", "TPU v5", "TPU v5 lite", "TPU v5e", "TPU v5p")


@dataclass(frozen=True)
class BlockSizes:
    """What the tuner may change.

    Attributes:
      inputs: most of a block.
      outputs: of a tile; a multiple of 128.
    """

    inputs: int = 8192
    outputs: int = 512


def block_inputs(num_inputs: int, group: int, most: int) -> int:
    """Inputs of a block: the largest divisor within `most` that holds whole groups in whole tiles; all if none does."""
    piece = max(STEP, SUBLANES * group)
    fitting = [size for size in range(piece, most + 1, piece) if num_inputs % size == 0]
    return num_inputs if num_inputs <= most or not fitting else fitting[-1]


def _kernel(x_ref, values_ref, scale_ref, out_ref, sum_ref, *, group: int):
    block = pl.program_id(1)
    size = x_ref.shape[1]

    @pl.when(block == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    step = max(STEP, group)
    sum_TO = sum_ref[...]
    for start in range(0, size, step):
        length = min(step, size - start)
        scale_UO = scale_ref[pl.ds(start // group, length // group)].astype(jnp.bfloat16)
        values_UEO = values_ref[pl.ds(start, length)].astype(jnp.bfloat16).reshape(length // group, group, -1)
        w_IO = (values_UEO * scale_UO[:, None, :]).reshape(length, -1)
        sum_TO += jnp.dot(x_ref[:, pl.ds(start, length)], w_IO, preferred_element_type=jnp.float32)
    sum_ref[...] = sum_TO

    @pl.when(block == pl.num_programs(1) - 1)
    def _():
        out_ref[...] = sum_ref[...].astype(out_ref.dtype)


def _matmul(x_TI, weight: QuantizedWeight, *, scheme, x_scale=None, sizes: BlockSizes, interpret):
    check_shapes(x_TI, weight, scheme, x_scale)
    num_rows, num_inputs = x_TI.shape
    num_groups, num_outputs = weight.scale.shape
    group = num_inputs // num_groups
    inputs = block_inputs(num_inputs, group, sizes.inputs)
    outputs = min(sizes.outputs, pl.cdiv(num_outputs, 128) * 128)
    weight_bytes = num_inputs * num_outputs // 2 + weight.scale.size * 4
    tiles = pl.cdiv(num_outputs, outputs)
    x_reads = tiles if inputs < num_inputs else 1
    return pl.pallas_call(
        functools.partial(_kernel, group=group),
        grid=(tiles, num_inputs // inputs),
        in_specs=[
            pl.BlockSpec((num_rows, inputs), lambda tile, block: (0, block)),
            pl.BlockSpec((inputs, outputs), lambda tile, block: (block, tile)),
            pl.BlockSpec((inputs // group, outputs), lambda tile, block: (block, tile)),
        ],
        out_specs=pl.BlockSpec((num_rows, outputs), lambda tile, block: (0, tile)),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_outputs), x_TI.dtype),
        scratch_shapes=[pltpu.VMEM((num_rows, outputs), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * num_inputs * num_outputs,
            bytes_accessed=weight_bytes + 2 * num_rows * (x_reads * num_inputs + num_outputs),
            transcendentals=0,
        ),
        interpret=interpret,
        name="quantized_matmul",
    )(x_TI, *weight)


def make_op(interpret=False, block_sizes: BlockSizes | None = None) -> MatmulOp:
    """The op.

    Args:
      interpret: run the kernel on any platform, for tests: True, or `pltpu.InterpretParams`.
      block_sizes: for all shapes; None for the defaults.
    """

    def why_not(needs: MatmulNeeds) -> str | None:
        if not interpret and needs.platform != "tpu":
            return "its kernel is compiled by Mosaic, for TPUs"
        return _why_not_shape(needs)

    return MatmulOp(
        name="tpu",
        matmul=functools.partial(_matmul, sizes=block_sizes or BlockSizes(), interpret=interpret),
        why_not=why_not,
    )


def _why_not_shape(needs: MatmulNeeds) -> str | None:
    if needs.scheme != "w4a16":
        return f"it runs w4a16 alone; XLA's own {needs.scheme} reads the weight once already"
    if needs.device_kind in WITHOUT_BFLOAT16:
        return f"{needs.device_kind} has no bfloat16 vector unit; there XLA's own program takes fewer operations"
    if needs.dtype is not None and needs.dtype != "bfloat16":
        return f"activations of {needs.dtype}; bfloat16 is supported"
    if needs.num_rows is not None and needs.num_rows > MOST_ROWS:
        return f"{needs.num_rows} rows; above {MOST_ROWS} the product itself is the cost, and XLA's is as good"
    if needs.group_size is not None and needs.group_size not in (32, 64, 128, 256):
        return f"groups of {needs.group_size}; 32, 64, 128 and 256 are supported"
    if needs.num_inputs is not None and needs.num_inputs % 64:
        return f"{needs.num_inputs} inputs; a multiple of 64 is needed"
    return None


OP = make_op()
