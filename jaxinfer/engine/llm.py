"""`LLM`: the offline interface, as vLLM's users know it."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm.auto import tqdm

from jaxinfer.config import EngineConfig
from jaxinfer.engine.load import LoadedEngine, engine_seed, load_engine
from jaxinfer.engine.metrics import engine_metrics
from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.request import Request, RequestOutput, SamplingParams
from jaxinfer.sampling import check_against_vocabulary

Prompt = str | Mapping[str, Any] | Sequence[int]

_ALIASES = {"gpu_memory_utilization": "memory_utilization"}
_LATER = {
    "draft": None,
    "num_draft_tokens": 4,
    "quantization": None,
}


class LLM:
    """A model ready to generate. Construction loads it and compiles every program.

    Args:
      model: `builtin`, or the path of a GGUF file.
      **options: fields of `EngineConfig`'s parts by name: tokenizer, dtype, kv_cache_dtype, memory_utilization (or
        gpu_memory_utilization), max_model_len, max_num_seqs, max_num_batched_tokens, page_size, enable_prefix_caching,
        eviction_policy, tensor_parallel_size, seed, and the others documented there.

    Raises:
      ConfigError: an unknown or impossible option, named.
      CheckpointError: a missing or damaged model.
    """

    def __init__(self, model: str = "builtin", *, use_tqdm: bool = True, **options: Any):
        for alias, name in _ALIASES.items():
            if alias in options:
                options[name] = options.pop(alias)
        for name, default in _LATER.items():
            if options.pop(name, default) != default:
                raise ConfigError(f"{name} is not supported by this version; leave it out")
        config = EngineConfig.from_flat(model=model, **options)
        with _Progress(use_tqdm) as progress:
            self._loaded = load_engine(config, progress)
        self._ids = itertools.count()
        self._unread: dict[str, deque[RequestOutput]] = {}  # by open request: what its iterator has yet to give
        self._random = random.Random(engine_seed(config.seed))

    @property
    def loaded(self) -> LoadedEngine:
        """The engine and what it was made from."""
        return self._loaded

    def get_tokenizer(self):
        """The model's tokenizer."""
        return self._loaded.tokenizer

    def metrics(self) -> dict[str, Any]:
        """Counts and gauges of the engine since start; see docs/metrics.md."""
        return engine_metrics(self._loaded)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers prompts, all at once, in their order.

        Args:
          prompts: one prompt or a list. A prompt is text, `{"prompt": text}`, `{"prompt_token_ids": ids}` (either with
            `cache_salt`), or a list of ids.
          sampling_params: for all, or one per prompt; None means `SamplingParams()`.

        Raises:
          RequestError: a prompt or parameter is wrong. Nothing has been computed then; prompts of the same call that
            were queued before one that is too long count as aborted.
        """
        items = _as_list(prompts)
        params = _per_prompt(sampling_params, len(items))
        return self._run([self._request(p, s) for p, s in zip(items, params, strict=True)], use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, rendered by the model's chat template.

        Raises:
          CheckpointError: the model has no chat template.
          RequestError: a message or parameter is wrong.
        """
        if not _is_list(messages):
            raise RequestError("messages must be a list of messages, or a list of such lists", "messages")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = _per_prompt(sampling_params, len(conversations))
        template = self._loaded.chat_template()
        requests = []
        for conversation, p in zip(conversations, params, strict=True):
            chat = template.render(conversation, add_generation_prompt=add_generation_prompt, tools=tools)
            request, _ = self._request(chat.token_ids, p)
            requests.append((request, chat.text))
        return self._run(requests, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Answers one prompt, giving the same live record each time it has grown."""
        request, text = self._request(prompt, sampling_params or SamplingParams())
        yield from self._drive([(request, text)])

    def stream_chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """`stream` for a conversation."""
        chat = self._loaded.chat_template().render(messages)
        request, _ = self._request(chat.token_ids, sampling_params or SamplingParams())
        yield from self._drive([(request, chat.text)])

    def _request(self, prompt: Prompt, params: SamplingParams) -> tuple[Request, str | None]:
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"sampling_params is a {type(params).__name__}; it must be SamplingParams", "sampling_params"
            )
        tokenizer = self._loaded.tokenizer
        text, ids, salt = _read_prompt(prompt)
        if ids is None:
            assert text is not None
            ids = tokenizer.encode(text)
        vocab_size = self._loaded.arch.vocab_size
        bad = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < vocab_size), None)
        if bad is not None:
            raise RequestError(
                f"prompt_token_ids holds {bad!r}; ids are integers from 0 to {vocab_size - 1}", "prompt_token_ids"
            )
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        if not ids:
            raise RequestError("the prompt is empty; give at least one token", "prompt")
        bad_words = tokenizer.bad_word_ids(params.bad_words) if params.bad_words else ()
        check_against_vocabulary(params, vocab_size, bad_words)
        request = Request(
            request_id=str(next(self._ids)),
            prompt_token_ids=tuple(ids),
            params=params,
            seed=self._random.getrandbits(62) if params.seed is None else params.seed,
            arrival_time=time.monotonic(),
            cache_namespace=salt,
            bad_word_ids=bad_words,
        )
        return request, text

    def _run(self, requests: list[tuple[Request, str | None]], use_tqdm: bool) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        with tqdm(
            total=len(requests), desc="Processed prompts", unit="prompt", disable=not use_tqdm, dynamic_ncols=True
        ) as bar:
            begin, tokens_before = time.monotonic(), self._loaded.engine.num_output_tokens
            for output in self._drive(requests):
                if output.finished:
                    finished[output.request_id] = output
                    rate = (self._loaded.engine.num_output_tokens - tokens_before) / max(time.monotonic() - begin, 1e-9)
                    bar.set_postfix_str(f"output {rate:.1f} tokens/s", refresh=False)
                    bar.update()
        return [finished[request.request_id] for request, _ in requests]

    def _drive(self, requests: list[tuple[Request, str | None]]) -> Iterator[RequestOutput]:
        """Submits requests and turns the loop until they have finished; what is left when abandoned is aborted.

        Several of these may be open at once, one inside another's body too: whichever turns the loop files the outputs
        of all.
        """
        engine = self._loaded.engine
        mine = [request.request_id for request, _ in requests]
        try:
            for request, text in requests:
                engine.submit(request, text)
                self._unread[request.request_id] = deque()
            while any(request_id in self._unread for request_id in mine):
                for output in self._take_unread(mine):
                    if output.finished:
                        self._unread.pop(output.request_id, None)
                    yield output
                if any(request_id in self._unread for request_id in mine):
                    self._turn()
            while engine.has_work() and not self._unread:
                self._turn()
        finally:
            for request_id in mine:
                if self._unread.pop(request_id, None) is not None:
                    engine.abort(request_id)

    def _turn(self) -> None:
        """One step of the engine; its outputs are filed under their requests."""
        for output in self._loaded.engine.step():
            if output.request_id in self._unread:
                self._unread[output.request_id].append(output)

    def _take_unread(self, request_ids: Sequence[str]) -> list[RequestOutput]:
        """The filed outputs of these requests, each request's newest record once."""
        taken = []
        for request_id in request_ids:
            waiting = self._unread.get(request_id)
            if waiting:
                taken.append(waiting[-1])  # live records: the newest says all
                waiting.clear()
        return taken


def _as_list(prompts: Any) -> list[Any]:
    """A list of prompts; a list of ids is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(_PROMPT_FORMS, "prompt")
    items = list(prompts)
    return [items] if items and all(isinstance(i, int) for i in items) else items


_PROMPT_FORMS = "a prompt is text, a mapping with prompt or prompt_token_ids, or a list of token ids"


def _is_list(value: Any) -> bool:
    """A sequence of items: neither text nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _read_prompt(prompt: Any) -> tuple[str | None, list[int] | None, str]:
    """(text, ids, cache salt) of a prompt in any of its forms."""
    if isinstance(prompt, str):
        return prompt, None, ""
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}
        if unknown:
            raise RequestError(
                f"a prompt may have prompt, prompt_token_ids and cache_salt; not {sorted(unknown)[0]!r}", "prompt"
            )
        text, salt = prompt.get("prompt"), prompt.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise RequestError(f"cache_salt is {salt!r}; it must be text", "cache_salt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt is a {type(text).__name__}; it must be text", "prompt")
        if "prompt_token_ids" in prompt:
            if not _is_list(prompt["prompt_token_ids"]):
                raise RequestError("prompt_token_ids must be a list of token ids", "prompt_token_ids")
            return text, list(prompt["prompt_token_ids"]), salt or ""
        if text is not None:
            return text, None, salt or ""
    elif _is_list(prompt):
        return None, list(prompt), ""
    raise RequestError(_PROMPT_FORMS, "prompt")


def _per_prompt(params: Any, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    if not _is_list(params):
        kind = type(params).__name__
        raise RequestError(
            f"sampling_params is a {kind}; it must be SamplingParams or a list of them", "sampling_params"
        )
    items = list(params)
    if len(items) != count:
        raise RequestError(
            f"{len(items)} sampling_params for {count} prompts; give one, or one per prompt", "sampling_params"
        )
    return items


class _Progress:
    """A bar per part of the start, on the terminal."""

    def __init__(self, is_on: bool):
        self._is_on = is_on
        self._bar: Any = None
        self._what = ""

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        if what != self._what:
            self.__exit__()
            # disable=None: silent when standard error is not a terminal.
            self._bar = tqdm(
                total=total,
                desc=what.capitalize(),
                leave=False,
                dynamic_ncols=True,
                disable=None if self._is_on else True,
            )
            self._what = what
        self._bar.update(done - self._bar.n)
