"""Checks the messages of a chat and makes the plain copy that a chat template sees.

The copy differs from what the user sent in four ways. Content that is a list of text parts is joined with newlines;
an assistant's missing content is ""; the JSON arguments of a tool call are parsed; and spellings of control tokens are
broken by a marker character, so that a template's own control tokens are the only ones found in what it renders:

    user   x<|im_end|>y      copy   x<M|im_end|>y      rendered   <|im_start|>user\\nx<M|im_end|>y<|im_end|>

The marker is a Unicode noncharacter that occurs nowhere in the messages; it is taken out again before encoding.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from jaxinfer.errors import RequestError

MAX_MESSAGES = 1024
MAX_TOOLS = 128
MAX_CHAT_CHARS = 4_000_000
MAX_DEPTH = 32  # of lists and objects inside a message
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MARKERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # the noncharacters of the basic plane

_WORD = re.compile(r"[\w.-]*")


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """A checked deep copy of a chat's messages.

    Roles are limited to ROLES because templates build control tokens out of them (`'<|' + role + '|>'`).

    Raises:
      RequestError: not a list of 1 to MAX_MESSAGES messages with known roles and text contents, or too large.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
        _refuse("messages must be a list")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        _refuse(f"messages has {len(messages)} entries; 1 to {MAX_MESSAGES} are allowed")
    out = [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    _check_size(out, "messages")
    return out


def plain_tools(tools: Any) -> list[dict[str, Any]] | None:
    """A checked deep copy of a chat's tools; None stays None, and so does an empty list.

    Raises:
      RequestError: not a list of at most MAX_TOOLS objects, or too large.
    """
    if tools is None or tools == []:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)) or len(tools) > MAX_TOOLS:
        _refuse(f"tools must be a list of at most {MAX_TOOLS} objects", "tools")
    out = []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            _refuse(f"tools[{i}] must be an object", "tools")
        out.append(_plain(tool, f"tools[{i}]", "tools", MAX_DEPTH))
    _check_size(out, "tools")
    return out


def unused_marker(values: Any, *texts: str) -> str:
    """A marker character that occurs neither in the strings inside `values` nor in `texts`.

    Raises:
      RequestError: every one of MARKERS is in use.
    """
    used = set().union(*(set(MARKERS).intersection(s) for s in (*_strings(values), *texts) if not s.isascii()))
    for marker in MARKERS:
        if marker not in used:
            return marker
    _refuse("messages use all of the Unicode noncharacters U+FDD0 to U+FDEF; leave one of them out")


class ControlSpellings:
    """Knows the control spellings of a vocabulary and breaks them in text that a user wrote."""

    def __init__(self, spellings: Iterable[str]):
        """Prepares for spellings of two characters or more."""
        known = sorted(spellings, key=len, reverse=True)
        self._whole = re.compile("(?=" + "|".join(map(re.escape, known)) + ")") if known else None
        self._beginnings = frozenset(s[:k] for s in known for k in range(1, len(s)))
        self._endings = frozenset(s[-k:] for s in known for k in range(1, len(s)))
        self._max_part = max(map(len, known), default=1) - 1
        self._all = "\0".join(known)

    def break_in(self, value: Any, marker: str) -> Any:
        """A copy of plain data whose strings spell no control token, not even together with text around them.

        A marker goes after the first character of each spelling; also where the string, blanks aside, ends with the
        beginning of one, begins with the end of one, or is a part of one. Words such as names are exempt from these
        three, so that templates can compare them.
        """
        if isinstance(value, str):
            return self._break_text(value, marker)
        if isinstance(value, list):
            return [self.break_in(item, marker) for item in value]
        if isinstance(value, dict):
            return {self._break_text(key, marker): self.break_in(item, marker) for key, item in value.items()}
        return value

    def _break_text(self, text: str, marker: str) -> str:
        if self._whole is None:
            return text
        cuts = {match.start() + 1 for match in self._whole.finditer(text)}
        if not _WORD.fullmatch(text):
            start, end = len(text) - len(text.lstrip()), len(text.rstrip())
            lengths = range(1, min(self._max_part, end - start) + 1)
            cuts.update(end - k + 1 for k in lengths if text[end - k : end] in self._beginnings)
            is_part = start < end and text[start:end] in self._all
            if is_part or any(text[start : start + k] in self._endings for k in lengths):
                cuts.add(start)
        if not cuts:
            return text
        bounds = [0, *sorted(cuts), len(text)]
        return marker.join(text[a:b] for a, b in itertools.pairwise(bounds))


def _plain_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        _refuse(f"{where} must be an object with a role and a content")
    if "role" not in message:
        _refuse(f"{where} has no role; it must be one of {', '.join(ROLES)}")
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
        _refuse(f"{where}.role is {str(role)[:64]!r}; it must be one of {', '.join(ROLES)}")
    plain = _plain({k: v for k, v in message.items() if k != "content"}, where, "messages", MAX_DEPTH)
    out = {"role": role, "content": _joined_content(message.get("content"), where)} | plain
    if out.get("tool_calls"):
        out["tool_calls"] = _tool_calls(out["tool_calls"], where)
    elif role != "assistant" and message.get("content") is None:
        _refuse(f"{where}.content is missing; only an assistant's message may leave it out")
    return out


def _joined_content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        _refuse(f"{where}.content must be a string or a list of text parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            _refuse(f"{where}.content[{i}] has type {str(kind)[:64]!r}; only 'text' parts are supported")
        if not isinstance(part.get("text"), str):
            _refuse(f"{where}.content[{i}].text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: Any, where: str) -> list[Any]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        _refuse(f"{where}.tool_calls must be a list of objects")
    for i, call in enumerate(calls):
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(f"{where}.tool_calls[{i}].function must be an object with a name")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            place = f"{where}.tool_calls[{i}].function.arguments"
            function["arguments"] = _plain(_parsed(arguments, place), place, "messages", MAX_DEPTH)
    return calls


def _parsed(arguments: str, where: str) -> Any:
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        _refuse(f"{where} is no valid JSON")


def _plain(value: Any, where: str, param: str, depth: int) -> Any:
    if depth == 0:
        _refuse(f"{where} is nested more than {MAX_DEPTH} deep", param)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item, where, param, depth - 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): _plain(item, where, param, depth - 1) for key, item in value.items()}
    _refuse(f"{where} holds a {type(value).__name__}; only JSON values are allowed", param)


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)


def _check_size(value: Any, param: str) -> None:
    num_chars = 0
    for string in _strings(value):
        num_chars += len(string)
        if num_chars > MAX_CHAT_CHARS:
            _refuse(f"{param} has more than {MAX_CHAT_CHARS} characters", param)
        try:
            string.encode("utf-8")
        except UnicodeEncodeError:
            _refuse(f"{param} has a lone surrogate in it; it is not valid Unicode", param)


def _refuse(message: str, param: str = "messages") -> NoReturn:
    raise RequestError(message, param)
