"""How answers look: text and JSON on the standard output, what is said about them on the standard error.

The standard output holds answers alone, so that it can be piped; each piece is flushed when it is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.console import Console

from jaxinfer.generate.prompts import Prompt
from jaxinfer.request import CompletionOutput, RequestMetrics, RequestOutput

HEADER_CHARS = 72


class Screen:
    """The two streams.

    Attributes:
      is_terminal: whether a person watches the standard error; progress bars are for them.
    """

    def __init__(self, out: TextIO, err: TextIO):
        self._out = out
        # No highlighting, no markup: answers and paths may hold brackets. `soft_wrap` leaves lines to the terminal.
        self._console = Console(file=err, highlight=False, markup=False, soft_wrap=True)
        self.is_terminal = err.isatty()

    def note(self, text: str) -> None:
        """A dim line on the standard error."""
        self._console.print(text, style="dim")

    def stream(self, outputs: Iterator[RequestOutput]) -> None:
        """One request's first answer while it grows, then its metrics."""
        shown, output = "", None
        try:
            for output in outputs:
                text = output.outputs[0].text
                self._write(text[len(shown) :])
                shown = text
        finally:
            if shown and not shown.endswith("\n"):
                self._write("\n")
        if output is not None:
            self.note(metrics_line(output.outputs[0]))

    def answers(self, prompts: Sequence[Prompt], outputs: Sequence[RequestOutput]) -> None:
        """Finished requests, a header before each answer when there are several."""
        several = sum(len(output.outputs) for output in outputs) > 1
        for number, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), 1):
            for answer in output.outputs:
                if several:
                    choice = f", answer {answer.index + 1}/{len(output.outputs)}" if len(output.outputs) > 1 else ""
                    self._write(f"=== {number}/{len(outputs)}{choice}: {headline(prompt)}\n")
                self._write(answer.text.removesuffix("\n") + "\n")
                self.note(metrics_line(answer))
        if several:
            self.note(summary_line(outputs))

    def json_lines(self, outputs: Sequence[RequestOutput]) -> None:
        """One object per request on the standard output."""
        for output in outputs:
            self._write(json.dumps(output.to_dict(), ensure_ascii=False) + "\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def headline(prompt: Prompt) -> str:
    """A prompt in one short line: its own text, or the last message's."""
    text = prompt if isinstance(prompt, str) else str(prompt[-1].get("content") or "")
    line = " ".join(text.split())
    return line if len(line) <= HEADER_CHARS else line[: HEADER_CHARS - 4].rstrip() + " ..."


def metrics_line(answer: CompletionOutput) -> str:
    """`prompt 14 tokens | output 33 tokens | first token 61 ms | 84.9 tokens/s | finished: stop`."""
    metrics = answer.metrics
    cached = f" ({metrics.cached_tokens} cached)" if metrics.cached_tokens else ""
    parts = [f"prompt {metrics.prompt_tokens} tokens{cached}", f"output {metrics.output_tokens} tokens"]
    if metrics.time_to_first_token_ms is not None:
        parts.append(f"first token {metrics.time_to_first_token_ms:.0f} ms")
    if metrics.tokens_per_second is not None:
        parts.append(f"{metrics.tokens_per_second:.1f} tokens/s")
    reason = f" ({answer.stop_reason!r})" if answer.stop_reason is not None else ""
    return " | ".join([*parts, f"finished: {answer.finish_reason}{reason}"])


def summary_line(outputs: Sequence[RequestOutput]) -> str:
    """All requests together: `3 prompts | output 96 tokens | 1.2 s | 80.0 tokens/s`."""
    metrics: list[RequestMetrics] = [answer.metrics for output in outputs for answer in output.outputs]
    num_tokens = sum(m.output_tokens for m in metrics)
    seconds = max(m.finished_time or m.arrival_time for m in metrics) - min(m.arrival_time for m in metrics)
    rate = f" | {num_tokens / seconds:.1f} tokens/s" if seconds > 0 else ""
    prompts = "1 prompt" if len(outputs) == 1 else f"{len(outputs)} prompts"
    return f"{prompts} | output {num_tokens} tokens | {seconds:.1f} s{rate}"
