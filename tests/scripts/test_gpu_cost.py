"""Reading what ptxas and XLA say about GPU kernels, on excerpts of their own words."""

import pytest
from kernel_model.gpu_cost import GpuKernelCost, Launch, parse_assembler, parse_launches, tensor_ops

ASSEMBLER = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attention_decode' for 'sm_90a'
ptxas info    : Function properties for attention_decode
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers
ptxas info    : Compile time = 83.160 ms
ptxas info    : Compiling entry function 'attention_prefill' for 'sm_90a'
ptxas info    : Function properties for attention_prefill
    40 bytes stack frame, 48 bytes spill stores, 52 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 512 bytes smem
"""
LAUNCHES = """000: kCommandBuffer [source | sink]
    006: kCustomKernel [prev=005 (1) | next=007 (1)] loop_broadcast_fusion grid: [2048, 1, 1] threads: [128, 1, 1]  \
shared_memory: 0 bytes
    007: kCustomKernel [prev=006 (1) | next=008 (1)] attention_decode grid: [8, 328, 1] threads: [128, 1, 1]  \
shared_memory: 38916 bytes
"""
PTX = """
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r1}, {%r2}, {%f5};
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %f1, %f2, %f3, %f4 }, {%r1}, {%r2}, {%f5};
	wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {%f1}, %rd1, %rd2, 1, 1, 1, 0, 0;
	wgmma.commit_group.sync.aligned;
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1}, [%r2];
"""


def test_each_kernel_has_its_own_registers_and_spills():
    assert parse_assembler(ASSEMBLER, "attention_decode") == (96, 0, 0)
    assert parse_assembler(ASSEMBLER, "attention_prefill") == (255, 100, 512)


def test_a_kernel_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="said nothing about 'attention'"):
        parse_assembler(ASSEMBLER, "attention")


def test_launches_are_read_by_kernel():
    launches = parse_launches(LAUNCHES)
    assert launches["attention_decode"] == Launch(num_blocks=8 * 328, threads=128, shared_bytes=38916)
    assert launches["loop_broadcast_fusion"].shared_bytes == 0


def test_tensor_core_instructions_are_counted_and_nothing_else():
    assert tensor_ops(PTX) == {"mma m16n8k16 bf16": 2, "wgmma m64n128k16 bf16": 1}
    assert tensor_ops("\tfma.rn.f32 %f1, %f2, %f3, %f4;\n") == {}


@pytest.mark.parametrize(
    ("registers", "threads", "shared_bytes", "blocks"),
    [(96, 128, 38916, 5), (32, 1024, 0, 2), (255, 256, 0, 1), (16, 32, 0, 32), (64, 128, 232448 - 1024, 1)],
)
def test_blocks_per_core_are_bounded_by_what_runs_out_first(registers, threads, shared_bytes, blocks):
    cost = GpuKernelCost(
        name="k",
        registers=registers,
        spill_bytes=0,
        num_blocks=1,
        threads=threads,
        shared_bytes=shared_bytes,
        tensor_ops={},
    )
    assert cost.blocks_per_core == blocks
