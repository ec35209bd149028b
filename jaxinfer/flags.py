"""Command lines made from the dataclasses that the library itself uses.

    a dataclass ─► fields, types, defaults, `Attributes:` ─► one flag each ─► tyro ─► values by field name

No flag is written a second time: a new option of the engine has its flag, and its help, in every command that takes it.
Values are checked by the classes they end up in, not here. No jax import, so that `--help` is quick.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

import tyro

from jaxinfer.config import EngineConfig

ALIASES = {"enable_prefix_caching": ("--prefix-caching",)}
_ENTRY = re.compile(r"  (\w+(?:, \w+)*): (.*)")


class Flag(NamedTuple):
    """One field as a flag.

    Attributes:
      name, flag_name: the field's name, and the flag's where another field has that already.
      text: its help.
      metavar: for the help, of the one flag that is given without its name; None for all others.
    """

    name: str
    flag_name: str
    type: Any
    default: Any
    text: str
    metavar: str | None = None


class Group(NamedTuple):
    """Flags under one heading of the help; `name` is the attribute of what `parse_flags` returns."""

    name: str
    title: str
    text: str
    flags: Sequence[Flag]


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


def flags_of(
    cls: type,
    defaults: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    positional: Mapping[str, str] | None = None,
) -> list[Flag]:
    """The flags of a dataclass's fields, those that are dataclasses themselves left out.

    Args:
      defaults, names: of fields whose flag has another default, or another name, than the field.
      positional: field given without its name -> its metavar.
    """
    texts, types = attribute_texts(cls), get_type_hints(cls)
    return [
        Flag(
            f.name,
            (names or {}).get(f.name, f.name),
            types[f.name],
            (defaults or {}).get(f.name, f.default),
            texts.get(f.name, ""),
            (positional or {}).get(f.name),
        )
        for f in fields(cls)
        if not is_dataclass(types[f.name])
    ]


def engine_flags(
    defaults: Mapping[str, Any] | None = None,
    names: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> list[Flag]:
    """The flags of `EngineConfig`: its parts' fields, then its own.

    Args:
      only: fields to take; None takes all.
    """
    return [flag for flag in _engine_flags(defaults, names) if only is None or flag.name in only]


def _engine_flags(defaults: Mapping[str, Any] | None, names: Mapping[str, str] | None) -> Iterator[Flag]:
    for kind in get_type_hints(EngineConfig).values():
        if is_dataclass(kind):
            yield from flags_of(kind, defaults, names)  # pyright: ignore[reportArgumentType] - is_dataclass is true of instances too
    yield from flags_of(EngineConfig, defaults, names)


def parse_flags(
    prog: str,
    description: str,
    flags: Sequence[Flag],
    groups: Sequence[Group] = (),
    arguments: Sequence[str] | None = None,
    unexpected: str = "give every value after its flag",
) -> tuple[dict[str, Any], ...]:
    """Parses `arguments` (None: the process's own).

    Args:
      unexpected: what to do about an argument that belongs to no flag.

    Returns:
      values by field name, of `flags`, then of each group.

    Raises:
      SystemExit: with code 0 after --help, 2 after a usage error, which has been explained on the standard error.
    """
    nested = [(group, tyro.conf.OmitArgPrefixes[_flag_class(group.title, group.text, group.flags)]) for group in groups]
    kind = _flag_class("Flags", description, flags, [(group.name, made) for group, made in nested])
    parsed, unknown = tyro.cli(kind, prog=prog, description=description, args=arguments, return_unknown_args=True)
    if unknown:
        names = [flag.flag_name for some in (flags, *(group.flags for group in groups)) for flag in some]
        usage_error(prog, _unknown(unknown, names, unexpected))
    return _values(flags, parsed), *(_values(group.flags, getattr(parsed, group.name)) for group in groups)


def usage_error(prog: str, message: str) -> NoReturn:
    """Says what is wrong with the command line, and leaves with exit code 2."""
    print(f"error: {message} (see {prog} --help)", file=sys.stderr)
    raise SystemExit(2)


def _flag_class(name: str, text: str, flags: Sequence[Flag], groups: Sequence[tuple[str, Any]] = ()) -> Any:
    """A dataclass for tyro: a field per flag, and a field per group of flags."""
    assert all(flag.default is not MISSING for flag in flags), "every option has a default"
    members = [(flag.flag_name, _tyro_type(flag), _tyro_default(flag)) for flag in flags]
    nested = [(group, kind, field(default_factory=get_args(kind)[0])) for group, kind in groups]
    made = make_dataclass(name, [*members, *nested], kw_only=True)
    made.__doc__ = text
    return made


def _tyro_type(flag: Flag) -> Any:
    """The flag's type with its help; a list is given by repeating the flag, so that it swallows nothing after it."""
    shape = tyro.conf.arg(help=flag.text, aliases=ALIASES.get(flag.name, ()))
    if flag.metavar is not None:
        shape = tyro.conf.arg(help=flag.text, metavar=flag.metavar, help_behavior_hint="")
        return tyro.conf.Positional[Annotated[flag.type, shape]]
    if (several := _several(flag.type)) is not None:
        return tyro.conf.UseAppendAction[Annotated[several, shape]]
    return Annotated[flag.type, shape]


def _tyro_default(flag: Flag) -> Any:
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


def _values(flags: Sequence[Flag], parsed: Any) -> dict[str, Any]:
    """Field name to value; a list flag that was never given has its field's own default."""
    values = {flag.name: getattr(parsed, flag.flag_name) for flag in flags}
    return {
        flag.name: flag.default if values[flag.name] in ((), {}) and _several(flag.type) else values[flag.name]
        for flag in flags
    }


def _unknown(arguments: Sequence[str], names: Sequence[str], unexpected: str) -> str:
    """What is wrong with arguments that no flag took."""
    first = next((a for a in arguments if a.startswith("--")), arguments[0])
    if not first.startswith("-"):
        return f"unexpected argument {first!r}; {unexpected}"
    known = ["--" + name.replace("_", "-") for name in names]
    given = first.partition("=")[0].replace("_", "-").replace("--no-", "--", 1)
    near = [name for name in known if name.startswith(given)] or difflib.get_close_matches(given, known, 1)
    return f"unknown flag {first.partition('=')[0]}" + (f"; did you mean {near[0]}?" if near else "")
