"""Ids to visible text with stop strings: where a multi-token step is cut, and what a stop token leaves."""

import random

import pytest
from text.small_vocabulary import IM_END, byte_ids

from jaxinfer.request import SamplingParams
from jaxinfer.text import OutputDelta, OutputText, Tokenizer


def answer(small: Tokenizer, ids: list[int], **params) -> OutputText:
    """An answer to which all ids have been pushed."""
    out = OutputText(small, SamplingParams(**params))
    out.push(ids)
    return out


def test_step_is_cut_at_the_token_that_completes_the_stop_string(small: Tokenizer):
    ids = small.encode("hello world the")
    out = OutputText(small, SamplingParams(stop="world"))
    assert out.push(ids) == OutputDelta("hello ", "world", 2)
    assert out.is_finished
    assert out.text == "hello "


@pytest.mark.parametrize(("include", "text"), [(False, "hello "), (True, "hello wor")])
def test_stop_string_inside_a_token_cuts_the_text_but_keeps_the_token(small: Tokenizer, include: bool, text: str):
    out = OutputText(small, SamplingParams(stop="wor", include_stop_str_in_output=include))
    assert out.push(small.encode("hello world")) == (text, "wor", 2)


def test_r034_same_text_and_tokens_however_the_steps_are_cut(small: Tokenizer):
    ids = small.encode("alpha beta gamma delta")
    rng = random.Random(0)
    results = set()
    for _ in range(200):
        out = OutputText(small, SamplingParams(stop="beta gamma"))
        start = 0
        while True:
            size = rng.randrange(4)
            delta = out.push(ids[start : start + size])
            start += delta.num_tokens_kept
            if delta.stop_string is not None:
                break
        results.add((out.text, start))
    assert results == {("alpha ", len(small.encode("alpha beta gamma")))}


@pytest.mark.parametrize(("include", "text"), [(False, "hello"), (True, "hello the")])
def test_r030_text_of_the_stop_token_is_left_out_unless_asked_for(small: Tokenizer, include: bool, text: str):
    [the] = small.encode(" the")
    out = answer(small, small.encode("hello"), include_stop_str_in_output=include, stop_token_ids=[the])
    delta = out.finish(the)
    assert (delta.stop_string, delta.num_tokens_kept, out.text) == (None, 1, text)


@pytest.mark.parametrize(
    ("include", "skip", "text"), [(False, False, "h"), (True, True, "h"), (True, False, "h<|im_end|>")]
)
def test_r030_end_of_sequence_shows_only_when_both_flags_say_so(small: Tokenizer, include: bool, skip: bool, text: str):
    out = answer(small, byte_ids(b"h"), include_stop_str_in_output=include, skip_special_tokens=skip)
    out.finish(IM_END)
    assert out.text == text


def test_finish_gives_the_held_text_and_the_unfinished_character(small: Tokenizer):
    out = answer(small, byte_ids(b"ab\xe4"), stop="bc")
    assert out.text == "a"
    assert out.finish() == ("b\ufffd", None, 0)
    assert out.text == "ab\ufffd"


def test_stop_string_completed_by_the_end_itself(small: Tokenizer):
    out = answer(small, byte_ids(b"ab\xe4"), stop="\ufffd")
    assert out.finish() == ("", "\ufffd", 0)
    out = answer(small, byte_ids(b"ab"), stop="bc", include_stop_str_in_output=True)
    assert out.finish(*byte_ids(b"c")) == ("c", "bc", 1)


def test_special_token_flags_reach_the_detokenizer(small: Tokenizer):
    ids = [IM_END, IM_END, *byte_ids(b"x")]
    assert answer(small, ids).text == "x"
    assert answer(small, ids, skip_special_tokens=False).text == "<|im_end|> <|im_end|>x"
    flags = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
    assert answer(small, ids, **flags).text == "<|im_end|><|im_end|>x"


def test_nothing_may_follow_the_end(small: Tokenizer):
    out = answer(small, byte_ids(b"a"), stop="a")
    with pytest.raises(AssertionError):
        out.push(byte_ids(b"b"))
    with pytest.raises(AssertionError):
        out.finish()
