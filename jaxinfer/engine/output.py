"""From token events to answers: text, stop strings, log probabilities and times of every request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxinfer.request import CompletionOutput, Logprob, Request, RequestOutput
from jaxinfer.schedule.step_plan import TokenEvent, TokenLogprobs
from jaxinfer.text import OutputText, Tokenizer

LOGPROB_FLOOR = -9999.0  # JSON has no -inf


@dataclass
class _Answer:
    """One sequence's answer and the text machine that makes it; `text` is None when detokenize is off."""

    output: CompletionOutput
    text: OutputText | None


class _Tracked:
    """A request, its answers by sequence id, and its output record."""

    def __init__(self, request: Request, prompt: str | None, seq_ids: Sequence[int], tokenizer: Tokenizer):
        params = request.params
        self.request = request
        self.answers: dict[int, _Answer] = {}
        for index, seq_id in enumerate(seq_ids):
            output = CompletionOutput(index=index)
            output.metrics.arrival_time = request.arrival_time
            output.metrics.prompt_tokens = len(request.prompt_token_ids)
            if params.logprobs is not None:
                output.logprobs, output.cumulative_logprob = [], 0.0
            self.answers[seq_id] = _Answer(output, OutputText(tokenizer, params) if params.detokenize else None)
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[a.output for a in self.answers.values()],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
        )


class OutputBoard:
    """Every live request's answers. Owned by the engine's loop.

    Attributes:
      num_prompt_tokens, num_output_tokens: of finished and live answers together.
    """

    def __init__(self, tokenizer: Tokenizer, finish: Callable[[int, str, int], None]):
        """Takes `finish(seq_id, reason, num_output_tokens)`, called when a stop string ends an answer."""
        self._tokenizer = tokenizer
        self._finish = finish
        self._tracked: dict[str, _Tracked] = {}
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0

    def add(self, request: Request, prompt: str | None, seq_ids: Sequence[int]) -> None:
        """Starts to follow a request."""
        self._tracked[request.request_id] = _Tracked(request, prompt, seq_ids, self._tokenizer)
        self.num_prompt_tokens += len(request.prompt_token_ids)

    def seq_ids(self, request_id: str) -> list[int]:
        """Sequences of a live request that have not ended; empty for an unknown one."""
        tracked = self._tracked.get(request_id)
        return [] if tracked is None else [s for s, a in tracked.answers.items() if a.output.finish_reason is None]

    def live_request_ids(self) -> list[str]:
        """Requests that have not finished, oldest first."""
        return list(self._tracked)

    def apply(self, events: Sequence[TokenEvent], now: float) -> list[RequestOutput]:
        """Takes news; returns the outputs that changed, each once, in order of first change. They are live records."""
        changed: dict[str, RequestOutput] = {}
        for event in events:
            tracked = self._tracked.get(event.request_id)
            if tracked is None or tracked.answers[event.seq_id].output.finish_reason is not None:
                continue
            self._apply_one(tracked, tracked.answers[event.seq_id], event, now)
            changed[event.request_id] = tracked.output
        for request_id, output in changed.items():
            if all(o.finish_reason is not None for o in output.outputs):
                output.finished = True
                del self._tracked[request_id]
        return list(changed.values())

    def abort(self, request_id: str, reason: str, now: float) -> RequestOutput | None:
        """Ends what is left of a request; its text so far stays."""
        tracked = self._tracked.pop(request_id, None)
        if tracked is None:
            return None
        for answer in tracked.answers.values():
            if answer.output.finish_reason is None:
                self._end(answer, reason, None, now)
        tracked.output.finished = True
        return tracked.output

    def _apply_one(self, tracked: _Tracked, answer: _Answer, event: TokenEvent, now: float) -> None:
        output, params = answer.output, tracked.request.params
        metrics = output.metrics
        metrics.first_scheduled_time = event.first_scheduled_time
        metrics.cached_tokens = event.cached_tokens
        metrics.num_preemptions = event.num_preemptions
        if event.prompt_logprobs and event.index == 0:
            self._add_prompt_logprobs(tracked, event.prompt_logprobs)
        ids = list(event.token_ids)
        ended_by = ids[-1] if event.finish_reason == "stop" and ids else None
        stop_string = None
        if answer.text is not None and ids:
            delta = answer.text.push(ids[:-1] if ended_by is not None else ids)
            stop_string = delta.stop_string
            if stop_string is not None:
                ids, ended_by = ids[: delta.num_tokens_kept], None
        if ids:
            if metrics.first_token_time is None:
                metrics.first_token_time = now
            metrics.last_token_time = now
            output.token_ids.extend(ids)
            metrics.output_tokens = len(output.token_ids)
            self.num_output_tokens += len(ids)
        if output.logprobs is not None:
            for token_id, words in zip(ids, event.logprobs, strict=False):
                output.logprobs.append(self._logprobs(token_id, words, params.detokenize))
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + max(words.logprob, LOGPROB_FLOOR)
        if stop_string is not None:
            output.stop_reason = stop_string
            self._finish(event.seq_id, "stop", len(output.token_ids))
            self._end(answer, "stop", None, now)
        elif event.finish_reason is not None:
            output.stop_reason = event.stop_token_id
            self._end(answer, event.finish_reason, ended_by, now)
        elif answer.text is not None:
            output.text = answer.text.text

    def _end(self, answer: _Answer, reason: str, last_token_id: int | None, now: float) -> None:
        output = answer.output
        if answer.text is not None:
            if not answer.text.is_finished:
                delta = answer.text.finish(last_token_id)
                if delta.stop_string is not None and reason != "error":
                    output.stop_reason, reason = delta.stop_string, "stop"
            output.text = answer.text.text
        output.finish_reason = reason
        output.metrics.finished_time = now

    def _add_prompt_logprobs(self, tracked: _Tracked, found: Sequence[TokenLogprobs]) -> None:
        known = tracked.output.prompt_logprobs
        assert known is not None
        for words in found:
            token_id = tracked.request.prompt_token_ids[len(known)]
            known.append(self._logprobs(token_id, words, tracked.request.params.detokenize))

    def _logprobs(self, token_id: int, words: TokenLogprobs, with_text: bool) -> dict[int, Logprob]:
        """The token itself first, then the likeliest ones, best first."""

        def text(i: int) -> str | None:
            return self._tokenizer.token_text(i) if with_text else None

        found = {token_id: Logprob(max(words.logprob, LOGPROB_FLOOR), words.rank, text(token_id))}
        for rank, (i, logprob) in enumerate(zip(words.top_ids, words.top_logprobs, strict=True), start=1):
            if i != token_id:
                found[i] = Logprob(max(logprob, LOGPROB_FLOOR), rank, text(i))
        return found
