"""Makes tests/text/golden_tokenizer.json: what transformers makes of texts, ids and chats with the built-in vocabulary.

    python scripts/make_tokenizer_golden.py MODEL.gguf tests/text/golden_tokenizer.json

MODEL.gguf is the built-in SmolLM2-135M-Instruct (`python -m jaxinfer.fetch`); Python needs `transformers` and `gguf`
(the extra `reference`). Nothing here uses jaxinfer. Two things differ from a plain `AutoTokenizer.from_pretrained`:

- transformers 5.24 does not read `tokenizer.ggml.pre` and cuts digits as GPT-2 does ("a  1" becomes "a", " ", " 1").
  The published `tokenizer.json` of SmolLM2 cuts each digit off first ("a", "  ", "1"): that step is put back. Checked
  once against llama.cpp (llama-cpp-python 0.3.36, `llama_tokenize` without special tokens): all 200 texts agree.
- In texts, control spellings are encoded as text (`encode_special_tokens`); in chats they are control tokens.
"""

# ruff: noqa: RUF001  # the texts hold look-alike characters on purpose

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import tokenizers
import transformers
from tokenizers import pre_tokenizers

TEXTS = [
    "", " ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "a", " a", "a ", "  a", "a  ",
    "Hello, world!", "x = 12345  y\n\n  z", "12345", " 12345", "a  1", "a   12  3", "3.14159",
    "1,000,000", "2024-01-31T12:59:60Z", "٣٤٥", "１２３", "²½¾", "Ⅷ ⅓ ①", "१२३", "0x1F 0b10 1e-9",
    "v1.2.3-rc4", "phone: +1 (555) 010-9999", "I'll don't we've they're I'm he'd it's",
    "I'LL DON'T WE'VE", "'s 't 're", "''s''", "rock 'n' roll", "O’Neill’s", "你好,世界", "日本語のテキスト。カタカナ",
    "한국어 문장입니다.", "中文 English 混合 123 文字", "漢字かな交じり文", "😀", "👩‍👩‍👧‍👦 family", "🇫🇷🇩🇪", "👍🏽 ok",
    "a😀b😀c",
    "✈️ ☕️", "é", "e\u0301", "ñ vs n\u0303", "Å Å Å", "Zażółć gęślą jaźń", "Ünïcödé", "привет, мир",
    "Ελληνικά", "שלום עולם", "مرحبا بالعالم", "ไทยภาษา", "हिन्दी में", "▁", "▁▁", "a▁b", "▁Hello▁world",
    "Ġ", "ĠĊ", "Ċ", "<0x0A>", "<0x-1>", "\ufffd", "\ufeffBOM", "a\u200bb", "\u00ad", "<|im_start|>",
    "<|im_end|>", "x<|im_end|>y", "<|im_start|>system\nobey<|im_end|>\n", "<|endoftext|>", "<repo_name>",
    "<|im_end", "|im_end|>", "<<|im_end|>>", "<file_sep><filename>", "<s></s>[INST]",
    "<think>ok</think>", "    indented", "\tindented", "a\n    b\n        c", "if x:\n\treturn  1\n",
    "trailing   \n", "\n   \n", " \n \t \r\n x", "a" * 100, "ab" * 64, " " * 17, " " * 16 + "x",
    "\n" * 9, "\t" * 5, "-" * 40, "=" * 33, "." * 12, "!?" * 9, "0" * 25,
    "def f(x: int) -> str:\n    return f'{x!r:>10}'\n",
    "#include <stdio.h>\nint main(void) { return 0; }\n",
    "SELECT * FROM t WHERE a >= 10 AND b IS NOT NULL;", "<html><body class=\"x\">&amp;</body></html>",
    '{"key": [1, 2.5, null, true], "s": "\\n\\u00e9"}',
    "$ rm -rf /tmp/x && echo 'done' | tee -a log.txt", "\\frac{a}{b}^2",
    "https://example.com/a/b?c=d&e=%20#frag", "user.name+tag@example.co.uk", "C:\\Users\\x\\file.txt",
    "~/.ssh/id_rsa", "The quick brown fox jumps over the lazy dog.",
    "Once upon a time, there was a little girl named Lily.", "WHAT IS GOING ON HERE",
    "camelCaseIdentifier snake_case_identifier kebab-case", "antidisestablishmentarianism",
    "Hello\u2028world\u2029", "tab\tseparated\tvalues", "mixed 中1文2 a3b4 😀5", "½ cup + ¼ tsp = ?",
    "10€ £5 ¥100 ₹1", "“quoted” ‘text’ — dash – en … ellipsis", "a·b×c÷d±e", "∀x∈ℝ: x²≥0", "←↑→↓ ■□▲△",
    "\u0000\u0001\u0002\u007f", "\x1b[31mred\x1b[0m", "\u0085\u000b\u000c", "Ⅻ", "ﬁ ﬂ", "ſ",
    "İstanbul ıi", "ǅ", "𝓗𝓮𝓵𝓵𝓸", "𠜎𠜱", "\U0001f9d1\u200d\U0001f4bb", "a\u0300\u0301\u0302\u0303",
]  # fmt: skip
PIECES = [
    " ", "  ", "\n", "\t", "1", "42", "007", "the", " The", "'s", "'ll", "中", "文字", "😀", "é", "e\u0301",
    "▁", "_", "-", "...", "<|im_end|>", "<", ">", "|", "{", "}", "()", "==", "word", "Word", "ß", "Ж",
    "ا", "१", "\r\n", "\u00a0", "\u200d", "🇫", "x",
]  # fmt: skip
NUM_MIXED = 60
NUM_DECODED = 60

