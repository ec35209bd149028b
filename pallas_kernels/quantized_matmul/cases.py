"""Named shapes of the op, for tests, tuner and benchmark alike. Data only: nothing here makes arrays."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MatmulCase:
    """One product.

    Attributes:
      name: unique.
      num_rows, num_inputs, num_outputs: T, I, O.
      group_size: for w4a16.
      dtype: of activations.
    """

    name: str
    num_rows: int
    num_inputs: int
    num_outputs: int
    group_size: int
    dtype: str = "float32"


CASES: tuple[MatmulCase, ...] = (
    MatmulCase(name="one_row", num_rows=1, num_inputs=256, num_outputs=128, group_size=128),
    MatmulCase(name="one_group", num_rows=3, num_inputs=32, num_outputs=64, group_size=32),
    MatmulCase(name="eight_rows", num_rows=8, num_inputs=512, num_outputs=256, group_size=64),
    MatmulCase(name="rows_beside_a_tile", num_rows=19, num_inputs=256, num_outputs=192, group_size=32),
    MatmulCase(name="outputs_beside_a_tile", num_rows=5, num_inputs=192, num_outputs=132, group_size=64),
    MatmulCase(name="odd_number_of_groups", num_rows=4, num_inputs=576, num_outputs=128, group_size=64),
    MatmulCase(name="most_grouped_rows", num_rows=64, num_inputs=256, num_outputs=128, group_size=128),
    MatmulCase(name="fewest_dequantized_rows", num_rows=65, num_inputs=256, num_outputs=128, group_size=128),
    MatmulCase(name="many_rows", num_rows=150, num_inputs=256, num_outputs=128, group_size=128),
    MatmulCase(name="bfloat16_row", num_rows=1, num_inputs=1024, num_outputs=128, group_size=128, dtype="bfloat16"),
    MatmulCase(name="bfloat16_rows", num_rows=40, num_inputs=576, num_outputs=192, group_size=32, dtype="bfloat16"),
    MatmulCase(name="bfloat16_many", num_rows=130, num_inputs=512, num_outputs=128, group_size=16, dtype="bfloat16"),
)

# (I, O) of the products of a layer, for the report: queries, keys and values; attention's output; gate and up; down.
MODELS: dict[str, tuple[tuple[int, int], ...]] = {
    "llama-3.1-8b": ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096)),
    "smollm2-135m": ((576, 960), (576, 576), (576, 3072), (1536, 576)),
}
