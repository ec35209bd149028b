"""`python -m jaxinfer.generate`: answers prompts at the command line.

Exit code 0 when every prompt was answered, 1 after an error that names its cause, 2 for a wrong command line, 130 after
Ctrl-C, 141 when the reader of the standard output went away.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.errors import JaxInferError
from jaxinfer.generate.flags import Command, Options, parse, usage_error
from jaxinfer.generate.prompts import Messages, Prompt, read_prompts
from jaxinfer.generate.show import Screen
from jaxinfer.request import RequestOutput, SamplingParams

MAX_SLOTS = 32  # of the slots taken when --max-num-seqs is not given; more prompts than that wait for one
ERROR, INTERRUPTED, BROKEN_PIPE = 1, 130, 141
# What a person asks for and plain text cannot show.
ONLY_IN_JSON = (("logprobs", None), ("prompt_logprobs", None), ("detokenize", True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Parses `arguments` (None: the process's own), answers, and returns the exit code."""
    try:
        answer(parse(arguments))
        return 0
    except JaxInferError as why:
        print(f"error: {why}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer has no reader; without this, Python's own flush at exit would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def answer(options: Options) -> None:
    """Does what the command line says. Whatever can be wrong without a model is found before one is loaded.

    Raises:
      JaxInferError: a prompt, a parameter, an option or the model is wrong.
    """
    command = options.command
    for name, default in ONLY_IN_JSON:
        if options.sampling[name] != default and not command.json:
            flag = name.replace("_", "-")
            usage_error(f"--{'no-' * (default is True)}{flag} shows in JSON alone; add --json")
    prompts = read_prompts(command, sys.stdin)
    params = SamplingParams(**options.sampling)
    engine = engine_options(options.engine, len(prompts) * params.n)
    EngineConfig.from_flat(**engine)

    screen = Screen(sys.stdout, sys.stderr)
    with interrupts_call(leave_at_once):
        # After parsing and checking: this imports jax.
        from jaxinfer.engine.llm import LLM

        llm = LLM(**engine, use_tqdm=screen.is_terminal)
    with interrupts_call(raise_once):
        show_answers(llm, prompts, params, command, screen)


def show_answers(llm: Any, prompts: Sequence[Prompt], params: SamplingParams, command: Command, screen: Screen) -> None:
    """Runs a loaded model and shows what it says: one prompt as a stream, several as a batch."""
    if len(prompts) == 1 and params.n == 1 and command.stream and not command.json:
        (prompt,) = prompts
        screen.stream(llm.stream(prompt, params) if isinstance(prompt, str) else llm.stream_chat(prompt, params))
        return
    outputs = run_batch(llm, prompts, params, use_tqdm=screen.is_terminal and len(prompts) > 1)
    if command.json:
        screen.json_lines(outputs)
    else:
        screen.answers(prompts, outputs)


def engine_options(options: dict[str, Any], num_sequences: int) -> dict[str, Any]:
    """The engine's options, with no more slots than there are sequences, so that little is compiled."""
    if options["max_num_seqs"] is not None:
        return options
    slots = min(num_sequences, MAX_SLOTS)
    if options["max_num_batched_tokens"] is not None:
        slots = min(slots, options["max_num_batched_tokens"])
    return {**options, "max_num_seqs": slots}


def run_batch(llm: Any, prompts: Sequence[Prompt], params: SamplingParams, use_tqdm: bool) -> list[RequestOutput]:
    """Answers prompts in their order: all texts as one batch, all chats as another."""
    texts: list[str] = [p for p in prompts if isinstance(p, str)]
    chats: list[Messages] = [p for p in prompts if not isinstance(p, str)]
    answered = {
        str: iter(llm.generate(texts, params, use_tqdm=use_tqdm) if texts else ()),
        list: iter(llm.chat(chats, params, use_tqdm=use_tqdm) if chats else ()),
    }
    return [next(answered[type(p)]) for p in prompts]


@contextlib.contextmanager
def interrupts_call(handler: Callable[..., None]) -> Iterator[None]:
    """Within it Ctrl-C calls `handler`, unless whoever started the command had it ignored."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave_at_once(*_: Any) -> None:
    """Ends the process. While a model is made there is nothing to put in order, and threads that compile take minutes.

    An exception would not do: jax imports and collects garbage in callbacks that swallow it.
    """
    os.write(sys.stderr.fileno(), b"\ninterrupted\n")
    os._exit(INTERRUPTED)


def raise_once(*_: Any) -> None:
    """The first Ctrl-C aborts the requests; a second one, when that takes too long, ends the process."""
    signal.signal(signal.SIGINT, leave_at_once)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
