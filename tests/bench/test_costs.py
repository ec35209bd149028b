"""Operations and bytes against counts made by hand."""

import pytest

from jaxinfer.bench.bound import product_shapes
from jaxinfer.bench.costs import (
    Answered,
    Cost,
    attended,
    attention_flops,
    head_weights,
    kv_bytes,
    kv_item_bytes,
    layer_weights,
    product_flops,
    product_weights,
    workload_cost,
)
from jaxinfer.model import Architecture

# D = 4, N = 2, K = 1, H = 2, F = 8, V = 10, two layers.
ARCH = Architecture(
    vocab_size=10,
    num_layers=2,
    hidden_size=4,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    intermediate_size=8,
    max_positions=64,
)
QKV, OUT, GATE_UP, DOWN = 4 * (2 + 1 + 1) * 2, 4 * 4, 4 * 16, 8 * 4
LAYER = QKV + OUT + GATE_UP + DOWN  # 32 + 16 + 64 + 32 = 144


def test_weights_are_counted_matrix_by_matrix():
    assert layer_weights(ARCH) == LAYER == 144
    assert head_weights(ARCH) == 40
    assert product_weights(ARCH) == 2 * 144 + 40


def test_shapes_of_the_products_hold_the_same_weights():
    assert product_shapes(ARCH) == [(4, 8), (4, 4), (4, 16), (8, 4)]
    assert sum(i * o for i, o in product_shapes(ARCH)) == layer_weights(ARCH)


def test_products_cost_two_operations_a_weight_and_the_head_only_its_rows():
    assert product_flops(ARCH, 5, 1) == 2 * (5 * 288 + 40)
    assert product_flops(ARCH, 5, 5) == 2 * 5 * 328


def test_a_token_attends_to_itself_and_all_before_it_in_every_layer():
    assert attended(ARCH, [0]) == 2
    assert attended(ARCH, range(3)) == 2 * (1 + 2 + 3)


def test_a_window_cuts_what_is_attended_to():
    windowed = Architecture(
        **{f: getattr(ARCH, f) for f in ("vocab_size", "num_layers", "hidden_size", "num_heads", "num_kv_heads")},
        head_dim=2,
        intermediate_size=8,
        max_positions=64,
        layer_windows=(2, None),
    )
    assert attended(windowed, range(4)) == (1 + 2 + 2 + 2) + (1 + 2 + 3 + 4)


def test_attention_costs_scores_and_sums_of_every_query_head():
    # One position, one layer: scores 2 x N x H, weighted sum 2 x N x H.
    assert attention_flops(ARCH, 1) == 2 * 2 * 2 + 2 * 2 * 2


def test_keys_and_values_are_counted_once_each():
    assert kv_bytes(ARCH, 3, 4) == 3 * (2 + 2) * 4
    assert [kv_item_bytes(ARCH, dtype) for dtype in ("float32", "bfloat16")] == [4, 2]
    assert kv_item_bytes(ARCH, "int8") * ARCH.head_dim == ARCH.head_dim + 4, "a float32 scale for each head"


def test_workload_by_hand():
    # Three prompt tokens, one of them cached, three answers: positions 1 and 2 in prefill, 3 and 4 in decoding.
    cost = workload_cost(ARCH, [Answered(3, 1, 3)], num_passes=3, weight_item_bytes=4, kv_item_bytes=2)
    assert cost.flops == product_flops(ARCH, 4, 3) + attention_flops(ARCH, 2 * (2 + 3 + 4 + 5))
    # The prefill reads its three positions once; decoding reads four, then five.
    assert cost.bytes == 3 * 328 * 4 + kv_bytes(ARCH, 2 * (3 + 4 + 5), 2)


@pytest.mark.parametrize("output_tokens", [1, 4])
def test_workload_is_the_sum_of_its_requests(output_tokens):
    one = workload_cost(ARCH, [Answered(5, 0, output_tokens)], 0, 4, 4)
    two = workload_cost(ARCH, [Answered(5, 0, output_tokens)] * 2, 0, 4, 4)
    assert two == Cost(2 * one.flops, 2 * one.bytes)
