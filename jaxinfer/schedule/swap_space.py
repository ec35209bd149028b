"""How much host memory swapped sequences take, in pages. The copies themselves are the engine's."""

from __future__ import annotations


class SwapSpace:
    """Room for `capacity_pages` pages; all of a sequence's pages go in together or not at all."""

    def __init__(self, capacity_pages: int):
        self.capacity_pages = capacity_pages
        self._num_pages_of: dict[int, int] = {}
        self._num_used = 0

    @property
    def num_used(self) -> int:
        """Pages held now."""
        return self._num_used

    def reserve(self, seq_id: int, num_pages: int) -> bool:
        """Takes room for a sequence; False when there is too little."""
        assert seq_id not in self._num_pages_of, f"sequence {seq_id} is swapped out already"
        if self._num_used + num_pages > self.capacity_pages:
            return False
        self._num_pages_of[seq_id] = num_pages
        self._num_used += num_pages
        return True

    def num_pages(self, seq_id: int) -> int:
        """Pages of a sequence that is swapped out."""
        return self._num_pages_of[seq_id]

    def release(self, seq_id: int) -> None:
        """Gives a sequence's room back; nothing happens when it has none."""
        self._num_used -= self._num_pages_of.pop(seq_id, 0)

    def seq_ids(self) -> set[int]:
        """Sequences that are swapped out."""
        return set(self._num_pages_of)

    def audit(self) -> None:
        """Asserts that the room used is what the sequences take, and within capacity."""
        assert self._num_used == sum(self._num_pages_of.values()) <= self.capacity_pages, "swap space is miscounted"
