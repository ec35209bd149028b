"""What a user asks for and what comes back: sampling parameters, requests, outputs and their metrics.

Standard library only. Every field of `SamplingParams` is applied by the engine or refused here by name; none is
ignored. Limits are those that bound the arrays of the compiled programs.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from jaxinfer.errors import RequestError, UnsupportedParam

MAX_CHOICES = 16  # n
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 64  # token sequences, after each word is spelt with and without a leading space
MAX_BAD_WORD_TOKENS = 8
MAX_SEED = 2**63 - 1
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen. Names and meanings are vLLM's.

    Attributes:
      n: answers per prompt, in [1, 16]; they share the prompt's pages.
      temperature: >= 0; 0 takes the most likely token.
      top_p: nucleus, in (0, 1].
      top_k: keep the k most likely tokens; 0 and -1 switch it off, as does k >= the vocabulary.
      min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
      presence_penalty, frequency_penalty: in [-2, 2], over output tokens.
      repetition_penalty: > 0, over prompt and output tokens.
      stop: strings that end the answer.
      stop_token_ids: ids that end the answer.
      include_stop_str_in_output: keep the text of what ended the answer.
      ignore_eos: go on past the end-of-sequence token.
      max_tokens: most output tokens; None means as many as fit.
      min_tokens: no end-of-sequence or stop id before this many output tokens.
      logprobs: None, or how many of the likeliest tokens to report at each output position (0: the chosen one alone).
        Values are of the model's own distribution, before temperature, filters and penalties.
      prompt_logprobs: the same for the prompt's positions.
      seed: in [0, 2**63); None draws one. A seeded answer does not depend on the batch it ran in.
      logit_bias: {token id: bias in [-100, 100]}.
      allowed_token_ids: only these ids may be chosen.
      bad_words: words that may not be produced; about 32, for at most 64 token sequences are kept and most words need
        two (spelt with and without a space before).
      skip_special_tokens: leave control tokens out of the text.
      spaces_between_special_tokens: put a space between neighbouring control tokens in the text.
      detokenize: give text as well as ids.
      truncate_prompt_tokens: keep only this many of the prompt's last tokens.
      priority: smaller is served earlier.
      deadline_s: seconds from arrival after which the request ends with finish reason "timeout".
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    deadline_s: float | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        if args:
            raise UnsupportedParam("SamplingParams takes keyword arguments only")
        known = {f.name: f for f in fields(SamplingParams)}
        for name in kwargs:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise UnsupportedParam(f"sampling parameter {name!r} is not supported{hint}", name)
        for name, f in known.items():
            object.__setattr__(self, name, _CONVERT.get(name, _same)(name, kwargs.get(name, f.default)))
        self._check_ranges()

    def _check_ranges(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 1e6)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, -1, INT32_MAX)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 1e6, open_low=True)
        _integer("min_tokens", self.min_tokens, 0, INT32_MAX)
        _integer("priority", self.priority, -INT32_MAX, INT32_MAX)
        for name, low, high in (
            ("max_tokens", 1, INT32_MAX),
            ("logprobs", 0, MAX_LOGPROBS),
            ("prompt_logprobs", 0, MAX_LOGPROBS),
            ("seed", 0, MAX_SEED),
            ("truncate_prompt_tokens", 1, INT32_MAX),
        ):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low, high)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it may not exceed max_tokens ({self.max_tokens})", "min_tokens"
            )
        if self.deadline_s is not None:
            _number("deadline_s", self.deadline_s, 0.0, math.inf, open_low=True)
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} is {getattr(self, name)!r}; it must be true or false", name)
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True: they are found in the text", "stop")


def _same(name: str, value: Any) -> Any:
    return value


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} is {value!r}; it must be an integer", name)
    if not low <= value <= high:
        raise RequestError(f"{name} is {value}; it must be in [{low}, {high}]", name)


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise RequestError(f"{name} is {value!r}; it must be a number", name)
    if value < low or value > high or (open_low and value == low):
        raise RequestError(f"{name} is {value}; it must be in {'(' if open_low else '['}{low}, {high}]", name)


def _strings(name: str, value: Any, max_count: int, max_chars: int, note: str = "") -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else None
    if items is None or not all(isinstance(s, str) for s in items):
        raise RequestError(f"{name} must be a string or a list of strings", name)
    if len(items) > max_count:
        raise RequestError(f"{name} has {len(items)} entries; at most {max_count} are allowed{note}", name)
    if any(not 0 < len(s) <= max_chars for s in items):
        raise RequestError(f"{name}: each string must have 1 to {max_chars} characters", name)
    return items


def _ids(name: str, value: Any, max_count: int) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise RequestError(f"{name} must be a list of token ids", name)
    if len(value) > max_count:
        raise RequestError(f"{name} has {len(value)} entries; at most {max_count} are allowed", name)
    for token_id in value:
        _integer(name, token_id, 0, INT32_MAX)
    return tuple(dict.fromkeys(value))


def _stop(name: str, value: Any) -> tuple[str, ...]:
    return _strings(name, value, MAX_STOP_STRINGS, MAX_STOP_CHARS)


def _bad_words(name: str, value: Any) -> tuple[str, ...]:
    note = f" as token sequences, and most words need two (with and without a space before); give {MAX_BAD_WORDS // 2}"
    return _strings(name, value, MAX_BAD_WORDS, MAX_STOP_CHARS, note)


def _stop_token_ids(name: str, value: Any) -> tuple[int, ...]:
    return () if value is None else _ids(name, value, MAX_STOP_TOKEN_IDS)


def _allowed_token_ids(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if not value:
        raise RequestError("allowed_token_ids is empty; it must name at least one token id", name)
    return _ids(name, value, INT32_MAX)


def _logit_bias(name: str, value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise RequestError("logit_bias must map token ids to numbers", name)
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {len(value)} entries; at most {MAX_LOGIT_BIAS} are allowed", name)
    out: dict[int, float] = {}
    for key, bias in value.items():
        token_id: Any = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
        _integer("logit_bias", token_id, 0, INT32_MAX)
        _number("logit_bias", bias, -100.0, 100.0)
        out[token_id] = float(bias)
    return out


_CONVERT = {
    "stop": _stop,
    "bad_words": _bad_words,
    "stop_token_ids": _stop_token_ids,
    "allowed_token_ids": _allowed_token_ids,
    "logit_bias": _logit_bias,
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and its sampling parameters, checked and tokenized: what the scheduler takes.

    Attributes:
      request_id: unique among live requests.
      prompt_token_ids: never empty; every id is in the vocabulary.
      params: with `max_tokens` still None when the user set no bound.
      seed: in [0, 2**63); of the first choice, the others derive theirs from it.
      arrival_time: seconds on the engine's monotonic clock.
      cache_namespace: sequences share cached prefixes only within one namespace.
      bad_word_ids: `params.bad_words` as token sequences.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    arrival_time: float
    cache_namespace: str = ""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Logprob:
    """One token's log probability at one position.

    Attributes:
      logprob: natural log; floored at -9999.0 so that it is always valid JSON.
      rank: 1 for the likeliest token.
      decoded_token: the token's text, or None when detokenize is off.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class RequestMetrics:
    """Times and counts of one answer. Times are seconds on the engine's monotonic clock unless the name says otherwise.

    Attributes:
      arrival_time: when the request was submitted.
      first_scheduled_time: when its first step was planned, or None.
      first_token_time, last_token_time: when those tokens reached the host, or None.
      finished_time: when it ended, or None.
      prompt_tokens, output_tokens: counts.
      cached_tokens: prompt tokens whose keys and values were read from the prefix cache.
      num_preemptions: how often its pages were taken away.
    """

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    num_preemptions: int = 0

    @property
    def queue_time_s(self) -> float | None:
        """Arrival to first scheduled step."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token_ms(self) -> float | None:
        """Arrival to first token, in milliseconds."""
        return None if self.first_token_time is None else 1e3 * (self.first_token_time - self.arrival_time)

    @property
    def inter_token_latency_ms(self) -> float | None:
        """Mean gap between neighbouring tokens, in milliseconds; None below two tokens."""
        if self.first_token_time is None or self.last_token_time is None or self.output_tokens < 2:
            return None
        return 1e3 * (self.last_token_time - self.first_token_time) / (self.output_tokens - 1)

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens over the time from first scheduled step to last token."""
        if self.first_scheduled_time is None or self.last_token_time is None:
            return None
        return self.output_tokens / max(self.last_token_time - self.first_scheduled_time, 1e-9)

    def to_dict(self) -> dict[str, Any]:
        """All of it under the names of the public record."""
        counts = ("prompt_tokens", "output_tokens", "cached_tokens", "num_preemptions")
        times = ("queue_time_s", "time_to_first_token_ms", "inter_token_latency_ms", "tokens_per_second")
        return {name: getattr(self, name) for name in (*counts, *times)}


