"""A byte-level BPE vocabulary small enough to check by hand, as GGUF metadata. For any test that needs a tokenizer.

Ids: 0-3 control, 4-5 user-defined, then the 256 bytes in order, then one token per merge. Some tokens hold part of a
character ("\\xe4\\xb8"), one holds the end of one and more ("\\xad!").
"""

from __future__ import annotations

from typing import Any

from jaxinfer.text import Tokenizer
from jaxinfer.text.byte_level import BYTE_TO_CHAR

ENDOFTEXT, IM_START, IM_END, TOOL = range(4)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|tool|>")
USER_DEFINED = ("<think>", "</think>")
FIRST_BYTE = len(CONTROL) + len(USER_DEFINED)
MERGES = (
    (b"h", b"e"), (b" ", b"t"), (b" t", b"he"), (b"l", b"l"), (b"he", b"ll"), (b"hell", b"o"), (b" ", b"w"),
    (b"o", b"r"), (b" w", b"or"), (b"l", b"d"), (b" wor", b"ld"), (b" ", b" "), (b"\n", b"\n"), (b"i", b"n"),
    (b"in", b"g"), (b"1", b"2"), (b" ", b"1"), (b"b", b"e"), (b"t", b"a"), (b"be", b"ta"), (b"<", b"|"),
    (b"|", b">"), (b"i", b"m"), (b"\xe4", b"\xb8"), (b"\xe4\xb8", b"\xad"), (b"\xf0", b"\x9f"), (b"\xad", b"!"),
    (b"\xc3", b"\xa9"), (b"\xb8", b"\xad"),
)  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def spelling(text: bytes) -> str:
    """Bytes in the byte-level alphabet."""
    return "".join(BYTE_TO_CHAR[byte] for byte in text)


def small_metadata(**changes: Any) -> dict[str, Any]:
    """The metadata; `changes` replace fields by the last part of their name, None removes one."""
    tokens = [*CONTROL, *USER_DEFINED, *BYTE_TO_CHAR, *(spelling(a + b) for a, b in MERGES)]
    num_plain = 256 + len(MERGES)
    fields = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3] * len(CONTROL) + [4] * len(USER_DEFINED) + [1] * num_plain,
        "merges": [f"{spelling(a)} {spelling(b)}" for a, b in MERGES],
        "bos_token_id": IM_START,
        "eos_token_id": IM_END,
        "padding_token_id": IM_END,
        "unknown_token_id": ENDOFTEXT,
        "add_bos_token": False,
        "chat_template": TEMPLATE,
    } | changes
    prefixes = {"chat_template": "tokenizer."}
    return {prefixes.get(k, "tokenizer.ggml.") + k: v for k, v in fields.items() if v is not None}


def small_tokenizer(**changes: Any) -> Tokenizer:
    """A tokenizer of `small_metadata(**changes)`."""
    return Tokenizer.from_gguf_metadata(small_metadata(**changes), "small.gguf")


def byte_ids(text: bytes) -> list[int]:
    """One id per byte, nothing merged."""
    return [FIRST_BYTE + byte for byte in text]
