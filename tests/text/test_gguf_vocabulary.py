"""Damaged or crafted metadata is refused at load time with the file and the field in the message. R172."""

from typing import Any

import numpy as np
import pytest
from text.small_vocabulary import CONTROL, IM_END, IM_START, byte_ids, small_metadata, small_tokenizer

from jaxinfer.errors import CheckpointError
from jaxinfer.text.gguf_vocabulary import read_gguf_vocabulary

TOKENS = small_metadata()["tokenizer.ggml.tokens"]
TYPES = small_metadata()["tokenizer.ggml.token_type"]
MERGES = small_metadata()["tokenizer.ggml.merges"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "llama"),
        ("model", None),
        ("model", 5),
        ("pre", None),
        ("pre", "deepseek-llm"),
        ("pre", "default"),
        ("tokens", None),
        ("tokens", []),
        ("tokens", [*TOKENS[:-1], 7]),
        ("tokens", "abc"),
        ("tokens", [*TOKENS[:-1], "\ud800"]),
        ("token_type", None),
        ("token_type", TYPES[:-1]),
        ("token_type", [*TYPES[:-1], 0]),
        ("token_type", [*TYPES[:-1], 1.5]),
        ("merges", None),
        ("merges", [*MERGES, "h"]),
        ("merges", [*MERGES, "h e l"]),
        ("merges", [*MERGES, " he"]),
        ("merges", [*MERGES, "z z"]),  # "zz" is no token
        ("merges", [*MERGES, "中 a"]),  # an absent part
        ("merges", [*MERGES, "<|im _end|>"]),
        ("bos_token_id", len(TOKENS)),
        ("eos_token_id", len(TOKENS)),
        ("eos_token_id", -1),
        ("eos_token_id", "2"),
        ("eot_token_id", 2**31),
        ("padding_token_id", len(TOKENS)),
        ("chat_template", 1),
    ],
)
def test_r172_bad_field_is_named(field: str, value: Any):
    with pytest.raises(CheckpointError, match=rf"^small\.gguf: tokenizer\.(ggml\.)?{field} ") as caught:
        small_tokenizer(**{field: value})
    assert caught.value.status == 500


def test_r164_unknown_pre_tokenizer_is_refused_with_the_known_ones():
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.ggml\.pre is 'smollm3'; supported: smollm, gpt-2, gpt2, llama-bpe"
    ):
        small_tokenizer(pre="smollm3")


def test_r172_merge_into_a_control_token_is_refused():
    """Otherwise ordinary text could become a control token."""
    tokens = [*TOKENS[:3], "ab", *TOKENS[4:]]
    with pytest.raises(CheckpointError, match="no ordinary token"):
        small_tokenizer(tokens=tokens, merges=[*MERGES, "a b"])


def test_r172_byte_like_tokens_are_plain_text():
    odd = ["<0x-1>", "<0xZZ>", "<0x100>", "<0x41>"]
    made = small_tokenizer(tokens=[*TOKENS, *odd], token_type=[*TYPES, 6, 6, 1, 6])
    ids = range(len(TOKENS), len(TOKENS) + 4)
    assert [made.token_text(i) for i in ids] == odd
    assert made.encode("<0x-1>") == small_tokenizer().encode("<0x-1>")


def test_r172_of_duplicate_tokens_the_last_one_is_encoded():
    made = small_tokenizer(tokens=[*TOKENS, "a", "a", "", ""], token_type=[*TYPES, 1, 1, 1, 1])
    assert made.encode("a") == [len(TOKENS) + 1]
    assert [made.decode([i]) for i in (byte_ids(b"a")[0], len(TOKENS), len(TOKENS) + 1)] == ["a"] * 3
    assert made.token_bytes(len(TOKENS) + 2) == b""


def test_missing_bos_is_refused_only_where_it_is_needed():
    assert small_tokenizer(bos_token_id=None, eos_token_id=None).eos_token_ids == ()
    with pytest.raises(CheckpointError, match="bos_token_id is missing"):
        small_tokenizer(bos_token_id=None, add_bos_token=True)
    with pytest.raises(CheckpointError, match="eos_token_id is missing"):
        small_tokenizer(eos_token_id=None, add_eos_token=True)


def test_numpy_arrays_are_read_as_lists_are():
    from_arrays = small_metadata(token_type=np.array(TYPES, np.int32), eos_token_id=np.uint32(IM_END))
    assert read_gguf_vocabulary(from_arrays, "f") == read_gguf_vocabulary(small_metadata(), "f")


def test_end_of_turn_and_message_end_answers_too():
    made = read_gguf_vocabulary(small_metadata(eot_token_id=0, eom_token_id=IM_END), "f")
    assert made.eos_token_ids == (IM_END, 0)


def test_llama3_begins_with_bos_unless_the_file_says_otherwise():
    assert small_tokenizer(pre="llama-bpe", add_bos_token=None).encode("h")[0] == IM_START
    assert small_tokenizer(pre="llama-bpe").encode("h") == byte_ids(b"h")
    assert CONTROL[IM_START] == "<|im_start|>"
