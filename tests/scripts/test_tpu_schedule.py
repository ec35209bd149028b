"""Reading and running TPU schedules, on dumps of a small kernel; make_schedule.py made them."""

from pathlib import Path

import numpy as np
import pytest
from kernel_model.bundles import BRANCH_DELAY, parse_schedule, parse_units, parse_vmem
from kernel_model.simulate import NotSimulated, simulate, smem_words
from kernel_model.tpu_cost import SCHEDULE, UNITS, find_kv_loop

DATA = Path(__file__).parent / "data"
ROWS, PAGES, PAGE_SIZE, PAGE_BYTES, QUERY_BYTES = 4, 3, 16, 16 * 128 * 2, 4 * 8 * 128 * 2


def dump(target: str, step: str) -> str:
    return (DATA / f"pages_kernel.{target}.{step}.txt").read_text()


def run(target: str, lengths):
    table = np.arange(1, ROWS * PAGES + 1, dtype=np.int32).reshape(ROWS, PAGES)
    schedule = parse_schedule(dump(target, SCHEDULE))
    return schedule, simulate(schedule, {0: table, 1: np.array(lengths, np.int32)})


@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_the_loop_over_pages_is_found_inside_the_loop_over_rows(target):
    schedule = parse_schedule(dump(target, SCHEDULE))
    outer, inner = schedule.loops
    assert (outer.depth, inner.depth) == (1, 2)
    assert outer.start < inner.start < inner.end <= outer.end
    assert find_kv_loop(schedule, None) == inner


