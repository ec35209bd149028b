"""Text to token ids and back, for byte-level BPE vocabularies.

One rule matters most: text never becomes a control token. Spellings such as `<|im_end|>` in a prompt are encoded as the
ordinary characters they are; only a caller that holds control ids (a chat template) can put them in, as integers:

    encode("a<|im_end|>")            -> ids of the characters
    encode_pieces(["a", 2, "\\n"])    -> ids of "a", the control token 2, ids of "\\n"

Decoding is byte-exact: each id stands for fixed bytes, and a text is those bytes joined and decoded as UTF-8 with
U+FFFD for what is invalid. A tokenizer has no state that changes and may be shared between threads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from jaxinfer.errors import PromptTooLong, RequestError
from jaxinfer.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS
from jaxinfer.text.byte_level import spelling_to_bytes
from jaxinfer.text.gguf_vocabulary import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    GGUFVocabulary,
    read_gguf_vocabulary,
)

MAX_TEXT_CHARS = 4_000_000  # 3.5 s of tokenizing for 3.8 million characters, measured on one shared core


class Tokenizer:
    """A vocabulary that encodes and decodes.

    Attributes:
      source: name of the file it came from.
      vocab_size: ids are in [0, vocab_size).
      bos_token_id, pad_token_id: or None.
      eos_token_ids: every id that ends an answer by itself; may be empty.
      control_ids: ids that are never text: left out of it when control tokens are skipped.
      chat_template: the file's own jinja text, or None.
      max_token_bytes: length of the longest token; a text of b bytes has at least b / max_token_bytes tokens.
    """

    def __init__(self, vocabulary: GGUFVocabulary):
        self._vocabulary = vocabulary
        self._backend = _backend(vocabulary)
        self._token_bytes = tuple(map(_token_bytes, vocabulary.tokens, vocabulary.token_types))
        self.source = vocabulary.source
        self.vocab_size = len(vocabulary.tokens)
        self.bos_token_id = vocabulary.bos_token_id
        self.pad_token_id = vocabulary.pad_token_id
        self.eos_token_ids = vocabulary.eos_token_ids
        self.chat_template = vocabulary.chat_template
        self.max_token_bytes = max(map(len, self._token_bytes))
        self.control_ids = frozenset(i for i, kind in enumerate(vocabulary.token_types) if kind in (CONTROL, UNKNOWN))
        # A spelling of one character cannot be told from text, so it is never looked for.
        self.control_spellings = {
            vocabulary.tokens[i]: i for i in sorted(self.control_ids) if len(vocabulary.tokens[i]) > 1
        }
        longest_first = sorted(self.control_spellings, key=len, reverse=True)
        self._control_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @staticmethod
    def from_gguf_metadata(metadata: Mapping[str, Any], source: str) -> Tokenizer:
        """Makes a tokenizer of a GGUF file's metadata.

        Args:
          metadata: name to value; arrays are lists or numpy arrays.
          source: name of the file, for messages.

        Raises:
          CheckpointError: the metadata are damaged, or of a kind that is not supported.
        """
        return Tokenizer(read_gguf_vocabulary(metadata, source))

    def encode(self, text: str, *, add_special_tokens: bool = True, max_chars: int = MAX_TEXT_CHARS) -> list[int]:
        """Ids of a text, none of them a control token but the bos and eos that the model's file asks for.

        A byte that the vocabulary has no token for is left out, as in other implementations.

        Args:
          add_special_tokens: False leaves bos and eos away even where the file asks for them.
          max_chars: refuse longer texts.

        Raises:
          PromptTooLong: more than `max_chars` characters.
          RequestError: a lone surrogate, which no UTF-8 text can hold.
        """
        ids = self.encode_pieces((text,), max_chars=max_chars)
        if not add_special_tokens:
            return ids
        bos = [self.bos_token_id] if self._vocabulary.adds_bos and self.bos_token_id is not None else []
        eos = list(self.eos_token_ids[:1]) if self._vocabulary.adds_eos else []
        return bos + ids + eos

    def encode_pieces(self, pieces: Iterable[str | int], *, max_chars: int = MAX_TEXT_CHARS) -> list[int]:
        """Ids of texts with control tokens between them; adds no bos or eos.

        Args:
          pieces: strings are text, integers are ids taken as they are. Neighbouring strings are encoded apart.
          max_chars: refuse more characters than this in all.

        Raises:
          PromptTooLong, RequestError: as `encode`.
        """
        ids: list[int] = []
        num_chars = 0
        for piece in pieces:
            if isinstance(piece, int):
                ids.append(piece)
                continue
            num_chars += len(piece)
            if num_chars > max_chars:
                raise PromptTooLong(
                    f"prompt has {num_chars} characters or more; at most {max_chars} are allowed", "prompt"
                )
            ids += self._backend.encode(_whole_characters(piece, "prompt"), add_special_tokens=False).ids
        return ids

    def split_control(self, text: str) -> list[str | int]:
        """Cuts trusted text at control spellings: what `encode_pieces` takes. Never give it text a user wrote.

        At each place the longest spelling is taken; empty strings are left out.
        """
        if self._control_pattern is None:
            return [text] if text else []
        pieces: list[str | int] = []
        start = 0
        for match in self._control_pattern.finditer(text):
            if match.start() > start:
                pieces.append(text[start : match.start()])
            pieces.append(self.control_spellings[match[0]])
            start = match.end()
        if start < len(text):
            pieces.append(text[start:])
        return pieces

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD.

        Args:
          skip_special_tokens: leave control tokens out; the bytes around one then join.
          spaces_between_special_tokens: where control tokens are shown, put one space between two that are neighbours.

        Raises:
          RequestError: an id outside the vocabulary.
        """
        pieces: list[bytes] = []
        is_after_control = False
        for token_id in token_ids:
            piece = self.token_bytes(token_id)
            if token_id in self.control_ids:
                if skip_special_tokens:
                    continue
                if is_after_control and spaces_between_special_tokens:
                    piece = b" " + piece
                is_after_control = True
            else:
                is_after_control = False
            pieces.append(piece)
        return b"".join(pieces).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; not always whole characters. Empty for ids the file marks as unused.

        Raises:
          RequestError: an id outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"token id {token_id} is not in the vocabulary of {self.vocab_size} tokens")
        return self._token_bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One id as text by itself, control tokens included; U+FFFD where its bytes are no whole character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def special_token_texts(self) -> dict[str, str]:
        """`bos_token`, `eos_token`, `pad_token` and `unk_token`, those that exist, as chat templates name them."""
        eos = self.eos_token_ids[0] if self.eos_token_ids else None
        unk = self._vocabulary.unk_token_id
        named = {"bos_token": self.bos_token_id, "eos_token": eos, "pad_token": self.pad_token_id, "unk_token": unk}
        return {name: self._vocabulary.tokens[i] for name, i in named.items() if i is not None}

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell words, each without and with a space before it.

        A sequence that ends with another one is left out: the shorter one forbids it already.

        Raises:
          RequestError: more than MAX_BAD_WORDS sequences, one longer than MAX_BAD_WORD_TOKENS, or one without tokens.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            bare = word.lstrip() or word
            plain = self._word_ids(bare, word)
            sequences[plain] = None
            if not bare.isspace():
                spaced = self._word_ids(" " + bare, word)
                if spaced[-len(plain) :] != plain:
                    sequences[spaced] = None
        if len(sequences) > MAX_BAD_WORDS:
            raise RequestError(
                f"bad_words makes {len(sequences)} token sequences, each word being spelt with and without a leading "
                f"space; at most {MAX_BAD_WORDS} are allowed",
                "bad_words",
            )
        return tuple(sequences)

    def _word_ids(self, spelling: str, word: str) -> tuple[int, ...]:
        ids = tuple(self.encode_pieces((_whole_characters(spelling, "bad_words"),)))
        if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words: {word!r} has {len(ids)} tokens; 1 to {MAX_BAD_WORD_TOKENS} are allowed", "bad_words"
            )
        return ids


def _backend(vocabulary: GGUFVocabulary) -> Backend:
    row = vocabulary.pre_tokenizer
    backend = Backend(BPE(vocabulary.mergeable(), list(vocabulary.merges), ignore_merges=row.takes_whole_words))
    backend.pre_tokenizer = row.build()  # pyright: ignore[reportAttributeAccessIssue]  # the stub has no setter
    normalizer = row.normalizer()
    if normalizer is not None:
        backend.normalizer = normalizer  # pyright: ignore[reportAttributeAccessIssue]  # the stub has no setter
    pairs = zip(vocabulary.tokens, vocabulary.token_types, strict=True)
    own = [AddedToken(token, normalized=False) for token, kind in pairs if kind == USER_DEFINED and token]
    if own:
        backend.add_tokens(own)
    return backend


def _token_bytes(spelling: str, kind: int) -> bytes:
    if kind in (NORMAL, BYTE):
        return spelling_to_bytes(spelling)
    return b"" if kind == UNUSED else spelling.encode()


def _whole_characters(text: str, param: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"text has a lone surrogate at character {error.start}; it is not valid Unicode", param
        ) from None
    return text
