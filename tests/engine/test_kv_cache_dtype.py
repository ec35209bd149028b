"""Pages of 8 bits through the whole engine: their size is reported as it is, and whatever moves, scrubs or finds a page
again moves its scales with it.

An answer under one KV dtype is compared with another under the same: rounding keys and values may change a greedy text,
how pages are moved may not.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.variants import (
    PAGE,
    SLOTS,
    assert_idle,
    greedy,
    ids_of,
    preempt_every,
    prompts_of,
    requests_of,
    run,
    variant,
)
from tiny import tiny_engine

from jaxinfer.config import EngineConfig
from jaxinfer.engine.load import LoadedEngine
from jaxinfer.engine.loop import Engine
from jaxinfer.errors import ConfigError

KV_DTYPES = ("int8", "fp8")
MOVED = ("int8", pytest.param("fp8", marks=pytest.mark.slow))  # where only what is moved matters
STORED = {"int8": "int8", "fp8": "float8_e4m3fn", "float32": "float32"}
PROMPTS = prompts_of(61, [40, 3, 70, 17, 33, 9, 2 * PAGE, 21])


@functools.cache
def tiny_with(kv_dtype: str) -> LoadedEngine:
    """As `shared_tiny`, with these pages and the attention that runs everywhere."""
    return tiny_engine(
        page_size=PAGE,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=32,
        rounds_per_dispatch=4,
        attention="xla",
        kv_cache_dtype=kv_dtype,
        warm_up=False,
    )


@functools.cache
def calm_ids(kv_dtype: str) -> list[list[int]]:
    """Answers of a large pool that nothing is found again in, moved or taken away from."""
    engine = variant(tiny_with(kv_dtype), enable_prefix_caching=False).engine
    return ids_of(run(engine, requests_of(PROMPTS, greedy(24))))


def prompt_logprobs(kv_dtype: str, prompt: list[int]) -> np.ndarray:
    (out,) = run(variant(tiny_with(kv_dtype)).engine, requests_of([prompt], greedy(1, prompt_logprobs=0)))
    known = out.prompt_logprobs or []
    return np.array([entry[token].logprob for token, entry in zip(prompt, known, strict=True) if entry])


@pytest.mark.parametrize(("asked", "stored"), [*STORED.items(), ("fp8_e4m3", STORED["fp8"]), ("bf16", "bfloat16")])
def test_every_name_of_a_dtype_means_the_same(asked: str, stored: str):
    assert EngineConfig.from_flat(kv_cache_dtype=asked).model.kv_cache_dtype == stored


@pytest.mark.parametrize("option", [{"kv_cache_dtype": "fp4"}, {"dtype": "int8"}, {"dtype": "fp8"}])
def test_other_dtypes_are_refused_and_weights_are_never_cast_to_8_bits(option: dict[str, Any]):
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=f"{name} is '{value}'; it must be one of auto, float32"):
        EngineConfig.from_flat(**option)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_page_is_reported_as_large_as_its_arrays(kv_dtype: str):
    loaded = tiny_with(kv_dtype)
    arch, leaves = loaded.arch, jax.tree.leaves(loaded.engine.runner._pages)
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(STORED[kv_dtype]), jnp.dtype("float32")}
    numbers = arch.num_layers * 2 * PAGE * arch.num_kv_heads
    assert loaded.memory.page_bytes == numbers * (arch.head_dim + 4)
    assert tiny_with("float32").memory.page_bytes == numbers * arch.head_dim * 4
    assert loaded.memory.pool_bytes == sum(leaf.nbytes for leaf in leaves)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rounding_shows_in_log_probabilities_and_only_a_little(kv_dtype: str):
    (prompt,) = prompts_of(62, [100])
    off = np.abs(prompt_logprobs(kv_dtype, prompt) - prompt_logprobs("float32", prompt))
    assert 1e-4 < off.max() < {"int8": 0.1, "fp8": 0.5}[kv_dtype]


@pytest.mark.parametrize("kv_dtype", MOVED)
def test_pages_found_again_give_the_same_tokens(kv_dtype: str):
    engine = variant(tiny_with(kv_dtype)).engine
    outputs = [run(engine, requests_of(PROMPTS, greedy(24))) for _ in range(2)]
    assert ids_of(outputs[0]) == ids_of(outputs[1]) == calm_ids(kv_dtype)
    assert [out.metrics.cached_tokens for out in outputs[1]] == [(len(p) - 1) // PAGE * PAGE for p in PROMPTS]
    assert_idle(engine)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("kv_dtype", MOVED)
def test_preempted_sequences_give_the_same_tokens(kv_dtype: str, mode: str):
    engine = variant(tiny_with(kv_dtype), num_pages=24, preemption_mode=mode, rounds_per_dispatch=2).engine
    outputs = run(engine, requests_of(PROMPTS, greedy(24)), before_step=preempt_every(engine, 3))
    assert ids_of(outputs) == calm_ids(kv_dtype)
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 5
    assert (stats.num_swap_outs > 0) == (mode == "swap")
    assert_idle(engine)


def fill_scales(engine: Engine, page_id: int, value: float) -> None:
    """Overwrites the scales of one page in every layer."""

    def filled(leaf):
        if leaf.dtype != jnp.float32:
            return leaf
        array = np.array(leaf)
        array[page_id] = value
        return jax.device_put(array, leaf.sharding)

    engine.runner._pages = jax.tree.map(filled, engine.runner._pages)


@pytest.mark.parametrize("kv_dtype", MOVED)
def test_a_nan_scale_ends_its_own_request_and_is_scrubbed(kv_dtype: str):
    engine = variant(tiny_with(kv_dtype)).engine
    for request in requests_of(PROMPTS[:4], greedy(24)):
        engine.submit(request)
    for _ in range(6):
        engine.step()
    (victim,) = (s for s in engine.scheduler._state.running.values() if s.request.request_id == "0")
    page_id = victim.page_ids[0]
    fill_scales(engine, page_id, np.nan)
    finished = {}
    while engine.has_work():
        finished |= {out.request_id: out.outputs[0] for out in engine.step() if out.finished}
    assert finished["0"].finish_reason == "error"
    for i in (1, 2, 3):
        assert finished[str(i)].token_ids == calm_ids(kv_dtype)[i]
    again = run(engine, requests_of(PROMPTS, greedy(24)))  # reuses the page, scrubbed
    assert ids_of(again) == calm_ids(kv_dtype)
    assert all(np.isfinite(np.asarray(a[1:], np.float32)).all() for a in jax.tree.leaves(engine.runner._pages))
    assert_idle(engine)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_scrubbed_pages_are_zero_in_every_array(kv_dtype: str):
    loaded = tiny_with(kv_dtype)
    runner, num_pages = loaded.engine.runner, loaded.programs.sizes.num_pages
    run(variant(loaded).engine, requests_of(PROMPTS[:1], greedy(2)))
    written = [int(i) for i in np.flatnonzero(np.asarray(runner._pages[0][0]).astype(np.float32).any((1, 2, 3))) if i]
    assert len(written) >= 3
    runner._scrub(tuple(written))
    for leaf in jax.tree.leaves(runner._pages):
        assert leaf.shape[0] == num_pages
        assert not np.asarray(leaf)[written].astype(np.float32).any()


@pytest.mark.slow
def test_two_devices_with_a_kv_head_each_give_the_same_tokens():
    loaded = tiny_engine(
        model=2, page_size=PAGE, max_num_seqs=4, max_num_batched_tokens=32, kv_cache_dtype="int8", attention="xla"
    )
    for leaf in jax.tree.leaves(loaded.engine.runner._pages):
        assert leaf.sharding.shard_shape(leaf.shape)[1] == 1
    assert loaded.memory.page_bytes * 2 == tiny_with("int8").memory.page_bytes
    engine = variant(loaded, preemption_mode="swap").engine
    outputs = run(engine, requests_of(PROMPTS, greedy(24)), before_step=preempt_every(engine, 3))
    assert ids_of(outputs) == calm_ids("int8")
    assert engine.scheduler.stats().num_swap_outs > 0
    assert_idle(engine)
