"""Stop strings are found wherever the pieces are cut, and only what may still become one is held back."""

import random
import time
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from jaxinfer.request import MAX_STOP_CHARS
from jaxinfer.text import StopChecker, StopResult


class FindInPieceChecker:
    """Mutant: looks for stop strings inside each piece alone and holds nothing back."""

    def __init__(self, stop: tuple[str, ...], *, include_stop_str_in_output: bool = False):
        self._stop = stop

    def push(self, text: str) -> StopResult:
        found = [s for s in self._stop if s in text]
        return StopResult(text.partition(found[0])[0], found[0]) if found else StopResult(text, None)

    def flush(self) -> str:
        return ""


def oracle(text: str, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Slow: tries each end, takes the longest stop string there."""
    for end in range(len(text) + 1):
        for s in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(s):
                return text[: end if include else end - len(s)], s
    return text, None


def held(text: str, stop: Sequence[str]) -> str:
    """Slow: the longest end of the text that is a proper beginning of a stop string."""
    ends = [text[k:] for k in range(len(text) + 1)]
    return next(end for end in ends if any(s.startswith(end) and s != end for s in stop))


def differs(pieces: Sequence[str], stop: tuple[str, ...], include: bool, make: type = StopChecker) -> bool:
    """Whether a checker's answers are anything but the oracle's, or too much or too little is held back at any time."""
    whole, expected_stop = oracle("".join(pieces), stop, include)
    checker = make(stop, include_stop_str_in_output=include)
    shown = seen = ""
    for piece in pieces:
        text, found = checker.push(piece)
        shown, seen = shown + text, seen + piece
        if found is not None:
            return (shown, found) != (whole, expected_stop)
        if shown != (seen if include else seen.removesuffix(held(seen, stop))):
            return True
    return (shown + checker.flush(), None) != (whole, expected_stop)


def shows(stop: Sequence[str], pieces: Sequence[str]) -> list[str]:
    """What each piece lets out, up to the stop string or the flush."""
    checker = StopChecker(tuple(stop))
    out = []
    for piece in pieces:
        text, found = checker.push(piece)
        out.append(text)
        if found is not None:
            return out
    return [*out, checker.flush()]


STOPS = st.lists(st.text("ab,", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple)


@hypothesis.given(st.lists(st.text("ab,c", max_size=5), max_size=8), STOPS, st.booleans())
def test_any_pieces_give_what_the_whole_text_gives(pieces: list[str], stop: tuple[str, ...], include: bool):
    assert not differs(pieces, stop, include)


def test_random_texts_against_the_oracle_and_a_mutant():
    rng = random.Random(0)
    num_mutant_caught = 0
    for _ in range(3_000):
        pieces = ["".join(rng.choices("ab,", k=rng.randrange(4))) for _ in range(rng.randrange(8))]
        stop = tuple("".join(rng.choices("ab,", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 3)))
        assert not differs(pieces, stop, include=rng.random() < 0.5), (pieces, stop)
        num_mutant_caught += differs(pieces, stop, False, FindInPieceChecker)
    assert num_mutant_caught > 1_000


def test_r024_no_character_of_the_stop_string_is_shown():
    assert shows(["DEFGHIJ"], ["", "D", "E", "FG", "HI", "JKL"]) == [""] * 6
    assert shows(["DEFGHIJ"], ["x", "DEF", "GHI", "J"]) == ["x", "", "", ""]


def test_r026_marker_in_ordinary_tokens_is_never_begun():
    assert shows(["<|im_end|>"], ["Hi", "<", "|", "im", "_", "end", "|", ">"]) == ["Hi"] + [""] * 7


def test_r028_only_a_proper_beginning_of_a_stop_string_is_held():
    assert shows(["b,c"], ["a,", "<think>", "x"]) == ["a,", "<think>", "x", ""]
    assert shows(["b,c"], ["a", "b", ",", "d"]) == ["a", "", "", "b,d", ""]


def test_r034_stop_string_across_two_pieces_is_found_as_in_one():
    stop = ["beta gamma"]
    assert "".join(shows(stop, ["alpha", " beta", " gamma", " delta"])) == "alpha "
    assert shows(stop, ["alpha beta gamma delta"]) == ["alpha "]


def test_first_complete_wins_and_then_the_longest():
    assert StopChecker(("abcd", "bc")).push("xabcd") == ("xa", "bc")
    assert StopChecker(("c", "bc", "abc")).push("xabcd") == ("x", "abc")
    assert StopChecker(("ab", "abc")).push("xabc") == ("x", "ab")


def test_included_stop_string_is_shown_and_nothing_is_held():
    checker = StopChecker(("bc",), include_stop_str_in_output=True)
    assert [checker.push("ab"), checker.push("cd")] == [("ab", None), ("c", "bc")]


def test_no_stop_strings_hold_nothing():
    assert shows([], ["a", "", "b"]) == ["a", "", "b", ""]


def test_flush_gives_the_held_text_once():
    checker = StopChecker(("xyz",))
    assert checker.push("axy") == ("a", None)
    assert [checker.flush(), checker.flush()] == ["xy", ""]


def test_text_after_a_stop_string_is_our_bug():
    checker = StopChecker(("a",))
    checker.push("a")
    with pytest.raises(AssertionError):
        checker.push("b")


def test_cost_per_character_does_not_grow_with_the_held_text():
    """A repetitive stop string of the longest kind, and text that nearly matches it all the time."""
    stop = ("a" * (MAX_STOP_CHARS - 1) + "b",)
    checker = StopChecker(stop)
    start = time.process_time()
    text = "".join(checker.push("a").text for _ in range(100_000))
    assert len(text) == 100_000 - (MAX_STOP_CHARS - 1)
    assert time.process_time() - start < 2.0  # about 0.1 s; a rescan of the whole text would take minutes
