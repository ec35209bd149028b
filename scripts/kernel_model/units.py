"""How many bundles a TPU core issues in the time that it takes to read a byte.

The vendor publishes no clocks. They follow from its peak rates and from the work of one cycle:

    clock = peak bfloat16 FLOP/s of a core / FLOP per cycle of a core

v4 to v5p have four 128 x 128 matrix units a core: 131,072 FLOP per cycle. For v6e and tpu7x (two units of 256 x 256)
the compiler's own estimate is the guide: libtpu 0.0.42 puts a bfloat16 product of 8192 x 8192 x 8192 at 2,977,840 and
2,604,600 cycles, which is more than 262,144 FLOP per cycle allow; so 524,288. This gives 1.05, 1.50, 1.75, 1.75 and
2.20 GHz.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.plan.targets import Chip

FLOP_PER_CYCLE = {"v4": 131072, "v5e": 131072, "v5p": 131072, "v6e": 524288, "tpu7x": 524288}
CORES = {"v4": 2, "v5p": 2}  # per device, where there are more than one; they share its memory's bandwidth


@dataclass(frozen=True)
class CoreRates:
    """Of one core.

    Attributes:
      clock_hz: bundles per second.
      bytes_per_s: its share of the device's memory bandwidth.
      flop_per_cycle: of bfloat16 products.
    """

    clock_hz: float
    bytes_per_s: float
    flop_per_cycle: int

    def cycles(self, num_bytes: float) -> float:
        """Cycles in which so many bytes can be read."""
        return num_bytes / self.bytes_per_s * self.clock_hz


def core_rates(chip: Chip) -> CoreRates:
    """Rates of a TPU's core, from its published figures."""
    assert chip.bytes_per_s is not None, chip.name
    cores = CORES.get(chip.name, 1)
    flop_per_cycle = FLOP_PER_CYCLE[chip.name]
    return CoreRates(
        clock_hz=chip.flops_per_s["bfloat16"] / cores / flop_per_cycle,
        bytes_per_s=chip.bytes_per_s / cores,
        flop_per_cycle=flop_per_cycle,
    )
