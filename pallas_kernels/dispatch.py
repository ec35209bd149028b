"""Picks an implementation of an op by name, or by platform. What is asked for by name runs, or says why it cannot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Choice(NamedTuple):
    """An implementation and why it was taken.

    Attributes:
      op: has `name` and `why_not(needs)`.
      reason: for logs and reports.
    """

    op: Any
    reason: str


def choose(kind: str, name: str, needs: Any, implementations: Mapping[str, Any], order: tuple[str, ...]) -> Choice:
    """Finds an implementation.

    Args:
      kind: of op, for errors.
      name: of an implementation, or `auto` for the first of `order` that can run.
      needs: what it must run; has `platform`.
      implementations: all there are, by name.
      order: names to try for this platform, best first; the last runs everywhere.

    Raises:
      NotImplementedError: there is no such implementation, or it cannot run; the message says why.
    """
    if name != "auto":
        if name not in implementations:
            raise NotImplementedError(
                f"{kind} implementation {name!r} does not exist; there are: auto, {', '.join(implementations)}"
            )
        why = implementations[name].why_not(needs)
        if why is not None:
            raise NotImplementedError(f"{kind} implementation {name!r} cannot run on {needs.platform}: {why}")
        return Choice(implementations[name], "asked for by name")
    passed_over = []
    for candidate in order:
        why = implementations[candidate].why_not(needs)
        if why is None:
            return Choice(
                implementations[candidate], "; ".join([f"first for {needs.platform} that runs", *passed_over])
            )
        passed_over.append(f"not {candidate}: {why}")
    raise NotImplementedError(f"no {kind} implementation runs on {needs.platform}: {'; '.join(passed_over)}")
