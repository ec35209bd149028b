"""Renders a chat through the model's jinja template, straight to token ids.

The names a template may use are those transformers defines. A template comes from the model file or from the operator,
never from a request; still it is foreign code, so it runs in jinja's immutable sandbox with bounded size, output and
time, and without the operations that make huge values at one stroke. A hostile one can still take memory, by doubling a
string again and again until its time is up.

Control tokens: only the template's own become control ids. What the user wrote is broken up first (`chat_messages.py`),
so that the rendered text can be cut at control spellings; it is never tokenized as a whole and no bos is added.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.errors import CheckpointError, RequestError
from jaxinfer.text.chat_messages import (
    MARKERS,
    MAX_CHAT_CHARS,
    ControlSpellings,
    plain_messages,
    plain_tools,
    unused_marker,
)
from jaxinfer.text.tokenizer import Tokenizer

MAX_TEMPLATE_BYTES = 65_536
MAX_RENDERED_CHARS = 2 * MAX_CHAT_CHARS
RENDER_TIME_S = 1.0


class RenderedChat(NamedTuple):
    """A chat as the model sees it.

    Attributes:
      text: for people; control tokens of the template and their spellings in user text look alike here.
      token_ids: what to compute.
    """

    text: str
    token_ids: list[int]


class ChatTemplate:
    """A model's chat template, compiled once. May be shared between threads."""

    def __init__(self, text: str | None, tokenizer: Tokenizer, source: str, *, time_limit_s: float = RENDER_TIME_S):
        """Compiles a template.

        Args:
          text: jinja text; None when the model has none, and then every use is refused.
          tokenizer: gives the ids and the texts `bos_token`, `eos_token`, `pad_token` and `unk_token`.
          source: name of the file it came from, for messages.
          time_limit_s: longest time for one chat.

        Raises:
          CheckpointError: too long, or no valid template.
        """
        self._source = source
        self._text = text or ""
        self._tokenizer = tokenizer
        self._time_limit_s = time_limit_s
        self._control = ControlSpellings(tokenizer.control_spellings)
        self._template = None if text is None else _compile(text, source)

    @staticmethod
    def of_model(tokenizer: Tokenizer) -> ChatTemplate:
        """The template in the model file itself.

        Raises:
          CheckpointError: as the constructor.
        """
        return ChatTemplate(tokenizer.chat_template, tokenizer, tokenizer.source)

    def render_ids(self, messages: Any, *, add_generation_prompt: bool = True, tools: Any = None) -> list[int]:
        """Token ids of a chat; see `render`."""
        return self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools).token_ids

    def render(self, messages: Any, *, add_generation_prompt: bool = True, tools: Any = None) -> RenderedChat:
        """Renders a chat.

        Args:
          messages: `[{"role": ..., "content": ...}, ...]` as in OpenAI's API; content is text or a list of text parts.
          add_generation_prompt: end with the beginning of the assistant's turn.
          tools: JSON descriptions of tools, or None.

        Raises:
          RequestError: messages or tools are malformed, the template refuses them, or a limit is passed.
        """
        if self._template is None:
            raise RequestError(
                f"{self._source} has no chat template; give one with --chat-template, or send a plain prompt",
                "messages",
            )
        plain, plain_tool_list = plain_messages(messages), plain_tools(tools)
        marker = unused_marker([plain, plain_tool_list], self._text, *self._tokenizer.control_spellings)
        rendered = self._run(
            messages=[self._control.break_in(message, marker) | {"role": message["role"]} for message in plain],
            tools=self._control.break_in(plain_tool_list, marker),
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._tokenizer.special_token_texts(),
        )
        pieces = [p if isinstance(p, int) else p.replace(marker, "") for p in self._tokenizer.split_control(rendered)]
        ids = self._tokenizer.encode_pieces(pieces, max_chars=MAX_RENDERED_CHARS)
        return RenderedChat(rendered.replace(marker, ""), ids)

    def _run(self, **variables: Any) -> str:
        assert self._template is not None
        parts: list[str] = []
        num_chars = 0
        try:
            with _time_limit(self._time_limit_s, self._template.root_render_func.__code__.co_filename):
                for part in self._template.generate(**variables):
                    num_chars += len(part)
                    if num_chars > MAX_RENDERED_CHARS:
                        _fail(f"the rendered chat has more than {MAX_RENDERED_CHARS} characters")
                    parts.append(part)
        except jinja2.TemplateError as error:
            raise RequestError(f"chat template: {error.message}", "messages") from error
        except Exception as error:  # a template is foreign code and may fail in any way
            raise RequestError(f"chat template: {type(error).__name__}: {error}", "messages") from error
        return "".join(parts)


def _compile(text: str, source: str) -> jinja2.Template:
    num_bytes = len(text.encode("utf-8", "replace"))
    if num_bytes > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"{source}: chat template has {num_bytes} bytes; at most {MAX_TEMPLATE_BYTES} are allowed"
        )
    try:
        return _environment().from_string(text)
    except (jinja2.TemplateError, RecursionError, ValueError) as error:
        raise CheckpointError(f"{source}: chat template is not valid: {error}") from error


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox without what makes huge values at one stroke.

    Attributes:
      intercepted_binops: operators that go through `call_binop`.
      padding: methods of strings that take a width.
    """

    intercepted_binops = frozenset({"*", "**", "%"})
    padding = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            return _format(left, right)
        is_repeat = operator == "*" and isinstance(left, str) and isinstance(right, int) and len(left) * right <= 4096
        are_numbers = all(isinstance(side, (int, float)) and abs(side) < 2**63 for side in (left, right))
        if not is_repeat and (operator == "**" or not are_numbers):
            _fail(f"operator {operator} may not be used on such values here")
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Any:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and ":" in value.__self__:
            _fail("str.format may not be given a width or any other format here")
        return wrapped

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        is_padding = isinstance(obj, str) and attr in self.padding
        return not is_padding and super().is_safe_attribute(obj, attr, value)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: marks an assistant's text for training; renders what is inside."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    for name in ("center", "random", "wordwrap"):
        del environment.filters[name]
    del environment.globals["lipsum"]
    environment.filters["format"] = lambda text, *values: _format(text, values)
    environment.filters["indent"] = _indent
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _fail
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _fail(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _format(text: str, values: Any) -> str:
    if re.search(r"[\d*]", text):
        _fail("% may not be given a width here")
    return text % values


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    if not isinstance(width, int) or not 0 <= width <= 64:
        _fail("indent: width must be 0 to 64")
    return jinja2.filters.do_indent(text, width, first, blank)


_NOT_ASCII_NOR_MARKER = re.compile(f"[^\x00-\x7f{MARKERS[0]}-{MARKERS[-1]}]")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers' filter of that name; markers stay as they are, so that they can be taken out again."""
    if isinstance(indent, int) and not 0 <= indent <= 64:
        _fail("tojson: indent must be 0 to 64")
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII_NOR_MARKER.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


@contextmanager
def _time_limit(limit_s: float, filename: str) -> Iterator[None]:
    """Ends the template's code with a TemplateError after `limit_s` seconds, even inside a loop that puts out nothing.

    A thread can't be killed, so the time is looked at before each line of the compiled template, through `sys.settrace`
    of this thread alone. A debugger's or coverage's own trace function rests meanwhile.
    """
    deadline = time.monotonic() + limit_s

    def on_line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > deadline:
            _fail(f"rendering took more than {limit_s} s")
        return on_line

    def on_call(frame: FrameType, event: str, argument: Any) -> Any:
        return on_line if frame.f_code.co_filename == filename else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
