"""How text is cut into words before byte-pair merging, by the name a GGUF file gives in `tokenizer.ggml.pre`.

A wrong cut gives other ids than the model was trained on and no error, so an unknown name is refused, never guessed.
Rows follow the published `tokenizer.json` of each family, which llama.cpp's `llama-vocab.cpp` agrees with.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class PreTokenizer:
    """One row of the table.

    Attributes:
      steps: applied in order; the last one spells bytes in the byte-level alphabet.
      takes_whole_words: a word that is itself in the vocabulary is taken whole, without merging.
      adds_bos: whether bos is prepended when the file does not say.
      is_nfc: whether text is brought to Unicode form NFC first.
    """

    steps: tuple[pre_tokenizers.PreTokenizer, ...]
    takes_whole_words: bool = False
    adds_bos: bool = False
    is_nfc: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer object of the `tokenizers` package."""
        return pre_tokenizers.Sequence(list(self.steps))

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer object of the `tokenizers` package, or None."""
        return normalizers.NFC() if self.is_nfc else None


def _gpt2_words() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _words(pattern: str) -> tuple[pre_tokenizers.PreTokenizer, ...]:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


_GPT2_ROW = PreTokenizer((_gpt2_words(),))
_LLAMA3_ROW = PreTokenizer(_words(_LLAMA3), takes_whole_words=True, adds_bos=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "smollm": PreTokenizer((pre_tokenizers.Digits(individual_digits=True), _gpt2_words())),
    "gpt-2": _GPT2_ROW,
    "gpt2": _GPT2_ROW,
    "llama-bpe": _LLAMA3_ROW,
    "llama3": _LLAMA3_ROW,
    "qwen2": PreTokenizer(_words(_QWEN2), is_nfc=True),
}