@pytest.mark.parametrize("target", ["v5e", "v6e"])
@pytest.mark.parametrize("lengths", [[48, 48, 48, 48], [1, 16, 17, 48], [0, 20, 0, 33], [0, 0, 0, 0]])
def test_a_run_moves_each_page_once_and_no_other(target, lengths):
    schedule, counts = run(target, lengths)
    outer, inner = schedule.loops
    pages = sum(-(-n // PAGE_SIZE) for n in lengths)
    assert counts.executed[outer.start] == ROWS
    assert counts.executed[inner.start] == pages
    assert counts.moved("hbm_to_vmem", inner.start, inner.end) == pages * PAGE_BYTES
    assert counts.moved("hbm_to_vmem") == pages * PAGE_BYTES + QUERY_BYTES


@pytest.mark.parametrize("target", ["v5e", "v6e"])
def test_an_empty_row_skips_the_loop_over_pages(target):
    schedule, counts = run(target, [0, 16, 0, 0])
    outer, inner = schedule.loops
    _, full = run(target, [16, 16, 16, 16])
    assert counts.bundles(inner.start, inner.end - BRANCH_DELAY) * ROWS == full.bundles(
        inner.start, inner.end - BRANCH_DELAY
    )
    assert counts.bundles(outer.start, outer.end) < full.bundles(outer.start, outer.end) / 2


def test_every_iteration_costs_the_same_bundles():
    costs = set()
    for pages in (1, 2, 3):
        _, counts = run("v6e", [16 * pages] * ROWS)
        _, more = run("v6e", [16 * pages] * (ROWS - 1) + [16 * (pages - 1) or 16])
        costs.add((int(counts.executed.sum()) - int(more.executed.sum())) if pages > 1 else None)
    costs.discard(None)
    assert len(costs) == 1
    (cost,) = costs
    schedule, _ = run("v6e", [16] * ROWS)
    inner = schedule.loops[1]
    assert cost == inner.end - inner.start


def test_waiting_bundles_are_kept():
    schedule = parse_schedule(dump("v6e", SCHEDULE))
    assert any(not bundle for bundle in schedule.bundles)
    assert len(schedule.bundles) == len(parse_units(dump("v6e", UNITS)).used)


def test_a_branch_on_something_unknown_is_refused():
    with pytest.raises(NotSimulated, match="depends on an unknown predicate"):
        simulate(parse_schedule(dump("v6e", SCHEDULE)), {0: np.zeros((ROWS, PAGES), np.int32)})


def test_a_loop_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("kernel_model.simulate.MAX_BUNDLES", 100)
    text = "     0   :  { %s1_s0 = smov 0 }\n 0x1   :  { %9 = sbr.rel target bundleno = 0 (0x0), region = 1 }\n"
    with pytest.raises(NotSimulated, match="no end"):
        simulate(parse_schedule(text + "".join(f" {i:#x} : {{}}\n" for i in range(2, 8))), {})


def schedule_of(*bodies: str):
    return parse_schedule("\n".join(f" {i and hex(i)}   :  {{ {body} }}" for i, body in enumerate(bodies)))


def test_operations_of_a_bundle_read_what_was_there_before_it():
    schedule = schedule_of(
        "%s1_s0 = smov 7  ;;  %s2_s1 = smov 1",
        # Swapped in one bundle; a pointer made in it is read from it.
        "%s3_s0 = sadd.s32 0, %s2_s1  ;;  %s4_s1 = sadd.s32 0, %s1_s0",
        "%s5_s2 = sadd.s32 %s3_s0, %s4_s1  ;;  %s6_s2 = int_to_ptr.vmem [resolvable:$true] %s5_s2",
        "%9 = dma.hbm_to_vmem %s6_s2, /*size_in_granules=*/%s4_s1, %s3_s0, [#allocation1]",
        "%10 = dma.vmem_to_hbm %s6_s2, /*size_in_granules=*/%s6_s2, %s3_s0, [#allocation1]",
    )
    counts = simulate(schedule, {})
    assert counts.moved("hbm_to_vmem") == 7 * 32
    assert counts.moved("vmem_to_hbm") == 8 * 32


def test_predicates_choices_and_negative_numbers():
    schedule = schedule_of(
        "%s1_s0 = smov 4294967295",
        "%p2_p0 = scmp.lt.s32.totalorder %s1_s0, 0  ;;  %p3_p1 = scmp.lt.u32.totalorder %s1_s0, 0",
        "%s4_s2 = smov (%p2_p0, 5), 6  ;;  %s5_s3 = smov (!%p2_p0, 5), 6  ;;  %s6_s4 = smov (%p3_p1), 9",
        "%s7_s5 = scalar_select /*predicate=*/%p3_p1, /*on_true=*/1, /*on_false=*/2",
        "%11 = dma.hbm_to_vmem 0, %s4_s2, 0, 0  ;;  %12 = dma.vmem_to_hbm 0, %s5_s3, 0, 0",
        "%13 = dma.hbm_to_smem 0, %s7_s5, 0, 0  ;;  %14 = dma.vmem_to_smem (!%p2_p0), 0, %s4_s2, 0, 0",
    )
    counts = simulate(schedule, {})
    moved = {direction: size // 32 for (direction, _), size in counts.dma_bytes.items()}
    assert moved == {"hbm_to_vmem": 6, "vmem_to_hbm": 5, "hbm_to_smem": 2}


def test_a_table_lies_in_scalar_memory_with_rows_of_128_words():
    words = smem_words(np.arange(6, dtype=np.int32).reshape(2, 3))
    assert words.shape == (256,)
    assert list(words[:3]) == [0, 1, 2]
    assert list(words[128:131]) == [3, 4, 5]


def test_vmem_buffers_are_named_with_their_bytes():
    buffers = parse_vmem(dump("v6e", "original"))
    page = [b for b in buffers if b.tag == "scratch operand"]
    assert [b.num_bytes for b in page] == [PAGE_BYTES]
    assert any("output window" in b.tag for b in buffers)


def test_unit_use_is_a_share_of_the_slots():
    units = parse_units("== CAPACTIY:\nMXU, VALU\n    2     4\n== UTILIZATION:\n0 4\n2 0\n1 2\n")
    assert units.capacity == {"MXU": 2, "VALU": 4}
    assert units.ratios(0, 2) == {"MXU": 0.5, "VALU": 0.5}
    assert units.ratios(2, 3) == {"MXU": 0.5, "VALU": 0.5}


def test_what_is_no_dump_is_refused():
    with pytest.raises(ValueError, match="no bundles"):
        parse_schedule("Schedule analysis:\n")
    with pytest.raises(ValueError, match="no table of unit use"):
        parse_units("nothing")
