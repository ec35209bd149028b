"""Workloads: which requests a benchmark runs, read from a file or drawn from a fixed seed."""

from __future__ import annotations

import difflib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.errors import ConfigError

SYNTHETIC_SIZE = 16
FIELDS = ("id", "prompt_token_ids", "max_tokens", "ignore_eos")


@dataclass(frozen=True, kw_only=True)
class Work:
    """One request of a workload.

    Attributes:
      id: unique in its workload.
      max_tokens: most output tokens; exactly as many when `ignore_eos`.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False


def read_workload(path: Path) -> list[Work]:
    """Reads and checks a workload file.

    Raises:
      ConfigError: not JSON, or an entry is wrong; names the entry and the field.
    """
    entries = _read_json(path)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path.name}: a workload is a JSON list with at least one request")
    works: list[Work] = []
    seen: set[str] = set()
    for index, entry in enumerate(entries):
        work = _read_entry(f"{path.name}: entry {index}", entry)
        if work.id in seen:
            raise ConfigError(f"{path.name}: entry {index}: id {work.id!r} is used twice; ids must differ")
        seen.add(work.id)
        works.append(work)
    return works


def synthetic_workload(vocab_size: int) -> list[Work]:
    """16 requests of random tokens: prompts of 16 to 256, answers of 16 to 64 tokens, log-uniform, always the same."""
    rng = random.Random(0)

    def log_uniform(low: int, high: int) -> int:
        return round(math.exp(rng.uniform(math.log(low), math.log(high))))

    works = []
    for i in range(SYNTHETIC_SIZE):
        num_prompt, num_output = log_uniform(16, 256), log_uniform(16, 64)
        ids = tuple(rng.randrange(vocab_size) for _ in range(num_prompt))
        works.append(Work(id=f"s{i:02d}", prompt_token_ids=ids, max_tokens=num_output, ignore_eos=True))
    return works


def check_fits(works: Sequence[Work], vocab_size: int, max_model_len: int) -> None:
    """Raises ConfigError when a model cannot run the workload to its full lengths."""
    for work in works:
        bad = next((i for i in work.prompt_token_ids if i >= vocab_size), None)
        if bad is not None:
            raise ConfigError(
                f"workload request {work.id!r}: prompt_token_ids holds {bad}; this model's ids end at {vocab_size - 1}"
            )
        num_tokens = len(work.prompt_token_ids) + work.max_tokens
        if num_tokens > max_model_len:
            raise ConfigError(
                f"workload request {work.id!r} needs {num_tokens} positions; max_model_len is {max_model_len}; raise it"
            )


def read_expected(path: Path) -> dict[str, list[int]]:
    """Reads {id: [token ids]}.

    Raises:
      ConfigError: it is something else.
    """
    expected = _read_json(path)
    if not isinstance(expected, dict):
        raise ConfigError(f"{path.name}: expected ids are a JSON object {{id: [token ids]}}")
    for work_id, ids in expected.items():
        if not isinstance(ids, list) or not all(_is_integer(i, 0) for i in ids):
            raise ConfigError(f"{path.name}: {work_id!r} must be a list of token ids")
    return expected


def _read_entry(where: str, entry: Any) -> Work:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} is a {type(entry).__name__}; it must be an object with {', '.join(FIELDS)}")
    for name in entry:
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; the fields are {', '.join(FIELDS)}"
            raise ConfigError(f"{where}: unknown field {name!r}{hint}")
    for name in FIELDS[:3]:
        if name not in entry:
            raise ConfigError(f"{where}: field {name!r} is missing")
    work_id, ids, max_tokens = (entry[name] for name in FIELDS[:3])
    ignore_eos = entry.get("ignore_eos", False)
    if not isinstance(work_id, str) or not work_id:
        raise ConfigError(f"{where}: id is {work_id!r}; it must be a string that is not empty")
    if not isinstance(ids, list) or not ids:
        raise ConfigError(f"{where}: prompt_token_ids must be a list with at least one token id")
    bad = next((i for i in ids if not _is_integer(i, 0)), None)
    if bad is not None:
        raise ConfigError(f"{where}: prompt_token_ids holds {bad!r}; ids are integers of at least 0")
    if not _is_integer(max_tokens, 1):
        raise ConfigError(f"{where}: max_tokens is {max_tokens!r}; it must be an integer of at least 1")
    if not isinstance(ignore_eos, bool):
        raise ConfigError(f"{where}: ignore_eos is {ignore_eos!r}; it must be true or false")
    return Work(id=work_id, prompt_token_ids=tuple(ids), max_tokens=max_tokens, ignore_eos=ignore_eos)


def _is_integer(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path}: {why}") from why
