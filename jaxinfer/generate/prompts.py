"""Where prompts come from: arguments, a file, or the standard input.

    arguments, `-`     each one prompt; the standard input, for `-`, as a whole
    --file             a prompt on each line, blank lines left out; or JSON lines
    JSON lines         {"prompt": "text"} or {"messages": [{"role": ..., "content": ...}, ...]}

Text is JSON lines when the file's name ends in .jsonl or the first line is such an object. Everything is read and
checked before a model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxinfer.errors import RequestError
from jaxinfer.generate.flags import Command, usage_error

Messages = list[dict[str, Any]]
Prompt = str | Messages  # text, or a chat's messages

STDIN = "-"
KEYS = ("prompt", "messages")


def read_prompts(command: Command, stdin: TextIO | None) -> list[Prompt]:
    """All prompts of a command line, in order; those to be chats already are messages.

    Args:
      stdin: the standard input, or None when it is closed.

    Raises:
      SystemExit: the command line asks for no prompt, or contradicts itself.
      RequestError: a source cannot be read, or a prompt in it is wrong.
    """
    if command.system is not None and not command.chat:
        usage_error("--system is part of a chat; add --chat")
    if command.file is not None and command.prompts:
        usage_error("give prompts as arguments or with --file, not both")
    if command.prompts.count(STDIN) > 1:
        usage_error("- (the standard input) may be given once")
    if command.file is not None:
        name, text = ("standard input", _read(stdin)) if command.file == STDIN else _read_file(Path(command.file))
        prompts = parse_lines(text, name)
        if not prompts:
            raise RequestError(f"{name} holds no prompt; write one on each line")
    elif command.prompts:
        prompts = [p for given in command.prompts for p in (_whole(stdin) if given == STDIN else [given])]
    elif stdin is None or stdin.isatty():
        usage_error("no prompt; give one, or --file FILE, or text on the standard input")
    else:
        prompts = _whole(stdin)
    for number, prompt in enumerate(prompts, 1):
        _check(prompt, f"prompt {number}" if len(prompts) > 1 else "the prompt")
    return [_as_chat(p, command.system) for p in prompts] if command.chat else prompts


def parse_lines(text: str, name: str) -> list[Prompt]:
    """The prompts in a file's text.

    Args:
      name: of the file, for errors and to tell JSON lines by their suffix.

    Raises:
      RequestError: a line of JSON lines is wrong; its number is given.
    """
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if name.endswith(".jsonl") or (lines and _is_json_prompt(lines[0][1])):
        return [_parse_json(line, f"{name}, line {number}") for number, line in lines]
    return [line for _, line in lines]


def _whole(stdin: TextIO | None) -> list[Prompt]:
    """The standard input as one prompt, unless it is JSON lines."""
    text = _read(stdin)
    first = text.lstrip().partition("\n")[0]
    return parse_lines(text, "standard input") if _is_json_prompt(first) else [text.removesuffix("\n")]


def _read(stdin: TextIO | None) -> str:
    try:
        return "" if stdin is None else stdin.read()
    except UnicodeDecodeError as why:
        raise RequestError(f"the standard input is not UTF-8 text: {why.reason} at byte {why.start}") from why


def _read_file(path: Path) -> tuple[str, str]:
    try:
        return path.name, path.read_text(encoding="utf-8")
    except OSError as why:
        raise RequestError(f"{path}: {why.strerror}") from why
    except UnicodeDecodeError as why:
        raise RequestError(f"{path}: not UTF-8 text: {why.reason} at byte {why.start}") from why


def _is_json_prompt(line: str) -> bool:
    try:
        value = json.loads(line)
    except ValueError:
        return False
    return isinstance(value, Mapping) and any(key in value for key in KEYS)


def _parse_json(line: str, where: str) -> Prompt:
    try:
        value = json.loads(line)
    except ValueError as why:
        raise RequestError(f"{where}: not JSON: {why}") from why
    if not isinstance(value, Mapping) or sum(key in value for key in KEYS) != 1:
        raise RequestError(f'{where}: a line is {{"prompt": TEXT}} or {{"messages": [...]}}')
    if unknown := set(value) - set(KEYS):
        raise RequestError(f"{where}: {min(unknown)!r} is not known; a line has prompt or messages alone")
    if "prompt" in value:
        if not isinstance(value["prompt"], str):
            raise RequestError(f"{where}: prompt must be text")
        return value["prompt"]
    messages = value["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError(f"{where}: messages must be a list of objects with role and content, at least one")
    return [dict(m) for m in messages]


def _check(prompt: Prompt, what: str) -> None:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise RequestError(f"{what} is empty; give at least one character that is not blank", "prompt")
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise RequestError(f"{what} is not valid UTF-8 text", "prompt")


def _as_chat(prompt: Prompt, system: str | None) -> Messages:
    """A text prompt as a user's message; messages stay as they are, their own system message included."""
    if not isinstance(prompt, str):
        return prompt
    first: Sequence[dict[str, Any]] = () if system is None else ({"role": "system", "content": system},)
    return [*first, {"role": "user", "content": prompt}]
