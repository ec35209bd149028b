"""The public face of the op: an implementation by name.

There are kernels for w4a16 alone, on GPUs and on TPUs from v6e: elsewhere XLA's own program costs no more.
`scripts/quantized_matmul_report.py` repeats the figures.
"""

from __future__ import annotations

from pallas_kernels.dispatch import Choice, choose
from pallas_kernels.quantized_matmul import gpu, reference, tpu, xla
from pallas_kernels.quantized_matmul.contract import MatmulNeeds

IMPLEMENTATIONS = {"reference": reference.OP, "xla": xla.OP, "tpu": tpu.OP, "gpu": gpu.OP}
ORDER = {"tpu": ("tpu",), "gpu": ("gpu",), "cuda": ("gpu",)}  # by platform, best first; `xla` runs everywhere


def get_matmul(name: str, needs: MatmulNeeds) -> Choice:
    """Finds an implementation.

    Args:
      name: `auto` for the platform's best that can run, or an implementation's own name.

    Raises:
      NotImplementedError: there is none of that name, or it cannot run what is needed; the message says why.
    """
    return choose("quantized matmul", name, needs, IMPLEMENTATIONS, (*ORDER.get(needs.platform, ()), "xla"))
