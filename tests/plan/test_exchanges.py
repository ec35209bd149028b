"""Operations between devices, found in a program's text."""

from __future__ import annotations

from jaxinfer.plan.exchanges import exchanged_bytes
from jaxinfer.step import CompileCounter

TEXT = """
  %all-reduce.1 = f32[4,256]{1,0} all-reduce(%dot.1), channel_id=1, replica_groups={{0,1}}
  ROOT %all-reduce.2 = (bf16[8]{0:T(256)}, s32[2,2]{1,0}) all-reduce(%a, %b), to_apply=%sum
  %all-gather-start.3 = ((bf16[4,64]{1,0}, bf16[2]), (bf16[8,64]{1,0}, bf16[4])) all-gather-start(%p, %p2)
  %all-gather-done.3 = (bf16[8,64]{1,0}, bf16[4]) all-gather-done(%all-gather-start.3)
  %collective-permute-start = (u8[10], u8[10], u32[]) collective-permute-start(%q)
  %collective-permute-done = u8[10] collective-permute-done(%collective-permute-start)
  %gather.4 = f32[1000]{0} gather(%x, %y), metadata={op_name="all-reduce(of another name)"}
  %all-to-all.5 = f8e4m3fn[3,5]{1,0} all-to-all(%z)
"""


def test_results_are_counted_once_by_kind():
    assert exchanged_bytes(TEXT) == {
        "all-reduce": 4 * 256 * 4 + 8 * 2 + 4 * 4,
        "all-gather": 8 * 64 * 2 + 4 * 2,
        "collective-permute": 10,
        "all-to-all": 15,
    }


def test_a_program_of_one_device_exchanges_nothing_and_of_two_reduces_each_layer_twice(make_layout):
    """Hidden states of 2 rows x 64 in float32, twice in each of two layers, and of the embedding's rows."""
    found = []
    for size in (1, 2):
        lowered = make_layout(size, num_pages=10).programs(CompileCounter()).lower(("decode", 2))
        found.append(exchanged_bytes(lowered.compile().as_text()))
    assert found[0] == {}
    assert found[1]["all-reduce"] == (2 * 2 + 1) * 2 * 64 * 4
