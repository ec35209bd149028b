"""How many pages fit, and an honest account of it.

On a TPU or GPU the pool takes what `memory_utilization` leaves beside weights and temporaries. On a CPU, whose memory
everything else shares, it takes no more than all slots need at full length, nor more than HOST_POOL_BYTES.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxinfer.errors import ConfigError
from jaxinfer.model import PageFormat

HOST_POOL_BYTES = 2 << 30
GIB = 1 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """What is allocated on each device, in bytes, and why.

    Attributes:
      device_bytes: memory there is: free host memory at start on a CPU, the allocator's limit elsewhere.
      budget_bytes: memory_utilization x device_bytes.
      weight_bytes, temporary_bytes: of the parameters, and reserved for programs.
      page_bytes, num_pages, pool_bytes: of the page pool, the null page included; bytes per device.
      max_model_len: positions a sequence may have.
      bound_by: what limited the pool: "num_pages" (asked for), "memory_utilization", "max_num_seqs" or "host pool".
    """

    device_bytes: int
    budget_bytes: int
    weight_bytes: int
    temporary_bytes: int
    page_bytes: int
    num_pages: int
    pool_bytes: int
    max_model_len: int
    bound_by: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def free_bytes(device: Any) -> int:
    """Bytes that may be used on a device."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return int(stats["bytes_limit"])
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            available = 1024 * int(line.split()[1])
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdigit():
        available = min(available, int(text)) if available else int(text)
    return available or 4 * GIB


def plan_memory(
    *,
    device: Any,
    page_format: PageFormat,
    weight_bytes: int,
    temporary_bytes: int,
    memory_utilization: float,
    num_pages: int | None,
    max_num_seqs: int,
    max_model_len: int | None,
    model_limit: int,
    devices_sharing_heads: int,
    device_bytes: int | None = None,
) -> MemoryPlan:
    """Sizes the pool.

    Args:
      weight_bytes, temporary_bytes: per device; the first already allocated.
      num_pages: asked for by the user, or None.
      max_model_len: asked for by the user, or None for `model_limit`, or what fits.
      devices_sharing_heads: devices a page is divided over.
      device_bytes: memory of a device that is not here; None asks the device.

    Raises:
      ConfigError: not even one sequence of the asked length fits; the message gives the largest that does.
    """
    page_bytes = page_format.page_bytes // devices_sharing_heads
    size = page_format.page_size
    wanted_len = min(max_model_len or model_limit, model_limit)
    if device_bytes is None:
        device_bytes = free_bytes(device)
    # On a CPU the weights are already taken out of what is free.
    taken = temporary_bytes + (weight_bytes if device.platform != "cpu" else 0)
    budget = int(memory_utilization * device_bytes)
    fits = max(0, budget - taken) // page_bytes
    bound_by = "memory_utilization"
    if num_pages is not None:
        if num_pages > fits:
            raise ConfigError(
                f"num_pages is {num_pages} ({num_pages * page_bytes:,} bytes); {fits} fit in memory_utilization "
                f"{memory_utilization} of {device_bytes:,} bytes; ask for fewer or raise memory_utilization"
            )
        fits, bound_by = num_pages, "num_pages"
    elif device.platform == "cpu":
        needed = max_num_seqs * (-(-wanted_len // size)) + 1
        host = max(HOST_POOL_BYTES // page_bytes, -(-wanted_len // size) + 1)
        fits, bound_by = min((fits, bound_by), (needed, "max_num_seqs"), (host, "host pool"))
    longest = max(0, fits - 1) * size
    if longest < min(wanted_len, size * 2) or (max_model_len is not None and longest < wanted_len):
        raise ConfigError(
            f"max_model_len {wanted_len} needs {-(-wanted_len // size) + 1} pages of {page_bytes:,} bytes; {fits} fit "
            f"beside {taken:,} bytes of weights and temporaries in {budget:,}; the largest "
            f"max_model_len that fits is {longest}; lower it or raise memory_utilization"
        )
    return MemoryPlan(
        device_bytes=device_bytes,
        budget_bytes=budget,
        weight_bytes=weight_bytes,
        temporary_bytes=temporary_bytes,
        page_bytes=page_bytes,
        num_pages=fits,
        pool_bytes=fits * page_bytes,
        max_model_len=min(wanted_len, longest),
        bound_by=bound_by,
    )
