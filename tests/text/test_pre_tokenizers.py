"""Each row of the table cuts text as its family's published tokenizer does. R164."""

import pytest

from jaxinfer.text.pre_tokenizers import PRE_TOKENIZERS

TEXT = "I'll SAY'S x = 1234  y\n\n  z\tw!?\n"
GPT2 = ["I", "'ll", " SAY", "'", "S", " x", " =", " 1234", " ", " y", "\n\n ", " z", "\t", "w", "!?", "\n"]
LLAMA3 = ["I", "'ll", " SAY", "'S", " x", " =", " ", "123", "4", " ", " y", "\n\n", " ", " z", "\tw", "!?\n"]
QWEN2 = ["I", "'ll", " SAY", "'S", " x", " =", " ", *"1234", " ", " y", "\n\n", " ", " z", "\tw", "!?\n"]
SMOLLM = ["I", "'ll", " SAY", "'", "S", " x", " =", " ", *"1234", " ", " y", "\n\n ", " z", "\t", "w", "!?", "\n"]


@pytest.mark.parametrize(
    ("name", "words"),
    [("smollm", SMOLLM), ("gpt-2", GPT2), ("gpt2", GPT2), ("llama-bpe", LLAMA3), ("llama3", LLAMA3), ("qwen2", QWEN2)],
)
def test_words_are_cut_as_the_family_cuts_them(name: str, words: list[str]):
    cut = PRE_TOKENIZERS[name].build().pre_tokenize_str(TEXT)
    assert [TEXT[start:end] for _, (start, end) in cut] == words


def test_only_qwen2_normalizes():
    assert {name for name, row in PRE_TOKENIZERS.items() if row.normalizer() is not None} == {"qwen2"}
