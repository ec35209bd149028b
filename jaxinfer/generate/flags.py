"""Command line of `python -m jaxinfer.generate`, made from the dataclasses that the library itself uses.

    Command ─────────────────────┐
    SamplingParams ──────────────┼─ fields, types, defaults, `Attributes:` ─► one flag each ─► tyro ─► Options
    EngineConfig and its parts ──┘

No flag is written here a second time: a new sampling parameter or engine option has its flag, and its help, at once.
Values are checked by the classes they end up in, not here. No jax import, so that `--help` is quick.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import tyro

from jaxinfer.config import EngineConfig
from jaxinfer.request import SamplingParams

PROG = "python -m jaxinfer.generate"
DESCRIPTION = """Answers prompts with a model. One prompt is streamed; several run as one batch.

By default the likeliest token is taken (temperature 0), so the same prompt has the same answer each time."""

# The command's own defaults, where they are not those of `SamplingParams` and `EngineConfig`: a person at a terminal
# wants the same answer twice, more than 16 tokens of it, and to wait for no program but those that this answer needs.
DEFAULTS = {"temperature": 0.0, "max_tokens": 128}
ENGINE_DEFAULTS = {"warm_up": False}
# Both halves have a seed; the answer's is the one a person means.
ENGINE_FLAG_NAMES = {"seed": "engine_seed"}
ALIASES = {"enable_prefix_caching": ("--prefix-caching",)}
_ENTRY = re.compile(r"  (\w+(?:, \w+)*): (.*)")


@dataclass(frozen=True, kw_only=True)
class Command:
    """What the command itself needs to know.

    Attributes:
      prompts: prompts, each answered by itself; `-` is one prompt read from the standard input, as is no prompt at all
        when something is piped in.
      file: file of prompts (`-`: the standard input): one on each line, or JSON lines with "prompt" or "messages".
      chat: put each prompt as a user's message through the model's chat template.
      system: system message before each prompt; needs --chat.
      json: print one JSON object for each prompt, with token ids and metrics, and nothing else.
      stream: show a single prompt's answer while it grows.
    """

    prompts: tuple[str, ...] = ()
    file: str | None = None
    chat: bool = False
    system: str | None = None
    json: bool = False
    stream: bool = True


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Attributes:
      sampling: keyword arguments of `SamplingParams`, all of them.
      engine: keyword arguments of `LLM`, all of them.
    """

    command: Command
    sampling: dict[str, Any]
    engine: dict[str, Any]


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parses `arguments` (None: the process's own).

    Raises:
      SystemExit: with code 0 after --help, 2 after a usage error, which has been explained on the standard error.
    """
    sampling, engine = _own_flags(SamplingParams, DEFAULTS), list(_engine_flags())
    groups = [
        ("sampling", tyro.conf.OmitArgPrefixes[_flag_class("Sampling", "How tokens are chosen.", sampling)]),
        ("engine", tyro.conf.OmitArgPrefixes[_flag_class("Engine", "The model and how it runs.", engine)]),
    ]
    command = list(_own_flags(Command))
    kind = _flag_class("Flags", DESCRIPTION, command, groups)
    parsed, unknown = tyro.cli(kind, prog=PROG, description=DESCRIPTION, args=arguments, return_unknown_args=True)
    if unknown:
        usage_error(_unknown(unknown, [flag.flag_name for flag in (*command, *sampling, *engine)]))
    return Options(
        Command(**_values(command, parsed)), _values(sampling, parsed.sampling), _values(engine, parsed.engine)
    )


def usage_error(message: str) -> NoReturn:
    """Says what is wrong with the command line, and leaves with exit code 2."""
    print(f"error: {message} (see {PROG} --help)", file=sys.stderr)
    raise SystemExit(2)


class _Flag(NamedTuple):
    """One field as a flag: `flag_name` is the field's name unless another field has it already."""

    name: str
    flag_name: str
    type: Any
    default: Any
    text: str


def attribute_texts(cls: type) -> dict[str, str]:
    """Text of each name in the `Attributes:` section of a class's docstring; `a, b: text` gives it to both."""
    _, _, section = (inspect.getdoc(cls) or "").partition("\nAttributes:\n")
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if entry := _ENTRY.fullmatch(line):
            names = entry[1].split(", ")
            texts |= dict.fromkeys(names, entry[2])
        elif line.startswith("    "):
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
        else:
            break
    return texts


def _own_flags(cls: type, defaults: Mapping[str, Any] | None = None, names: Mapping[str, str] | None = None):
    """The flags of a dataclass's fields, those that are dataclasses themselves left out."""
    texts, types = attribute_texts(cls), get_type_hints(cls)
    return [
        _Flag(
            f.name,
            (names or {}).get(f.name, f.name),
            types[f.name],
            (defaults or {}).get(f.name, f.default),
            texts.get(f.name, ""),
        )
        for f in fields(cls)
        if not is_dataclass(types[f.name])
    ]


def _engine_flags() -> Iterable[_Flag]:
    """The flags of `EngineConfig`: its parts' fields, then its own."""
    for kind in get_type_hints(EngineConfig).values():
        if is_dataclass(kind):
            yield from _own_flags(kind, ENGINE_DEFAULTS)  # pyright: ignore[reportArgumentType] - is_dataclass is true of instances too
    yield from _own_flags(EngineConfig, names=ENGINE_FLAG_NAMES)


def _flag_class(name: str, text: str, flags: Sequence[_Flag], groups: Sequence[tuple[str, Any]] = ()) -> Any:
    """A dataclass for tyro: a field per flag, and a field per group of flags."""
    assert all(flag.default is not MISSING for flag in flags), "every option has a default"
    members = [(flag.flag_name, _tyro_type(flag), _tyro_default(flag)) for flag in flags]
    nested = [(group, kind, field(default_factory=get_args(kind)[0])) for group, kind in groups]
    made = make_dataclass(name, [*members, *nested], kw_only=True)
    made.__doc__ = text
    return made


def _tyro_type(flag: _Flag) -> Any:
    """The flag's type with its help; a list is given by repeating the flag, so that it swallows no prompt after it."""
    shape = tyro.conf.arg(help=flag.text, aliases=ALIASES.get(flag.name, ()))
    if flag.name == "prompts":  # the one flag without a name
        shape = tyro.conf.arg(help=flag.text, metavar="[PROMPT ...]", help_behavior_hint="")
        return tyro.conf.Positional[Annotated[flag.type, shape]]
    if (several := _several(flag.type)) is not None:
        return tyro.conf.UseAppendAction[Annotated[several, shape]]
    return Annotated[flag.type, shape]


def _tyro_default(flag: _Flag) -> Any:
    several = _several(flag.type)
    if several is None or flag.default is not None:
        return flag.default
    return field(default_factory=dict) if get_origin(several) is dict else ()


def _several(kind: Any) -> Any:
    """The tuple or dict type inside a type, or None when it holds one value."""
    for part in (kind, *get_args(kind)):
        if get_origin(part) is tuple:
            return part
        if get_origin(part) is Mapping:
            key, value = get_args(part)
            return dict[key, value]
    return None


def _values(flags: Sequence[_Flag], parsed: Any) -> dict[str, Any]:
    """Field name to value; a list flag that was never given has its field's own default."""
    values = {flag.name: getattr(parsed, flag.flag_name) for flag in flags}
    return {
        flag.name: flag.default if values[flag.name] in ((), {}) and _several(flag.type) else values[flag.name]
        for flag in flags
    }


def _unknown(arguments: Sequence[str], names: Sequence[str]) -> str:
    """What is wrong with arguments that no flag took."""
    first = next((a for a in arguments if a.startswith("--")), arguments[0])
    if not first.startswith("-"):
        return f"unexpected argument {first!r}; give all prompts together, before or after the flags"
    known = ["--" + name.replace("_", "-") for name in names]
    given = first.partition("=")[0].replace("_", "-").replace("--no-", "--", 1)
    near = [name for name in known if name.startswith(given)] or difflib.get_close_matches(given, known, 1)
    return f"unknown flag {first.partition('=')[0]}" + (f"; did you mean {near[0]}?" if near else "")
