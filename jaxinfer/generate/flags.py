"""Command line of `python -m jaxinfer.generate`: the fields of three dataclasses, one flag each.

    Command, SamplingParams, EngineConfig and its parts ─► jaxinfer.flags ─► Options

No jax import, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jaxinfer import flags
from jaxinfer.flags import Group, engine_flags, flags_of, parse_flags
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
    groups = [
        Group("sampling", "Sampling", "How tokens are chosen.", flags_of(SamplingParams, DEFAULTS)),
        Group("engine", "Engine", "The model and how it runs.", engine_flags(ENGINE_DEFAULTS, ENGINE_FLAG_NAMES)),
    ]
    own = flags_of(Command, positional={"prompts": "[PROMPT ...]"})
    together = "give all prompts together, before or after the flags"
    command, sampling, engine = parse_flags(PROG, DESCRIPTION, own, groups, arguments, together)
    return Options(Command(**command), sampling, engine)


def usage_error(message: str) -> NoReturn:
    """Says what is wrong with the command line, and leaves with exit code 2."""
    flags.usage_error(PROG, message)
