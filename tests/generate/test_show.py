"""What answers look like on the two streams."""

import io
import json

import pytest

from jaxinfer.generate.show import Screen, headline, metrics_line, summary_line
from jaxinfer.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput

METRICS = RequestMetrics(
    arrival_time=10.0,
    first_scheduled_time=10.5,
    first_token_time=11.0,
    last_token_time=12.5,
    finished_time=13.0,
    prompt_tokens=4,
    output_tokens=6,
)


def output(*texts, reason="stop"):
    answers = [
        CompletionOutput(index=i, text=t, token_ids=[1], finish_reason=reason, metrics=METRICS)
        for i, t in enumerate(texts)
    ]
    return RequestOutput(request_id="0", prompt="p", prompt_token_ids=[7], outputs=answers, finished=True)


@pytest.fixture
def screen():
    out, err = io.StringIO(), io.StringIO()
    return Screen(out, err), out, err


def test_a_stream_shows_each_piece_once_then_the_metrics(screen):
    screen, out, err = screen
    screen.stream(iter([output("He"), output("Hello"), output("Hello [b]there")]))
    assert out.getvalue() == "Hello [b]there\n"
    assert err.getvalue() == metrics_line(output("").outputs[0]) + "\n"


def test_a_stream_that_breaks_still_ends_its_line(screen):
    def broken():
        yield output("half")
        raise KeyboardInterrupt

    screen, out, _ = screen
    with pytest.raises(KeyboardInterrupt):
        screen.stream(broken())
    assert out.getvalue() == "half\n"


def test_each_piece_is_flushed():
    class Recorder(io.StringIO):
        def flush(self):
            seen.append(self.getvalue())

    seen = []
    Screen(Recorder(), io.StringIO()).stream(iter([output("a"), output("ab")]))
    assert seen == ["a", "ab", "ab\n"]


def test_a_single_answer_has_no_header_and_several_have(screen):
    screen, out, err = screen
    screen.answers(["p"], [output("one\n")])
    assert out.getvalue() == "one\n"
    out.seek(0)
    screen.answers(["p", [{"role": "user", "content": "q"}]], [output("one", "two"), output("three")])
    assert out.getvalue() == "=== 1/2, answer 1/2: p\none\n=== 1/2, answer 2/2: p\ntwo\n=== 2/2: q\nthree\n"
    assert err.getvalue().endswith("2 prompts | output 18 tokens | 3.0 s | 6.0 tokens/s\n")


def test_json_is_one_object_per_prompt_with_logprobs(screen):
    screen, out, err = screen
    answered = output("é")
    answered.outputs[0].logprobs = [{5: Logprob(-0.5, 1, "é")}]
    answered.prompt_logprobs = [None, {7: Logprob(-1.5, 2, "p")}]
    screen.json_lines([answered, output("b")])
    first, second = [json.loads(line) for line in out.getvalue().splitlines()]
    assert first == answered.to_dict()
    assert first["outputs"][0]["text"] == "é"
    assert first["outputs"][0]["logprobs"] == [{"5": {"logprob": -0.5, "rank": 1, "decoded_token": "é"}}]
    assert first["prompt_logprobs"] == [None, {"7": {"logprob": -1.5, "rank": 2, "decoded_token": "p"}}]
    assert second["outputs"][0]["logprobs"] is None
    assert err.getvalue() == ""


def test_metrics_line_says_what_is_known():
    line = "prompt 4 tokens | output 6 tokens | first token 1000 ms | 3.0 tokens/s | finished: stop"
    assert metrics_line(output("").outputs[0]) == line
    bare = CompletionOutput(index=0, finish_reason="stop", stop_reason="###")
    bare.metrics.cached_tokens = 3
    assert metrics_line(bare) == "prompt 0 tokens (3 cached) | output 0 tokens | finished: stop ('###')"


def test_summary_counts_one_prompt_as_one():
    assert summary_line([output("a", "b")]).startswith("1 prompt |")


@pytest.mark.parametrize(
    ("prompt", "line"),
    [
        ("a\n b", "a b"),
        ("word " * 30, "word " * 13 + "wor ..."),
        ("字" * 100, "字" * 68 + " ..."),
        ("x" * 72, "x" * 72),
        ([{"content": None}], ""),
        ([{"content": "a"}, {"content": "b"}], "b"),
    ],
)
def test_headline_is_one_short_line(prompt, line):
    assert headline(prompt) == line
