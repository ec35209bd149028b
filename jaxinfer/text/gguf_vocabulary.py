"""Reads and checks the tokenizer fields of a GGUF file's metadata. Nothing here encodes or decodes.

A model file is foreign data: whatever is wrong in it is found here, at load time, and named; later code indexes freely.
Tokens that look like `<0x0A>` have no special meaning in byte-level BPE and are plain text, whatever their type says.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxinfer.errors import CheckpointError
from jaxinfer.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # tokenizer.ggml.token_type


@dataclass(frozen=True, kw_only=True)
class GGUFVocabulary:
    """A checked byte-level BPE vocabulary.

    Attributes:
      source: name of the file, for messages.
      tokens: the spelling of each id, in the byte-level alphabet where the type is NORMAL or BYTE.
      token_types: per id, one of the constants of this module.
      merges: pairs of spellings, best first; both and their joint spelling are ordinary tokens.
      pre_tokenizer: the row `tokenizer.ggml.pre` names.
      bos_token_id, pad_token_id, unk_token_id: in range, or None.
      eos_token_ids: end of sequence, of turn and of message, those the file names; in range, no duplicates.
      adds_bos, adds_eos: whether `encode` puts them around a text.
      chat_template: jinja text, or None.
    """

    source: str
    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    pre_tokenizer: PreTokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    unk_token_id: int | None
    adds_bos: bool
    adds_eos: bool
    chat_template: str | None

    def mergeable(self) -> dict[str, int]:
        """Spelling to id of the tokens that text may become: no control, unknown or unused ones.

        Of tokens with the same spelling the last id is taken, as llama.cpp and transformers do.
        """
        kinds = (NORMAL, USER_DEFINED, BYTE)
        pairs = zip(self.tokens, self.token_types, strict=True)
        return {token: i for i, (token, kind) in enumerate(pairs) if kind in kinds and token}


def read_gguf_vocabulary(metadata: Mapping[str, Any], source: str) -> GGUFVocabulary:
    """Makes a vocabulary of `tokenizer.*` metadata.

    Args:
      metadata: name to value; arrays are lists or numpy arrays.
      source: name of the file, for messages.

    Raises:
      CheckpointError: a field is missing, of the wrong type, of the wrong length, out of range, or not supported.
    """
    fields = _Fields(metadata, source)
    model = fields.text("tokenizer.ggml.model")
    if model != "gpt2":
        fields.refuse("tokenizer.ggml.model", f"is {model!r}; only 'gpt2' (byte-level BPE) is supported")
    pre = fields.text("tokenizer.ggml.pre")
    if pre not in PRE_TOKENIZERS:
        fields.refuse("tokenizer.ggml.pre", f"is {pre!r}; supported: {', '.join(PRE_TOKENIZERS)}")
    tokens = fields.texts("tokenizer.ggml.tokens")
    ids = {name: fields.token_id(f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in _NAMED_IDS}
    row = PRE_TOKENIZERS[pre]
    vocabulary = GGUFVocabulary(
        source=source,
        tokens=tokens,
        token_types=fields.token_types(len(tokens)),
        merges=fields.merges(),
        pre_tokenizer=row,
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(dict.fromkeys(i for i in (ids["eos"], ids["eot"], ids["eom"]) if i is not None)),
        pad_token_id=ids["padding"],
        unk_token_id=ids["unknown"],
        adds_bos=fields.flag("tokenizer.ggml.add_bos_token", row.adds_bos),
        adds_eos=fields.flag("tokenizer.ggml.add_eos_token", False),
        chat_template=fields.optional_text("tokenizer.chat_template"),
    )
    _check(vocabulary, fields)
    return vocabulary


_NAMED_IDS = ("bos", "eos", "eot", "eom", "padding", "unknown")


def _check(vocabulary: GGUFVocabulary, fields: _Fields) -> None:
    known = vocabulary.mergeable()
    for i, (left, right) in enumerate(vocabulary.merges):
        for spelling in (left, right, left + right):
            if spelling not in known:
                fields.refuse(
                    "tokenizer.ggml.merges",
                    f"entry {i} ({left!r}, {right!r}) needs {spelling!r}, which is no ordinary token",
                )
    if vocabulary.adds_bos and vocabulary.bos_token_id is None:
        fields.refuse("tokenizer.ggml.bos_token_id", "is missing, but texts are to begin with it")
    if vocabulary.adds_eos and not vocabulary.eos_token_ids:
        fields.refuse("tokenizer.ggml.eos_token_id", "is missing, but texts are to end with it")


@dataclass(frozen=True)
class _Fields:
    """Typed access to the metadata; every refusal names the file and the field."""

    metadata: Mapping[str, Any]
    source: str

    def refuse(self, name: str, why: str) -> NoReturn:
        raise CheckpointError(f"{self.source}: {name} {why}")

    def optional_text(self, name: str) -> str | None:
        value = self.metadata.get(name)
        if value is not None and not isinstance(value, str):
            self.refuse(name, f"is a {type(value).__name__}; it must be a string")
        return value

    def text(self, name: str) -> str:
        value = self.optional_text(name)
        if value is None:
            self.refuse(name, "is missing")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.metadata.get(name)
        return default if value is None else bool(value)

    def array(self, name: str) -> Sequence[Any]:
        value = self.metadata.get(name)
        if value is None or isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            self.refuse(name, "is missing" if value is None else "must be an array")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        values = tuple(self.array(name))
        if not values or not all(isinstance(v, str) for v in values):
            self.refuse(name, "must be a non-empty array of strings")
        try:
            "".join(values).encode()
        except UnicodeEncodeError:
            self.refuse(name, "holds a string that is not valid Unicode")
        return values

    def integer(self, name: str, value: Any) -> int:
        try:
            return operator.index(value)
        except TypeError:
            self.refuse(name, f"holds {value!r}; it must be an integer")

    def token_id(self, name: str, vocab_size: int) -> int | None:
        value = self.metadata.get(name)
        if value is None:
            return None
        token_id = self.integer(name, value)
        if not 0 <= token_id < vocab_size:
            self.refuse(name, f"is {token_id}; the vocabulary has {vocab_size} tokens")
        return token_id

    def token_types(self, vocab_size: int) -> tuple[int, ...]:
        name = "tokenizer.ggml.token_type"
        types = tuple(self.integer(name, v) for v in self.array(name))
        if len(types) != vocab_size:
            self.refuse(name, f"has {len(types)} entries; tokenizer.ggml.tokens has {vocab_size}")
        for i, kind in enumerate(types):
            if not NORMAL <= kind <= BYTE:
                self.refuse(name, f"entry {i} is {kind}; types are {NORMAL} to {BYTE}")
        return types

    def merges(self) -> tuple[tuple[str, str], ...]:
        name = "tokenizer.ggml.merges"
        out = []
        for i, merge in enumerate(self.array(name)):
            left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
            if not left or not right or " " in right:
                self.refuse(name, f"entry {i} is {merge!r}; it must be two spellings with one space between")
            out.append((left, right))
        return tuple(out)
