"""The decoder over pages against the oracle, which has no pages: in one go, in chunks, token by token."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import Oracle
from paged_model import NUM_PAGES, PagedModel
from tiny import tiny_architecture, tiny_mesh, tiny_params

from jaxinfer.model import Architecture, embed

# Largest difference of a logit; logits have a standard deviation of about 1.6.
TOLERANCES = {
    "float32": 2e-5,  # two layers of sums in another order: measured 5e-6
    "bfloat16": 0.25,  # every activation is rounded to 8 bits, some twenty times in a row: measured 0.07
}


@functools.cache
def model(**options: Any) -> PagedModel:
    """A shared model; tests clear its pages first."""
    arch = tiny_architecture(**{k: options.pop(k) for k in list(options) if k in Architecture.__dataclass_fields__})
    order, dtype, mesh = options.pop("order", "in_out"), options.pop("dtype", "float32"), options.pop("mesh", (1, 1))
    rules = tiny_mesh(*mesh)
    params = tiny_params(arch, rules, order=order, dtype=jnp.dtype(dtype))
    return PagedModel(arch, params, rules, oracle=Oracle.of(params, arch, order), **options)


def fresh(**options: Any) -> PagedModel:
    made = model(**options)
    made.clear()
    return made


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 512, length).tolist()


def assert_close(got: np.ndarray, want: np.ndarray, dtype: str = "float32") -> None:
    assert np.abs(got - want).max() <= TOLERANCES[dtype]


VARIANTS: dict[str, dict[str, Any]] = {
    "xla": {},
    "reference": {"op": "reference"},
    "out_in": {"order": "out_in"},
    "tied": {"is_tied": True},
    "windows": {"layer_windows": (16, None)},
    "2x2 mesh": {"mesh": (2, 2)},
    "3 KV heads on 2 devices": {"num_heads": 6, "num_kv_heads": 3, "mesh": (1, 2)},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill_in_one_go_equals_the_oracle(variant):
    t = fresh(**VARIANTS[variant])
    ids = prompt(45)
    (got_TV,) = t.step([(0, 0, ids)])
    assert got_TV.dtype == np.float32
    assert_close(got_TV, t.oracle.logits(ids))


@pytest.mark.parametrize("sizes", [(8, 8, 8, 8), (1, 15, 17, 2), (31, 1, 3)], ids=str)
def test_prefill_in_chunks_equals_the_oracle(sizes):
    t, ids, start, parts = fresh(), prompt(sum(sizes)), 0, []
    for size in sizes:
        parts += t.step([(1, start, ids[start : start + size])])
        start += size
    assert_close(np.concatenate(parts), t.oracle.logits(ids))


def test_token_by_token_equals_the_oracle():
    """Four rows decode at once from different positions; rows of the decode path are dense."""
    t = fresh()
    sequences = [prompt(3 + 12, 0), prompt(17 + 12, 1), prompt(1 + 12, 2), prompt(24 + 12, 3)]
    t.step([(row, 0, ids[:-12]) for row, ids in enumerate(sequences)])
    parts = [[] for _ in sequences]
    for back in range(12, 0, -1):
        out = t.step([(row, len(ids) - back, [ids[-back]]) for row, ids in enumerate(sequences)])
        for part, one in zip(parts, out, strict=True):
            part.append(one)
    for ids, part in zip(sequences, parts, strict=True):
        assert_close(np.concatenate(part), t.oracle.logits(ids)[-12:])


def test_a_batch_of_3_17_and_40_equals_each_alone():
    """R155: positions count from each row's own start."""
    t = fresh()
    prompts = [prompt(3, 5), prompt(17, 6), prompt(40, 7)]
    together = t.step([(row, 0, ids) for row, ids in enumerate(prompts)])
    for row, ids in enumerate(prompts):
        t.clear()
        (alone,) = t.step([(row, 0, ids)])
        assert np.array_equal(alone, together[row]), "at one compiled shape a row does not feel its neighbours"
        assert_close(alone, t.oracle.logits(ids))


def test_mixed_rows_equal_the_oracle():
    t = fresh()
    first, second, third = prompt(20, 1), prompt(33, 2), prompt(9, 3)
    t.step([(0, 0, first[:19]), (2, 0, second[:16])])
    got = t.step([(0, 19, first[19:]), (2, 16, second[16:]), (3, 0, third)])
    for part, ids, length in zip(got, (first, second, third), (1, 17, 9), strict=True):
        assert_close(part, t.oracle.logits(ids)[-length:])


def test_bfloat16_stays_close_and_a_missing_token_would_show():
    t = fresh(dtype="bfloat16")
    ids = prompt(45)
    (got_TV,) = t.step([(0, 0, ids)])
    want_TV = t.oracle.logits(ids)
    assert got_TV.dtype == np.float32
    assert_close(got_TV, want_TV, "bfloat16")
    mutant_TV = t.oracle.logits([ids[1], *ids[1:]])
    assert np.abs(mutant_TV - want_TV)[1:8].max() > 2 * TOLERANCES["bfloat16"]


@pytest.mark.parametrize("mutant", ["wrong position", "wrong page", "window dropped"])
def test_mutants_exceed_the_tolerance(mutant):
    t, ids = fresh(), prompt(45)
    want_TV = t.oracle.logits(ids)
    if mutant == "window dropped":
        t = fresh(layer_windows=(16, None))
        (got_TV,) = t.step([(0, 0, ids)])
    else:
        t.step([(0, 0, ids[:40]), (1, 0, ids[:3])])
        if mutant == "wrong page":
            t.table_RM[[0, 1]] = t.table_RM[[1, 0]]
        try:
            (got_TV,) = t.step([(0, 40 + (mutant == "wrong position"), ids[40:])])
        finally:
            if mutant == "wrong page":
                t.table_RM[[0, 1]] = t.table_RM[[1, 0]]
        want_TV = want_TV[40:]
    assert np.abs(got_TV - want_TV).max() > 10 * TOLERANCES["float32"]


def test_layers_without_a_window_see_everything():
    """R153: no window anywhere is one work list, of full attention."""
    assert tiny_architecture().windows == (None,)
    assert tiny_architecture(layer_windows=(None, None)).windows == (None,)
    assert tiny_architecture(layer_windows=(16, None)).windows == (16, None)
    t = fresh(layer_windows=(None, None))
    (got_TV,) = t.step([(0, 0, prompt(45))])
    assert_close(got_TV, fresh().oracle.logits(prompt(45)))


def test_embedding_rows_are_looked_up_unchanged():
    t = fresh()
    got_TD = embed(t.params, t.rules, jnp.array([5, 0, 511], jnp.int32))
    assert np.array_equal(got_TD, np.asarray(t.params.top["embedding"].get_value())[[5, 0, 511]])


def test_the_pool_holds_what_the_format_says():
    t = fresh(mesh=(2, 2))
    arrays = jax.tree.leaves(t.pages)
    assert sum(a.nbytes for a in arrays) == NUM_PAGES * t.format.page_bytes
    assert {a.sharding.shard_shape(a.shape)[t.op.kv_head_axis] for a in arrays} == {1}, "one KV head per device"
