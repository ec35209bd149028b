"""The command as a whole: with a model that is not one, then as a process, then with the built-in model."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from checkpoints.builtin import find_builtin
from jaxinfer.config import EngineConfig, cache_folder
from jaxinfer.engine import llm as llm_module
from jaxinfer.errors import PromptTooLong
from jaxinfer.generate import __main__ as command
from jaxinfer.request import CompletionOutput, RequestOutput, SamplingParams

REPO = Path(__file__).resolve().parents[2]
START_S = 1200  # with nothing compiled yet, on a busy machine
HEEDS_CTRL_C = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("jaxinfer.generate", run_name="__main__", alter_sys=True)
"""


class EchoLLM:
    """Answers with the prompt itself. Keeps what it was made with and asked for."""

    def __init__(self, *, use_tqdm, **options):
        EngineConfig.from_flat(**options)
        self.options = options
        MADE.append(self)
        self.calls = []

    def _answer(self, prompt, params):
        text = prompt if isinstance(prompt, str) else " | ".join(f"{m['role']}: {m['content']}" for m in prompt)
        outputs = [CompletionOutput(index=i, text=text, finish_reason="stop") for i in range(params.n)]
        return RequestOutput(request_id="0", prompt=text, prompt_token_ids=[1], outputs=outputs, finished=True)

    def generate(self, prompts, params, *, use_tqdm):
        self.calls.append(("generate", len(prompts), params))
        return [self._answer(p, params) for p in prompts]

    def chat(self, chats, params, *, use_tqdm):
        self.calls.append(("chat", len(chats), params))
        return [self._answer(c, params) for c in chats]

    def stream(self, prompt, params):
        self.calls.append(("stream", 1, params))
        whole = self._answer(prompt, params)
        for end in range(1, len(whole.outputs[0].text) + 1):
            part = self._answer(prompt, params)
            part.outputs[0].text = part.outputs[0].text[:end]
            yield part

    stream_chat = stream


MADE: list[EchoLLM] = []


@pytest.fixture(autouse=True)
def echo(monkeypatch):
    MADE.clear()
    monkeypatch.setattr(llm_module, "LLM", EchoLLM)


def test_one_prompt_is_streamed_with_the_commands_defaults(capsys):
    assert command.main(["hello", "--seed", "3"]) == 0
    said = capsys.readouterr()
    assert said.out == "hello\n"
    assert "finished: stop" in said.err
    ((how, _, params),) = MADE[0].calls
    assert how == "stream"
    assert params == SamplingParams(temperature=0.0, max_tokens=128, seed=3)


def test_a_chat_has_its_system_message(capsys):
    assert command.main(["hello", "--chat", "--system", "be kind"]) == 0
    assert capsys.readouterr().out == "system: be kind | user: hello\n"


@pytest.mark.parametrize(("extra", "how"), [([], "stream"), (["--no-stream"], "generate"), (["--n", "2"], "generate")])
def test_a_single_answer_alone_is_streamed(extra, how, capsys):
    assert command.main(["hello", *extra]) == 0
    assert [call[0] for call in MADE[0].calls] == [how]


def test_several_prompts_run_as_one_batch_in_their_order(capsys):
    assert command.main(["a", "b", "c"]) == 0
    assert [call[:2] for call in MADE[0].calls] == [("generate", 3)]
    assert capsys.readouterr().out == "=== 1/3: a\na\n=== 2/3: b\nb\n=== 3/3: c\nc\n"


def test_texts_and_chats_in_one_file_keep_their_order(tmp_path, capsys):
    lines = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"prompt": "c"}]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert command.main(["--file", str(path), "--json"]) == 0
    answered = [json.loads(line)["outputs"][0]["text"] for line in capsys.readouterr().out.splitlines()]
    assert answered == ["a", "user: b", "c"]


