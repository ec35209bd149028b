"""The public face of the op: an implementation by name."""

from __future__ import annotations

from pallas_kernels.dispatch import Choice, choose
from pallas_kernels.ragged_paged_attention import reference, xla
from pallas_kernels.ragged_paged_attention.contract import AttentionNeeds

IMPLEMENTATIONS = {"reference": reference.OP, "xla": xla.OP}
ORDER: dict[str, tuple[str, ...]] = {}  # by platform, best first; `xla` runs everywhere


def get_attention(name: str, needs: AttentionNeeds) -> Choice:
    """Finds an implementation.

    Args:
      name: `auto` for the platform's best that can run, or an implementation's own name.

    Raises:
      NotImplementedError: there is none of that name, or it cannot run what is needed; the message says why.
    """
    return choose("attention", name, needs, IMPLEMENTATIONS, (*ORDER.get(needs.platform, ()), "xla"))
