"""Counts and gauges of an engine as one plain dictionary, for `LLM.metrics`, the benchmark and the command line."""

from __future__ import annotations

import resource
import sys
from typing import Any

from jaxinfer.engine.load import LoadedEngine


def engine_metrics(loaded: LoadedEngine) -> dict[str, Any]:
    """Since start. Names follow docs/metrics.md; ratios are in [0, 1], times in seconds, memory in bytes."""
    stats = loaded.engine.scheduler.stats()
    run, loop = loaded.engine.runner.stats, loaded.engine.stats
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "num_pages": stats.num_pages,
        "num_pages_used": stats.num_pages_used,
        "num_pages_cached": stats.num_pages_cached,
        "peak_pages_used": stats.peak_pages_used,
        "kv_cache_usage_perc": stats.num_pages_used / stats.num_pages,
        "prefix_cache_queries_total": stats.prefix_cache_queries,
        "prefix_cache_hits_total": stats.prefix_cache_hits,
        "num_preemptions_total": stats.num_preemptions,
        "num_swap_outs_total": stats.num_swap_outs,
        "num_evictions_total": stats.num_evictions,
        "request_success_total": dict(stats.finished),
        "generation_tokens_total": loaded.engine.num_output_tokens,
        "num_steps_total": run.num_steps,
        "query_tokens_total": run.query_tokens,
        "padded_tokens_total": run.padded_tokens,
        "host_seconds_total": loop.host_seconds,
        "busy_seconds_total": loop.busy_seconds,
        "host_overhead_ratio": loop.host_seconds / loop.busy_seconds if loop.busy_seconds else 0.0,
        "recompiles_total": loaded.num_recompiles,
        "programs_compiled": loaded.programs.num_compiled,
        "device_memory_peak_bytes": peak_bytes(loaded),
        "memory": loaded.memory.to_dict(),
        "attention": {"implementation": loaded.attention, "reason": loaded.attention_reason},
        "start_seconds": dict(loaded.seconds),
    }


def peak_bytes(loaded: LoadedEngine) -> int:
    """Most memory used so far: the device's own count where it keeps one, else this process's peak resident size."""
    device = loaded.rules.mesh.devices.flat[0]
    counted = device.memory_stats() if device.platform != "cpu" else None
    if counted and "peak_bytes_in_use" in counted:
        return int(counted["peak_bytes_in_use"])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
