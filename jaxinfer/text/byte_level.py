"""The byte-level alphabet: how byte-level BPE spells each of the 256 bytes as one printable character.

Printable Latin-1 characters stand for themselves; the 68 others take U+0100 and on, in order (a space is `Ġ`, a newline
`Ċ`). Source: GPT-2 `bytes_to_unicode`; tests compare it with the `tokenizers` package.
"""

from __future__ import annotations


def _alphabet() -> tuple[str, ...]:
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    out, num_moved = [], 0
    for byte in range(256):
        if byte in itself:
            out.append(chr(byte))
        else:
            out.append(chr(0x100 + num_moved))
            num_moved += 1
    return tuple(out)


BYTE_TO_CHAR: tuple[str, ...] = _alphabet()
_CHAR_TO_BYTE = {char: byte for byte, char in enumerate(BYTE_TO_CHAR)}


def spelling_to_bytes(spelling: str) -> bytes:
    """The bytes a vocabulary entry stands for.

    An entry with any character outside the alphabet is not byte-level at all: it stands for its own UTF-8 text.
    """
    try:
        return bytes(_CHAR_TO_BYTE[char] for char in spelling)
    except KeyError:
        return spelling.encode()