TEMPLATES: dict[str, str | None] = {
    "own": None,
    "headers": "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n\n' + message['content'] | trim + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n\n' }}{% endif %}",
    "tools": """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=2) }}{{ '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{% continue %}{% endif %}
    {%- if '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
    {%- else %}
        {%- set content = message.content %}
    {%- endif %}
    {{- '<|im_start|>' + message.role }}
    {%- if content %}{{- '\\n' + content }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' }}
        {{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson ~ '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
    {%- set ns.last = loop.index %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' ~ ns.last }}{% endif %}
""",
}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 40, "b": 2, "why": "é <&>"}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "What is 2 + 2?"}],
    "own system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "several turns": [
        {"role": "user", "content": "  Name 3  colours.\n\n"},
        {"role": "assistant", "content": "<think>hm</think>\n\nRed, green & blue."},
        {"role": "system", "content": "A late one."},
        {"role": "user", "content": "日本語で 😀 12 > 3 <b>\n"},
    ],
    "empty content": [{"role": "user", "content": ""}],
    "tool call": [
        {"role": "user", "content": "Add 40 and 2."},
        {"role": "assistant", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "42"}]},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "now?"}]},
    ],
}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Sum é", "parameters": {"type": "object"}}}]


def reference_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as transformers takes it: content always a string, text parts joined with newlines."""
    content = message.get("content", "")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    return message | {"content": content}


def mixed_texts(seed: int) -> list[str]:
    """Texts put together from PIECES at random."""
    rng = random.Random(seed)
    return ["".join(rng.choices(PIECES, k=rng.randint(2, 24))) for _ in range(NUM_MIXED)]


def golden_chats(tokenizer: Any) -> list[dict[str, Any]]:
    """Every chat under every template, with and without generation prompt and tools."""
    out = []
    for template, text in TEMPLATES.items():
        for chat, messages in CHATS.items():
            for add_generation_prompt in (True, False):
                tools = TOOLS if template == "tools" and add_generation_prompt else None
                ids = tokenizer.apply_chat_template(
                    [reference_message(message) for message in messages],
                    tools=tools,
                    chat_template=text,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=True,
                    return_dict=False,
                )
                entry = {"template": template, "chat": chat, "messages": messages, "tools": tools}
                out.append(entry | {"add_generation_prompt": add_generation_prompt, "ids": ids})
    return out


def golden_decodes(tokenizer: Any, seed: int) -> list[dict[str, Any]]:
    """Random ids, control ids among them, and their text with and without control tokens."""
    rng = random.Random(seed)
    out = []
    for _ in range(NUM_DECODED):
        high = rng.choice((20, 300, 49_152))
        ids = [rng.randrange(high) for _ in range(rng.randint(1, 20))]
        shown = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        hidden = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        out.append({"ids": ids, "shown": shown, "hidden": hidden})
    return out


def main() -> None:
    """Writes the golden file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model.parent, gguf_file=args.model.name)
    backend = tokenizer.backend_tokenizer
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    chats = golden_chats(tokenizer)
    decodes = golden_decodes(tokenizer, seed=1)
    backend.encode_special_tokens = True
    texts = [{"text": t, "ids": backend.encode(t, add_special_tokens=False).ids} for t in TEXTS + mixed_texts(seed=0)]
    golden = {
        "made_by": "scripts/make_tokenizer_golden.py",
        "versions": {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__},
        "templates": TEMPLATES,
        "texts": texts,
        "decodes": decodes,
        "chats": chats,
    }
    lines = [f'  "{key}": {_lines(value)}' for key, value in golden.items()]
    args.out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _lines(value: Any) -> str:
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join("    " + json.dumps(item) for item in value) + "\n  ]"


if __name__ == "__main__":
    main()
