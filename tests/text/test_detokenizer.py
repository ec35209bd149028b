"""What streams out is, joined, what `decode` gives for all ids at once: never half a character, nothing taken back.

Reliability check F16; the run with 100,000 sequences is marked `slow`.
"""

import random
from collections.abc import Callable, Iterable

import hypothesis
import pytest
from hypothesis import strategies as st
from text.small_vocabulary import IM_END, IM_START, byte_ids

from jaxinfer.errors import RequestError
from jaxinfer.text import IncrementalDetokenizer, Tokenizer

FLAGS = [(True, True), (False, True), (False, False)]  # skip_special_tokens, spaces_between_special_tokens


class PerPushDecoder:
    """Mutant: decodes each push by itself."""

    def __init__(self, tokenizer: Tokenizer, **flags: bool):
        self._decode = lambda ids: tokenizer.decode(list(ids), **flags)

    def push(self, token_ids: Iterable[int]) -> str:
        return self._decode(token_ids)

    def flush(self) -> str:
        return ""


def first_difference(
    tokenizer: Tokenizer, num_sequences: int, seed: int, make: Callable = IncrementalDetokenizer
) -> list[list[int]] | None:
    """Random ids in random chunks under every flag: the first chunks whose text is wrong at any time, or None."""
    rng = random.Random(seed)
    for number in range(num_sequences):
        skip, spaces = FLAGS[number % len(FLAGS)]
        flags = {"skip_special_tokens": skip, "spaces_between_special_tokens": spaces}
        chunks = [
            [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(4))] for _ in range(rng.randrange(9))
        ]
        whole = tokenizer.decode([i for chunk in chunks for i in chunk], **flags)
        detokenizer = make(tokenizer, **flags)
        so_far = ""
        for chunk in chunks:
            so_far += detokenizer.push(chunk)
            if not whole.startswith(so_far):
                return chunks
        if so_far + detokenizer.flush() != whole:
            return chunks
    return None


def stream(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """The text of each single id, then of the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.push([i]) for i in ids] + [detokenizer.flush()]


def test_r016_random_ids_stream_as_they_decode(small: Tokenizer):
    assert first_difference(small, 20_000, seed=0) is None


@pytest.mark.slow
def test_r016_many_random_ids_stream_as_they_decode(small: Tokenizer):
    assert first_difference(small, 100_000, seed=1) is None


@pytest.mark.weights
def test_r016_random_ids_of_the_builtin_model(builtin: Tokenizer):
    assert first_difference(builtin, 5_000, seed=2) is None


def test_r016_decoding_each_push_by_itself_is_found_out(small: Tokenizer):
    assert first_difference(small, 1_000, seed=0, make=PerPushDecoder) is not None


@hypothesis.given(st.lists(st.binary(max_size=4), max_size=12))
def test_r016_any_bytes_in_any_chunks(small: Tokenizer, chunks: list[bytes]):
    detokenizer = IncrementalDetokenizer(small)
    text = "".join(detokenizer.push(byte_ids(chunk)) for chunk in chunks) + detokenizer.flush()
    assert text == b"".join(chunks).decode("utf-8", "replace")


def test_r016_cjk_beside_incomplete_bytes_is_sent_once(small: Tokenizer):
    """The pieces "A 世" and a broken byte, then "a", then "b": sent once each, in order."""
    deltas = stream(small, byte_ids("A 世".encode() + b"\xe4" + b"ab"))
    assert "".join(deltas) == "A 世\ufffdab"
    assert deltas == ["A", " ", "", "", "世", "", "\ufffda", "b", ""]


def test_r018_words_keep_their_spaces_one_id_at_a_time(small: Tokenizer):
    """The sentencepiece case in its byte-level form: the space is part of the token, so nothing can lose it."""
    ids = small.encode("hello world foo")
    assert "".join(stream(small, ids)) == "hello world foo"
    assert stream(small, ids)[1] == " world"


def test_r020_lone_continuation_bytes_become_replacement_characters(small: Tokenizer):
    assert stream(small, byte_ids(b"a\x85b")) == ["a", "\ufffd", "b", ""]


def test_r020_trailing_partial_character_is_flushed_once(small: Tokenizer):
    detokenizer = IncrementalDetokenizer(small)
    assert detokenizer.push(byte_ids(b"ok\xe4\xb8")) == "ok"
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""]


def test_no_replacement_character_while_a_character_may_still_be_completed(small: Tokenizer):
    assert stream(small, byte_ids("😀".encode())) == ["", "", "", "😀", ""]


def test_control_tokens_are_spaced_across_pushes(small: Tokenizer):
    detokenizer = IncrementalDetokenizer(small, skip_special_tokens=False)
    assert [detokenizer.push([IM_START]), detokenizer.push([IM_END])] == ["<|im_start|>", " <|im_end|>"]


def test_id_outside_the_vocabulary_is_refused(small: Tokenizer):
    with pytest.raises(RequestError, match="not in the vocabulary"):
        IncrementalDetokenizer(small).push([small.vocab_size])
