"""The public face of the op: an implementation by name."""

from __future__ import annotations

from pallas_kernels.ragged_paged_attention import reference, xla
from pallas_kernels.ragged_paged_attention.contract import AttentionOp

IMPLEMENTATIONS = {"reference": reference.OP, "xla": xla.OP}


def get_attention(name: str, platform: str) -> AttentionOp:
    """Finds an implementation.

    Args:
      name: `auto`, `reference` or `xla`.
      platform: jax's name of the device's platform; `auto` takes that platform's default.

    Raises:
      NotImplementedError: no such implementation; asking by name never falls back.
    """
    if name == "auto":
        return IMPLEMENTATIONS["xla"]  # every platform's default until it has a kernel of its own
    if name not in IMPLEMENTATIONS:
        raise NotImplementedError(
            f"attention implementation {name!r} is not built for {platform}; "
            f"there are: auto, {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[name]
