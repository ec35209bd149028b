"""Ids to text while they arrive, a few at a time.

Works on bytes, not on decoded strings: the tokens' bytes go through an incremental UTF-8 decoder, which keeps an
unfinished character until the rest of it comes. So what was given out is never taken back, and at every moment

    all pushes + flush == tokenizer.decode(all ids)

    ids     [E4]  [B8]  [96 "!"]  [E4]   flush
    text     ""    ""    "世!"     ""    U+FFFD
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from jaxinfer.text.tokenizer import Tokenizer

_UTF8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """The text of one answer, as far as it is certain. One owner, one thread."""

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ):
        """Starts an empty answer; the flags mean what they mean in `Tokenizer.decode`."""
        self._tokenizer = tokenizer
        self._skips_control = skip_special_tokens
        self._spaces_control = spaces_between_special_tokens
        self._is_after_control = False
        self._decoder = _UTF8("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Takes the next ids and gives the text they make certain; "" while a character is unfinished.

        Raises:
          RequestError: an id outside the vocabulary.
        """
        return self._decoder.decode(b"".join(map(self._next_bytes, token_ids)))

    def flush(self) -> str:
        """Ends the answer: U+FFFD when it ends inside a character, else ""."""
        return self._decoder.decode(b"", final=True)

    def _next_bytes(self, token_id: int) -> bytes:
        piece = self._tokenizer.token_bytes(token_id)
        if token_id not in self._tokenizer.control_ids:
            self._is_after_control = False
            return piece
        if self._skips_control:
            return b""
        if self._is_after_control and self._spaces_control:
            piece = b" " + piece
        self._is_after_control = True
        return piece
