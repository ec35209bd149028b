"""w4a16 on an NVIDIA GPU, in Pallas through Triton: the weight is dequantized between shared memory and tensor cores.

XLA writes it out in bfloat16 first and reads it again, nine times the bytes.

Grid: (tiles of outputs, tiles of rows, splits of the inputs). A program walks the groups of its split:

    x       [rows, E]        bfloat16 ─────────────────────────────────┐
    values  [E, outputs / 4] 16-bit words, four columns each           ├─ dot, for each of the four columns of a word,
                └─ half-bytes i of all words ─> bfloat16, exact ───────┘  times the group's scale, into float32 sums

A word's four half-bytes are columns 4 c to 4 c + 3, the lowest first, as XLA lays int4 out: the array is read as it is.
Words of 16 bits, because that is what `ldmatrix` moves: two inputs of one column of words fill a register, and
one shift, one logical operation and one subtraction make both of them a pair of bfloat16, as the tensor cores want it.

    register   d c b a | d c b a        (b's turn: i = 1)
    >> 4 i     . d c b | . d c b
    & 000F ^ 4308 on both halves        a half-byte n in two's complement becomes 128 + (n + 8): bit 3 flipped, in the
                                        lowest bits of the bfloat16 that is 128
    - 136                               n

Programs of a split write float32 parts, which XLA adds up. Shared memory: `stages` tiles of x and of values; from
64 rows on, where products are of the warpgroup kind, one dequantized tile too.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.quantized_matmul.contract import MatmulNeeds, MatmulOp, QuantizedWeight, check_shapes

COLUMNS = 4  # of a word
BIAS = 0x4308  # bfloat16 136: 128 in the upper bits, bit 3 flipped
MOST_ROWS = 256
LEAST_STEP = 128  # inputs of one step of the loop, so that enough bytes are on their way


@dataclass(frozen=True)
class BlockSizes:
    """What the tuner may change.

    Attributes:
      rows, outputs: of a program's tile; powers of two, 16 and 64 at least.
      splits: most parts that the inputs are divided into.
      warps, stages: as Triton has them.
    """

    rows: int
    outputs: int
    splits: int
    warps: int
    stages: int


def default_block_sizes(num_rows: int, num_inputs: int, num_outputs: int) -> BlockSizes:
    """Small tiles for few rows. No spilled registers at any of them; splits until an H200 has two programs a core.

    The parts, written and read in float32, may come to as many bytes as the weight: they stay in the L2 cache.
    """
    rows, warps, stages = next(
        (rows, warps, stages)
        for rows, warps, stages in ((16, 4, 4), (32, 4, 4), (64, 8, 3), (128, 8, 3))
        if num_rows <= rows or rows == 128
    )
    outputs = 128
    programs = -(-num_outputs // outputs) * -(-num_rows // rows)
    splits = min(8, max(1, 264 // programs), max(1, num_inputs // (16 * max(num_rows, rows))))
    return BlockSizes(rows=rows, outputs=outputs, splits=splits, warps=warps, stages=stages)


@dataclass(frozen=True)
class _Shape:
    """Static sizes of a call.

    Attributes:
      num_rows, num_outputs, num_groups, group: T, O, U, E.
      groups_per_step: that one step of the loop takes.
      steps_per_split: of the loop, at most.
    """

    num_rows: int
    num_outputs: int
    num_groups: int
    group: int
    groups_per_step: int
    steps_per_split: int
    sizes: BlockSizes
    interpret: bool

    @property
    def num_steps(self) -> int:
        return self.num_groups // self.groups_per_step


def _column(word, i: int, shape: _Shape):
    """Half-byte `i` of 16-bit words, in bfloat16."""
    if shape.interpret:
        half_byte = lax.shift_right_logical(word, jnp.int16(4 * i)) & jnp.int16(0xF)
        return lax.bitcast_convert_type(half_byte ^ jnp.int16(BIAS), jnp.bfloat16) - jnp.bfloat16(136)
    shift = f"shr.b32 a, $1, {4 * i};" if i else "mov.b32 a, $1;"
    both = f"0x{BIAS:04X}{BIAS:04X}"
    return plgpu.elementwise_inline_asm(  # lop3 0x6A is (a & b) ^ c
        f"{{ .reg .b32 a, bias; mov.b32 bias, {both}; {shift} lop3.b32 a, a, 0x000F000F, bias, 0x6A; "
        "sub.rn.bf16x2 $0, a, bias; }",
        args=[word],
        constraints="=r,r",
        pack=2,
        result_shape_dtypes=[jax.ShapeDtypeStruct(word.shape, jnp.bfloat16)],
    )[0]


def _load(ref, index, mask):
    if mask is None:
        return plgpu.load(ref.at[index])
    return plgpu.load(ref.at[index], mask=mask, other=jnp.zeros((), ref.dtype))


def _kernel(x_ref, word_ref, scale_ref, out_ref, *, shape: _Shape):
    sizes = shape.sizes
    rows, words, group = sizes.rows, sizes.outputs // COLUMNS, shape.group
    tile, row_tile, split = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    row_T = row_tile * rows + jnp.arange(rows, dtype=jnp.int32)
    word_W = tile * words + jnp.arange(words, dtype=jnp.int32)
    input_E = jnp.arange(group, dtype=jnp.int32)
    is_row_T1 = (row_T < shape.num_rows)[:, None]
    is_word_1W = (word_W < shape.num_outputs // COLUMNS)[None, :]
    has_all_rows = shape.num_rows % rows == 0
    has_all_words = shape.num_outputs % sizes.outputs == 0

    def add_group(u, sums):
        index_E = u * group + input_E
        mask_TE = None if has_all_rows else jnp.broadcast_to(is_row_T1, (rows, group))
        mask_EW = None if has_all_words else jnp.broadcast_to(is_word_1W, (group, words))
        x_TE = _load(x_ref, (row_T[:, None], index_E[None, :]), mask_TE)
        word_EW = _load(word_ref, (index_E[:, None], word_W[None, :]), mask_EW)
        added = []
        for i, sum_TW in enumerate(sums):
            part_TW = jnp.dot(x_TE, _column(word_EW, i, shape), preferred_element_type=jnp.float32)
            scale_W = _load(scale_ref, (u, word_W * COLUMNS + i), None if has_all_words else is_word_1W[0])
            added.append(sum_TW + part_TW * scale_W[None, :])
        return tuple(added)

    def step(n, sums):
        for k in range(shape.groups_per_step):
            sums = add_group(n * shape.groups_per_step + k, sums)
        return sums

    first = split * shape.steps_per_split
    end = jnp.minimum(first + shape.steps_per_split, shape.num_steps)
    sums = lax.fori_loop(first, end, step, (jnp.zeros((rows, words), jnp.float32),) * COLUMNS)
    for i, sum_TW in enumerate(sums):
        at = out_ref.at[split, row_T[:, None], (word_W * COLUMNS + i)[None, :]]
        plgpu.store(at, sum_TW.astype(out_ref.dtype), mask=is_row_T1 & is_word_1W)


def _matmul(x_TI, weight: QuantizedWeight, *, scheme, x_scale=None, sizes: BlockSizes | None, interpret: bool):
    check_shapes(x_TI, weight, scheme, x_scale)
    num_rows, num_inputs = x_TI.shape
    num_groups, num_outputs = weight.scale.shape
    group = num_inputs // num_groups
    sizes = sizes or default_block_sizes(num_rows, num_inputs, num_outputs)
    most = max(1, LEAST_STEP // group)
    groups_per_step = next(n for n in range(most, 0, -1) if num_groups % n == 0)
    steps_per_split = -(-(num_groups // groups_per_step) // sizes.splits)
    shape = _Shape(
        num_rows=num_rows,
        num_outputs=num_outputs,
        num_groups=num_groups,
        group=group,
        groups_per_step=groups_per_step,
        steps_per_split=steps_per_split,
        sizes=sizes,
        interpret=interpret,
    )
    splits = -(-shape.num_steps // steps_per_split)
    word_IW = lax.bitcast_convert_type(weight.values_IO.reshape(num_inputs, -1, COLUMNS), jnp.int16)
    part_STO = pl.pallas_call(
        functools.partial(_kernel, shape=shape),
        grid=(pl.cdiv(num_outputs, sizes.outputs), pl.cdiv(num_rows, sizes.rows), splits),
        out_shape=jax.ShapeDtypeStruct((splits, num_rows, num_outputs), jnp.float32 if splits > 1 else x_TI.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
        name="quantized_matmul",
    )(x_TI, word_IW, weight.scale)
    return (jnp.sum(part_STO, axis=0) if splits > 1 else part_STO[0]).astype(x_TI.dtype)


def make_op(interpret: bool = False, block_sizes: BlockSizes | None = None) -> MatmulOp:
    """The op.

    Args:
      interpret: run the kernel as plain jax operations, on any platform; for tests.
      block_sizes: for all shapes; None for the defaults.
    """

    def why_not(needs: MatmulNeeds) -> str | None:
        if not interpret and needs.platform not in ("gpu", "cuda"):
            return "its kernel is compiled by Triton, for NVIDIA GPUs"
        return _why_not_shape(needs)

    return MatmulOp(
        name="gpu",
        matmul=functools.partial(_matmul, sizes=block_sizes, interpret=interpret),
        why_not=why_not,
    )


def _why_not_shape(needs: MatmulNeeds) -> str | None:
    if needs.scheme != "w4a16":
        return f"it runs w4a16 alone; XLA's own {needs.scheme} reads the weight once already"
    if needs.dtype is not None and needs.dtype != "bfloat16":
        return f"activations of {needs.dtype}; bfloat16 is supported"
    if needs.num_rows is not None and needs.num_rows > MOST_ROWS:
        return f"{needs.num_rows} rows; above {MOST_ROWS} XLA's product of a dequantized weight costs no more"
    if needs.group_size is not None and needs.group_size not in (16, 32, 64, 128, 256):
        return f"groups of {needs.group_size}; powers of two from 16 to 256 are supported"
    if needs.num_outputs is not None and needs.num_outputs % COLUMNS:
        return f"{needs.num_outputs} outputs; a multiple of {COLUMNS} is needed"
    return None


OP = make_op()
