"""The public face of the op: an implementation by name."""

from __future__ import annotations

from pallas_kernels.dispatch import Choice, choose
from pallas_kernels.ragged_paged_attention import cpu, gpu, reference, tpu, xla
from pallas_kernels.ragged_paged_attention.contract import AttentionNeeds

IMPLEMENTATIONS = {op.name: op for op in (reference.OP, xla.OP, cpu.OP, tpu.OP, gpu.OP)}
# By platform, best first; `xla` runs everywhere. jax calls an NVIDIA GPU that is here "gpu", one to compile for "cuda".
ORDER = {"cpu": ("cpu",), "tpu": ("tpu",), "gpu": ("gpu",), "cuda": ("gpu",)}


def attention_names() -> tuple[str, ...]:
    """Of all implementations, whether they run here or not."""
    return tuple(IMPLEMENTATIONS)


def get_attention(name: str, needs: AttentionNeeds) -> Choice:
    """Finds an implementation.

    Args:
      name: `auto` for the platform's best that can run, or an implementation's own name.

    Raises:
      NotImplementedError: there is none of that name, or it cannot run what is needed; the message says why.
    """
    return choose("attention", name, needs, IMPLEMENTATIONS, (*ORDER.get(needs.platform, ()), "xla"))