@dataclass
class CompletionOutput:
    """One answer.

    Attributes:
      index: in [0, n).
      text: the answer's text; empty when detokenize is off.
      token_ids: ids, the one that ended the answer included.
      logprobs: per output token {token id: Logprob}, or None when not asked for.
      cumulative_logprob: sum of the chosen tokens' logprobs, or None when not asked for.
      finish_reason: None while running, else "stop", "length", "abort", "timeout" or "error".
      stop_reason: the stop string or stop id that ended it, or None (end of sequence, length).
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)


@dataclass
class RequestOutput:
    """A prompt and its answers so far.

    Attributes:
      prompt: its text, or None when it was given as ids.
      prompt_logprobs: per prompt token {token id: Logprob}, None at the first; None when not asked for.
      finished: True when every answer has a finish reason.
      metrics: of the first answer; each answer carries its own.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def metrics(self) -> RequestMetrics:
        return self.outputs[0].metrics

    def to_dict(self) -> dict[str, Any]:
        """A record that `json.dumps` writes as it is."""
        return {
            "request_id": self.request_id,
            "prompt": self.prompt,
            "prompt_token_ids": list(self.prompt_token_ids),
            "prompt_logprobs": _logprob_dicts(self.prompt_logprobs),
            "finished": self.finished,
            "outputs": [
                {
                    "index": o.index,
                    "text": o.text,
                    "token_ids": list(o.token_ids),
                    "logprobs": _logprob_dicts(o.logprobs),
                    "cumulative_logprob": o.cumulative_logprob,
                    "finish_reason": o.finish_reason,
                    "stop_reason": o.stop_reason,
                    "metrics": o.metrics.to_dict(),
                }
                for o in self.outputs
            ],
        }


def _logprob_dicts(positions: Sequence[Mapping[int, Logprob] | None] | None) -> list[dict[str, Any] | None] | None:
    """Each position's tokens in their order; keys are text, since JSON has no others."""
    if positions is None:
        return None
    return [None if at is None else {str(token_id): asdict(p) for token_id, p in at.items()} for at in positions]
