"""The engine's counts after work whose counts are known."""

from __future__ import annotations

import json

from engine.variants import PAGE, greedy, prompts_of, shared_tiny, variant_llm


def test_counts_and_gauges_after_known_work():
    llm = variant_llm(shared_tiny())
    (prompt,) = prompts_of(1, [2 * PAGE + 3])
    before = llm.metrics()
    llm.generate([prompt], greedy(10), use_tqdm=False)
    llm.generate([prompt, prompt], greedy(5, n=2), use_tqdm=False)
    after = llm.metrics()
    assert after["generation_tokens_total"] == 10 + 4 * 5
    assert after["request_success_total"] == {"length": 5}
    assert after["prefix_cache_queries_total"] == 5 * len(prompt)
    assert 2 * 2 * PAGE <= after["prefix_cache_hits_total"] <= 4 * 2 * PAGE
    assert (after["num_requests_running"], after["num_requests_waiting"], after["num_pages_used"]) == (0, 0, 0)
    assert after["kv_cache_usage_perc"] == 0.0
    assert 0 < after["peak_pages_used"] <= after["num_pages"]
    assert after["num_pages_cached"] == 2
    assert after["num_steps_total"] > before["num_steps_total"]
    assert after["query_tokens_total"] - before["query_tokens_total"] <= (
        after["padded_tokens_total"] - before["padded_tokens_total"]
    )
    assert 0 <= after["host_overhead_ratio"] <= 1
    assert after["host_seconds_total"] <= after["busy_seconds_total"]
    assert after["recompiles_total"] == before["recompiles_total"]
    assert after["programs_compiled"] == len(llm.loaded.programs.keys())
    assert after["device_memory_peak_bytes"] > 0
    assert set(before) == set(after)
    json.dumps(after, allow_nan=False)


def test_ratios_are_ratios_while_requests_run():
    llm = variant_llm(shared_tiny())
    for _ in llm.stream([9] * 40, greedy(60)):
        now = llm.metrics()
        assert 0 <= now["kv_cache_usage_perc"] <= 1
        assert now["num_requests_running"] <= 1
        assert now["num_requests_waiting"] >= 0
        assert now["num_pages_used"] + now["num_pages_cached"] <= now["num_pages"]


def test_memory_is_accounted_for():
    loaded = shared_tiny()
    memory = loaded.memory.to_dict()
    assert memory["pool_bytes"] == memory["num_pages"] * memory["page_bytes"]
    assert memory["weight_bytes"] == sum(leaf.nbytes for leaf in loaded.engine.runner._leaves)
