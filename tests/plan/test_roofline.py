"""Least times against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from jaxinfer.plan.roofline import Prediction, StepCosts, Work, predict, prompt
from jaxinfer.plan.targets import find_target

V5E = find_target("v5e").chip
# Of the small model: 2 layers of width 64, 4 query and 2 KV heads of 16, 128 wide feed-forward, vocabulary 512.
QKV, OUT, MLP = 64 * (4 + 2 + 2) * 16, 4 * 16 * 64, 3 * 64 * 128
LAYERS, HEAD, NORMS = 2 * (QKV + OUT + MLP), 512 * 64, 5 * 64
POSITION = 2 * 2 * 16 * 2  # bytes of a position's keys and values in one layer: 2 KV heads of 16, bfloat16

COSTS = StepCosts(
    layer_elements=1000,
    head_elements=100,
    weight_bytes=5000,
    heads_width=8,
    position_bytes=4.0,
    windows=(None, 16),
    hidden_bytes=20,
    logits_bytes=40,
    num_devices=1,
    token_buckets=(16, 32),
)


def test_costs_are_counted_from_the_arrays(make_layout):
    costs = StepCosts.of(make_layout())
    assert (costs.layer_elements, costs.head_elements) == (LAYERS, HEAD)
    assert costs.weight_bytes == 2 * (LAYERS + HEAD + NORMS), "the embedding table is not read"
    assert costs.position_bytes == POSITION
    assert (costs.heads_width, costs.num_devices) == (64, 1)
    tied = StepCosts.of(make_layout(fields={"tie_word_embeddings": True}))
    assert (tied.head_elements, tied.weight_bytes) == (HEAD, costs.weight_bytes)


def test_two_devices_halve_all_but_the_norms(make_layout):
    one, two = StepCosts.of(make_layout()), StepCosts.of(make_layout(2))
    assert (two.layer_elements, two.head_elements) == (LAYERS // 2, HEAD // 2)
    assert two.weight_bytes == LAYERS + HEAD + 2 * NORMS
    assert two.position_bytes == one.position_bytes / 2
    assert two.heads_width == 32
    # Four devices cannot divide two KV heads: each keeps all of them, and their projections.
    four = StepCosts.of(make_layout(4))
    assert four.position_bytes == one.position_bytes
    assert four.layer_elements == 2 * (QKV + OUT + MLP // 4)


def test_biases_are_no_products(make_layout):
    fields = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    assert StepCosts.of(make_layout(fields=fields)).layer_elements == LAYERS


def test_a_decode_step_by_hand():
    work = COSTS.decode(num_rows=3, context=100)
    seen = 3 * (100 + 16)  # the second layer sees 16 positions
    assert work.flops == 2 * 3 * (1000 + 100) + 4 * 8 * seen
    assert work.memory_bytes == 5000 + 4 * (seen + 3 * 2)
    assert work.link_bytes == 0


def test_a_chunk_by_hand():
    """Ten tokens from position 20 on: queries see 21 to 30 positions, or 16; padded to 16 tokens, one is sampled."""
    work = COSTS.chunk(start=20, num_tokens=10)
    seen = sum(range(21, 31)) + 10 * 16
    assert work.flops == 2 * (16 * 1000 + 100) + 4 * 8 * seen
    assert work.memory_bytes == 5000 + 4 * (30 + (16 + 10) + 10 * 2)


def test_links_carry_two_reductions_a_layer_and_the_logits():
    work = dataclasses.replace(COSTS, num_devices=4).decode(num_rows=3, context=100)
    assert work.link_bytes == 2 * 2 * 3 * 20 * 2 * 3 / 4 + 3 * 40 * 3 / 4


def test_the_longer_of_memory_and_compute_bounds_a_step_and_links_come_on_top():
    memory = predict(Work(flops=197e12, memory_bytes=2 * 819e9, link_bytes=0.0), V5E, "bfloat16")
    assert memory == Prediction(memory_s=2.0, compute_s=1.0, link_s=0.0, seconds=2.0)
    compute = predict(Work(flops=3 * 197e12, memory_bytes=819e9, link_bytes=100e9), V5E, "bfloat16")
    assert compute == Prediction(memory_s=1.0, compute_s=3.0, link_s=0.5, seconds=3.5)
    links = predict(Work(flops=0.0, memory_bytes=819e9, link_bytes=400e9), V5E, "int8")
    assert [p.bound_by for p in (memory, compute, links)] == ["memory", "compute", "links"]


def test_nothing_is_predicted_without_figures():
    cpu = find_target("cpu").chip
    assert predict(Work(flops=1.0, memory_bytes=1.0, link_bytes=0.0), cpu, "float32") is None
    assert prompt(COSTS, 40, cpu, "float32") is None


def test_a_prompt_is_the_sum_of_its_chunks():
    parts = [predict(COSTS.chunk(start, n), V5E, "bfloat16") for start, n in ((0, 32), (32, 32), (64, 6))]
    total = prompt(COSTS, 70, V5E, "bfloat16")
    assert total.seconds == pytest.approx(sum(p.seconds for p in parts))
    assert total.memory_s == pytest.approx(sum(p.memory_s for p in parts))


def test_llama_8b_reads_its_weights_in_the_time_that_is_known():
    """7.5 G parameters without the embedding, 2 bytes each, at 4.8 TB/s: 3.13 ms."""
    costs = dataclasses.replace(
        COSTS, layer_elements=6_979_321_856, head_elements=525_336_576, weight_bytes=15_009_316_864
    )
    step = predict(costs.decode(1, 1), find_target("h200").chip, "bfloat16")
    assert step.bound_by == "memory"
    assert step.seconds == pytest.approx(3.13e-3, rel=2e-3)
