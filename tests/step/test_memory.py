"""How the pool is sized: what bounds it, and what is refused with the length that would fit."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from tiny import tiny_architecture, tiny_engine

from jaxinfer.errors import ConfigError
from jaxinfer.model import PageFormat
from jaxinfer.step import memory
from jaxinfer.step.memory import HOST_POOL_BYTES, MemoryPlan, free_bytes, plan_memory
from pallas_kernels.ragged_paged_attention import AttentionNeeds, get_attention

FORMAT = PageFormat(
    tiny_architecture(), get_attention("xla", AttentionNeeds(platform="cpu")).op, 16, jnp.dtype("float32")
)
PAGE_BYTES = 2 * 2 * 2 * 16 * 16 * 4  # layers, keys and values, KV heads, positions, head_dim, float32


@dataclass
class FakeDevice:
    """A chip with this much memory; on a CPU `free_bytes` is replaced instead."""

    platform: str
    limit: int

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.limit}


@pytest.fixture
def plan(monkeypatch):
    """`plan_memory` with defaults, on a device with `limit` bytes."""

    def make(platform: str = "tpu", limit: int = 1000 * PAGE_BYTES, **changes: Any) -> MemoryPlan:
        if platform == "cpu":
            monkeypatch.setattr(memory, "free_bytes", lambda device: limit)
        arguments = {
            "page_format": FORMAT,
            "weight_bytes": 100 * PAGE_BYTES,
            "temporary_bytes": 50 * PAGE_BYTES,
            "memory_utilization": 0.9,
            "num_pages": None,
            "max_num_seqs": 4,
            "max_model_len": None,
            "model_limit": 256,
            "devices_sharing_heads": 1,
        }
        return plan_memory(device=FakeDevice(platform, limit), **(arguments | changes))

    return make


def test_a_page_is_as_large_as_its_arrays():
    assert FORMAT.page_bytes == PAGE_BYTES


def test_an_accelerators_pool_takes_what_weights_and_temporaries_leave(plan):
    got = plan()
    assert (got.num_pages, got.bound_by) == (900 - 100 - 50, "memory_utilization")
    assert got.pool_bytes == got.num_pages * PAGE_BYTES
    assert got.budget_bytes == int(0.9 * got.device_bytes)
    assert got.weight_bytes + got.temporary_bytes + got.pool_bytes <= got.budget_bytes
    assert got.max_model_len == 256
    assert got.to_dict()["num_pages"] == got.num_pages


def test_a_cpus_pool_takes_no_more_than_all_slots_need(plan):
    got = plan("cpu")
    assert (got.num_pages, got.bound_by) == (4 * 16 + 1, "max_num_seqs")


def test_a_cpus_weights_are_already_out_of_what_is_free(plan):
    got = plan("cpu", limit=100 * PAGE_BYTES, max_num_seqs=100)
    assert (got.num_pages, got.bound_by) == (90 - 50, "memory_utilization")


def test_a_cpus_pool_is_bounded_unless_one_sequence_needs_more(plan):
    enough = 100 * HOST_POOL_BYTES
    got = plan("cpu", limit=enough, max_num_seqs=10**6)
    assert (got.num_pages, got.bound_by) == (HOST_POOL_BYTES // PAGE_BYTES, "host pool")
    length = 2 * HOST_POOL_BYTES // PAGE_BYTES * 16
    got = plan("cpu", limit=enough, max_num_seqs=10**6, model_limit=length)
    assert (got.num_pages, got.bound_by, got.max_model_len) == (length // 16 + 1, "host pool", length)


def test_asked_for_pages_are_what_is_allocated(plan):
    got = plan(num_pages=20)
    assert (got.num_pages, got.bound_by, got.max_model_len) == (20, "num_pages", 256)


def test_more_pages_than_fit_are_refused_with_the_number_that_does(plan):
    with pytest.raises(ConfigError, match=r"num_pages is 751 .* 750 fit in memory_utilization 0\.9"):
        plan(num_pages=751)
    assert plan(num_pages=750).num_pages == 750


@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_a_length_that_does_not_fit_is_refused_with_the_largest_that_does(plan, platform):
    """R176: and the length named does fit."""
    limit = (400 if platform == "tpu" else 300) * PAGE_BYTES
    with pytest.raises(ConfigError, match="the largest max_model_len that fits is") as caught:
        plan(platform, limit=limit, max_model_len=10**6, model_limit=10**6)
    largest = int(re.search(r"fits is (\d+)", str(caught.value))[1])
    assert largest > 0
    got = plan(platform, limit=limit, max_model_len=largest, model_limit=10**6)
    assert got.max_model_len == largest
    with pytest.raises(ConfigError):
        plan(platform, limit=limit, max_model_len=largest + 1, model_limit=10**6)


def test_a_length_that_asked_for_pages_cannot_hold_is_refused(plan):
    with pytest.raises(ConfigError, match="the largest max_model_len that fits is 144"):
        plan(num_pages=10, max_model_len=256)
    assert plan(num_pages=10, max_model_len=144).max_model_len == 144


def test_a_length_nobody_asked_for_is_cut_to_what_fits(plan):
    assert plan(num_pages=10).max_model_len == 144


def test_too_few_pages_for_anything_are_refused(plan):
    with pytest.raises(ConfigError, match="max_model_len"):
        plan(num_pages=2)
    with pytest.raises(ConfigError, match="the largest max_model_len that fits is 0"):
        plan(limit=10)


def test_a_length_beyond_the_models_own_is_cut_to_it(plan):
    assert plan(max_model_len=10**6).max_model_len == 256


def test_shared_heads_make_a_devices_pages_smaller(plan):
    assert plan(devices_sharing_heads=2).num_pages == 2 * plan().num_pages


def test_the_engine_refuses_before_it_compiles():
    """R176 through `build_engine`."""
    with pytest.raises(ConfigError, match="the largest max_model_len that fits is 48"):
        tiny_engine(num_pages=4, max_model_len=64)


def test_this_machine_has_free_memory():
    assert 1 << 20 < free_bytes(jax.devices()[0]) < 1 << 50


def test_an_allocators_limit_is_taken_where_there_is_one():
    assert free_bytes(FakeDevice("gpu", 123)) == 123
