"""Finds stop strings in text that arrives in pieces, and holds back only what may still become one.

All stop strings together form one Aho-Corasick automaton, so that a character costs a constant time however long the
answer is. The depth of its state is the length of the longest end of the text that begins some stop string: exactly the
text to hold back, and not one character more.

    stops "b,c"      text  a   ,   b   ,   d          held  ""  ""  "b"  "b,"  ""

The stop string that is complete first wins; of several that end at the same character, the longest. This does not
depend on how the text was cut into pieces and never needs a further token to decide (taking the one that *begins* first
would: with stops "bc" and "abcd", "abc" would have to wait for what follows).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple


class StopResult(NamedTuple):
    """What one piece of text led to.

    Attributes:
      text: new text that is safe to show.
      stop: the stop string that was found, or None.
    """

    text: str
    stop: str | None


class _State:
    """A node of the automaton.

    Attributes:
      depth: characters from the root.
      next: by character, the node one deeper.
      fallback: node of the longest proper end of this node's text that begins a stop string; None at the root.
      match: longest stop string that ends here, or None.
    """

    __slots__ = ("depth", "fallback", "match", "next")

    def __init__(self, depth: int):
        self.depth = depth
        self.next: dict[str, _State] = {}
        self.fallback: _State | None = None
        self.match: str | None = None

    def step(self, char: str) -> _State:
        state = self
        while char not in state.next:
            if state.fallback is None:
                return state
            state = state.fallback
        return state.next[char]


def _automaton(stop: tuple[str, ...]) -> _State:
    root = _State(0)
    for string in stop:
        state = root
        for char in string:
            state = state.next.setdefault(char, _State(state.depth + 1))
        state.match = string
    root.match = None  # an empty stop string would match everywhere; requests with one are refused
    queue = deque([root])
    while queue:
        state = queue.popleft()
        for char, child in state.next.items():
            child.fallback = root if state.fallback is None else state.fallback.step(char)
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root


class StopChecker:
    """Watches the text of one answer for stop strings."""

    def __init__(self, stop: tuple[str, ...], *, include_stop_str_in_output: bool = False):
        """Starts at the beginning of an answer.

        Args:
          stop: strings that end it, none of them empty.
          include_stop_str_in_output: show the stop string as well; nothing needs to be held back then.
        """
        self._includes_stop = include_stop_str_in_output
        self._state = _automaton(stop)
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> StopResult:
        """Takes the next piece. What follows a stop string in it is dropped; no push may come after that."""
        assert not self._is_stopped, "text after a stop string"
        pending = self._held + text
        for i, char in enumerate(text, start=len(self._held) + 1):
            self._state = self._state.step(char)
            match = self._state.match
            if match is not None:
                self._is_stopped = True
                self._held = ""
                return StopResult(pending[: i if self._includes_stop else i - len(match)], match)
        num_safe = len(pending) - (0 if self._includes_stop else self._state.depth)
        self._held = pending[num_safe:]
        return StopResult(pending[:num_safe], None)

    def flush(self) -> str:
        """Ends the answer without a stop string: gives what was held back."""
        held, self._held = self._held, ""
        return held