def test_json_is_all_there_is_on_the_standard_output(capsys):
    assert command.main(["a", "--json", "--logprobs", "1", "--no-detokenize"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["finished"]
    assert said.err == ""


@pytest.mark.parametrize(
    ("num_prompts", "flags", "slots"),
    [
        (1, "", 1),
        (2, "--n 3", 6),
        (7, "--n 16", 32),
        (1, "--max-num-seqs 7", 7),
        (3, "--max-num-batched-tokens 2", 2),
    ],
)
def test_slots_are_no_more_than_needed(num_prompts, flags, slots, capsys):
    assert command.main(["a"] * num_prompts + flags.split()) == 0
    assert MADE[0].options["max_num_seqs"] == slots


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (["a", "--temperature", "-1"], "temperature is -1.0"),
        (["a", "--page-size", "7"], "page_size is 7"),
        (["a", "--eviction-policy", "lruu"], "did you mean 'lru'?"),
        (["", "--chat"], "the prompt is empty"),
        (["--file", "no-such-file.txt"], "no-such-file.txt: No such file"),
    ],
)
def test_an_error_is_one_line_and_found_before_a_model_is_made(line, reason, capsys):
    assert command.main(line) == 1
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert reason in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert not MADE


@pytest.mark.parametrize("extra", [["--logprobs", "1"], ["--prompt-logprobs", "1"], ["--no-detokenize"]])
def test_what_text_cannot_show_needs_json(extra, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["a", *extra])
    assert f"{extra[0]} shows in JSON alone; add --json" in capsys.readouterr().err


def test_an_error_of_the_engine_is_one_line(monkeypatch, capsys):
    def refuse(self, prompt, params):
        raise PromptTooLong("prompt has 9 tokens; 8 are allowed")

    monkeypatch.setattr(EchoLLM, "stream", refuse)
    assert command.main(["a"]) == 1
    assert capsys.readouterr().err == "error: prompt has 9 tokens; 8 are allowed\n"


def test_ctrl_c_aborts_and_the_handler_is_put_back(monkeypatch, capsys):
    def interrupted(self, prompt, params):
        yield self._answer("half", params)
        signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(EchoLLM, "stream", interrupted)
    assert command.main(["a"]) == 130
    said = capsys.readouterr()
    assert said.out == "half\n"
    assert said.err.endswith("\ninterrupted\n")
    assert signal.getsignal(signal.SIGINT) is before


def run(*arguments, **options):
    line = [sys.executable, "-m", "jaxinfer.generate", *arguments]
    return subprocess.run(line, cwd=REPO, capture_output=True, text=True, timeout=START_S, check=False, **options)


def test_help_is_quick():
    begin = time.monotonic()
    done = run("--help")
    assert done.returncode == 0
    assert "--temperature" in done.stdout
    assert time.monotonic() - begin < 10, "about 0.3 s on a quiet machine; importing jax alone takes 2 s"


def test_a_wrong_flag_has_no_traceback():
    done = run("hi", "--temprature", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: unknown flag --temprature; did you mean --temperature? (see python -m jaxinfer.generate --help)\n"
    )


@pytest.mark.slow
def test_a_model_that_cannot_be_read_is_one_line(tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(4))
    for path, reason in ((damaged, "damaged.gguf"), (tmp_path / "none.gguf", "no such file")):
        done = run("hi", "--model", str(path))
        assert (done.returncode, done.stdout) == (1, "")
        assert reason in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.fixture
def weights():
    if find_builtin(cache_folder()) is None:
        pytest.skip("the built-in model is not in the cache folder; run `make setup`")


@pytest.mark.slow
@pytest.mark.weights
def test_the_built_in_model_answers(weights):
    done = run("The capital of France is", "--max-tokens", "4")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert done.stderr.startswith("prompt 5 tokens | output 4 tokens | first token ")
    assert done.stderr.endswith("finished: length\n")


@contextlib.contextmanager
def answering(max_tokens):
    """The command as a process that has begun to answer.

    It heeds Ctrl-C, which the children of a shell's background job ignore.
    """
    line = [sys.executable, "-c", HEEDS_CTRL_C, "Once upon a time", "--ignore-eos", "--max-tokens", str(max_tokens)]
    with subprocess.Popen(line, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            os.read(process.stdout.fileno(), 1)
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.weights
def test_a_reader_that_goes_away_is_no_traceback(weights):
    with answering(max_tokens=200) as process:
        process.stdout.close()
        assert process.wait(START_S) == 141
        assert process.stderr.read() == b""


@pytest.mark.slow
@pytest.mark.weights
def test_ctrl_c_ends_a_long_answer(weights):
    with answering(max_tokens=4000) as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=START_S)
        assert process.returncode == 130
        assert said == b"\ninterrupted\n"
