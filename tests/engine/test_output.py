"""The output board on hand-made events: what a client sees of each step, and where an answer is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tiny import tiny_request, tiny_tokenizer

from jaxinfer.engine.output import LOGPROB_FLOOR, OutputBoard
from jaxinfer.request import CompletionOutput, RequestOutput, SamplingParams
from jaxinfer.schedule.step_plan import TokenEvent, TokenLogprobs

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_ids[0]
ID_OF_BYTE = {
    TOKENIZER.token_bytes(i): i
    for i in range(TOKENIZER.vocab_size)
    if len(TOKENIZER.token_bytes(i)) == 1 and i not in TOKENIZER.control_ids
}


def spell(text: str | bytes) -> list[int]:
    """One id per byte, so that every border is a token border."""
    data = text.encode() if isinstance(text, str) else text
    return [ID_OF_BYTE[bytes([b])] for b in data]


def words_of(ids: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """Distinct values, so that a shift shows."""
    return tuple(TokenLogprobs(-float(i) / 8, i + 1, (i, i + 1), (-float(i) / 8, -float(i) / 4)) for i in ids)


class Board:
    """An output board with one request, the calls of its `finish`, and a clock that counts events.

    Attributes:
      out: the record it gave out last.
    """

    def __init__(self, prompt: Sequence[int] = (9, 10), **params: Any):
        self.calls: list[tuple[int, str, int]] = []
        self.board = OutputBoard(TOKENIZER, lambda *call: self.calls.append(call))
        self.params = SamplingParams(**({"temperature": 0.0, "max_tokens": 100} | params))
        self.board.add(tiny_request("r", prompt, self.params), "prompt", list(range(self.params.n)))
        self.out: RequestOutput | None = None
        self.now = 0.0

    @property
    def answer(self) -> CompletionOutput:
        assert self.out is not None
        return self.out.outputs[0]

    def push(self, token_ids: Sequence[int] = (), *, seq_id: int = 0, **fields: Any) -> list[RequestOutput]:
        self.now += 1.0
        event = TokenEvent(seq_id=seq_id, request_id="r", index=seq_id, token_ids=tuple(token_ids), **fields)
        outputs = self.board.apply([event], self.now)
        if outputs:
            self.out = outputs[-1]
        return outputs


def test_a_stop_inside_a_step_cuts_text_ids_and_logprobs_at_the_same_token():
    board = Board(stop="lo, w", logprobs=2)
    board.push(spell("hel"), logprobs=words_of(spell("hel")))
    ids = spell("lo, world")
    board.push(ids, logprobs=words_of(ids))
    answer, kept = board.answer, spell("hello, w")
    assert answer.text == "hel"
    assert answer.token_ids == kept
    assert answer.logprobs is not None
    assert [next(iter(d)) for d in answer.logprobs] == kept
    assert [d[i].logprob for d, i in zip(answer.logprobs, kept, strict=True)] == [-i / 8 for i in kept]
    assert answer.cumulative_logprob == pytest.approx(sum(-i / 8 for i in kept))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "lo, w")
    assert board.out is not None
    assert board.out.finished
    assert answer.metrics.output_tokens == len(kept) == board.board.num_output_tokens
    assert board.calls == [(0, "stop", len(kept))]


@pytest.mark.parametrize("step", [1, 2, 3, 5, 9, 30])
@pytest.mark.parametrize("includes", [False, True])
def test_the_cut_does_not_depend_on_how_many_tokens_a_step_brings_r034(step: int, includes: bool):
    """R034: a stop string across token borders, one token at a time or many."""
    board = Board(stop=["beta gamma"], include_stop_str_in_output=includes)
    ids = spell("alpha beta gamma delta")
    for i in range(0, len(ids), step):
        board.push(ids[i : i + step])
    assert board.answer.text == ("alpha beta gamma" if includes else "alpha ")
    assert board.answer.token_ids == spell("alpha beta gamma")
    assert board.calls == [(0, "stop", len(spell("alpha beta gamma")))]


def test_events_after_a_stop_string_change_nothing():
    """The device runs a step ahead: rows of an ended sequence still bring tokens."""
    board = Board(stop="b", n=2)
    board.push(spell("abc"))
    assert board.push(spell("def")) == []
    assert board.push(spell("x"), finish_reason="length") == []
    assert board.answer.token_ids == spell("ab")
    board.push(spell("z"), seq_id=1, finish_reason="length")
    assert board.out is not None
    assert board.out.finished
    assert board.push(spell("more")) == []
    assert board.calls == [(0, "stop", 2)]


def test_no_piece_of_a_stop_string_is_shown_and_only_what_may_become_one_is_held_r024_r026_r028():
    """R024, R026: nothing of the marker, though it comes character by character. R028: 'a,<think>' is shown at once."""
    marker = Board(stop=["<|im_end|>"])
    shown = []
    for i in spell("so it <ends<|im_end|>x"):
        marker.push([i])
        shown.append(marker.answer.text)
    assert shown[-1] == "so it <ends"
    assert all("<|" not in text for text in shown)
    assert shown == sorted(shown, key=len)

    held = Board(stop=["b,c"])
    seen = []
    for i in spell("a,<think>xb,d"):
        held.push([i])
        seen.append(held.answer.text)
    text = "a,<think>x"
    assert seen == [text[: i + 1] for i in range(len(text))] + [text, text, text + "b,d"]


def test_broken_bytes_become_one_replacement_character_each_and_the_last_are_flushed_once_r020():
    """R020: lone continuation byte 0x85 and an unfinished character at the end."""
    for step in (1, 2, 3, 8):
        board = Board()
        ids = spell(b"a\x85b\xe4\xb8\x96\xe4\xb8")
        for i in range(0, len(ids), step):
            last = i + step >= len(ids)
            board.push(ids[i : i + step], finish_reason="length" if last else None)
            if not last:
                assert not board.answer.text.endswith("�") or board.answer.text == "a�"
        assert board.answer.text == "a�b世�" == TOKENIZER.decode(ids)
        json.loads(json.dumps(board.out.to_dict() if board.out else None))


def test_no_half_character_is_shown_and_text_never_shrinks_r016():
    """R016: deltas add up to the decoded whole."""
    text = "A 世界 naïve 🎉!"
    board = Board()
    seen = ""
    for i in spell(text):
        board.push([i])
        assert board.answer.text.startswith(seen)
        assert "�" not in board.answer.text
        seen = board.answer.text
    assert seen == text


@pytest.mark.parametrize("includes", [False, True])
def test_a_stop_id_is_in_the_ids_and_in_the_text_only_when_asked_r030(includes: bool):
    """R030."""
    (the,) = spell("t")
    board = Board(stop_token_ids=[the], include_stop_str_in_output=includes)
    board.push([*spell("a "), the], finish_reason="stop", stop_token_id=the)
    assert board.answer.text == ("a t" if includes else "a ")
    assert board.answer.token_ids == [*spell("a "), the]
    assert (board.answer.finish_reason, board.answer.stop_reason) == ("stop", the)
    assert board.calls == []


@pytest.mark.parametrize(("skips", "text"), [(True, "hi"), (False, "hi<|im_end|>")])
def test_the_end_of_sequence_token_shows_only_with_both_flags(skips: bool, text: str):
    board = Board(skip_special_tokens=skips, include_stop_str_in_output=True)
    board.push([*spell("hi"), EOS], finish_reason="stop")
    assert board.answer.text == text
    assert (board.answer.token_ids, board.answer.stop_reason) == ([*spell("hi"), EOS], None)


def test_a_stop_string_wins_over_an_end_later_in_the_same_step():
    board = Board(stop="b", logprobs=0)
    ids = [*spell("abc"), EOS]
    board.push(ids, logprobs=words_of(ids), finish_reason="stop")
    assert (board.answer.text, board.answer.token_ids, board.answer.stop_reason) == ("a", spell("ab"), "b")
    assert len(board.answer.logprobs or ()) == 2
    assert board.calls == [(0, "stop", 2)]


def test_a_stop_string_finished_by_the_stop_token_itself_is_reported():
    board = Board(stop="bc", stop_token_ids=spell("c"), include_stop_str_in_output=True)
    board.push(spell("abc"), finish_reason="stop", stop_token_id=spell("c")[0])
    assert (board.answer.text, board.answer.finish_reason) == ("abc", "stop")
    assert board.answer.token_ids == spell("abc")


@pytest.mark.parametrize("reason", ["length", "timeout", "error"])
def test_text_held_back_for_a_stop_string_comes_at_the_end(reason: str):
    board = Board(stop="xyz")
    board.push(spell("ab xy"))
    assert board.answer.text == "ab "
    board.push(finish_reason=reason)
    assert (board.answer.text, board.answer.finish_reason) == ("ab xy", reason)


def test_abort_keeps_what_there_is_and_ends_only_what_is_open():
    board = Board(n=2, stop="zz")
    board.push(spell("done"), finish_reason="length")
    board.push(spell("half z"), seq_id=1)
    assert board.board.seq_ids("r") == [1]
    out = board.board.abort("r", "abort", 9.0)
    assert out is not None
    assert [o.finish_reason for o in out.outputs] == ["length", "abort"]
    assert [o.text for o in out.outputs] == ["done", "half z"]
    assert out.finished
    assert board.board.abort("r", "abort", 9.0) is None
    assert board.board.live_request_ids() == []


def test_without_detokenize_there_is_no_text_anywhere():
    board = Board(detokenize=False, logprobs=1)
    ids = spell("abc")
    board.push(ids, logprobs=words_of(ids), finish_reason="length")
    assert (board.answer.text, board.answer.token_ids) == ("", ids)
    assert board.answer.logprobs is not None
    assert all(entry.decoded_token is None for d in board.answer.logprobs for entry in d.values())


def test_logprobs_are_floored_and_the_chosen_token_comes_first_r084():
    """R084: no -inf leaves the engine, so that JSON is valid."""
    board = Board(logprobs=2)
    minus = float("-inf")
    board.push([20], logprobs=(TokenLogprobs(minus, 300, (5, 20), (-0.1, minus)),), finish_reason="length")
    (entry,) = board.answer.logprobs or ()
    assert list(entry) == [20, 5]
    assert (entry[20].logprob, entry[20].rank) == (LOGPROB_FLOOR, 300)
    assert (entry[5].logprob, entry[5].rank) == (-0.1, 1)
    assert board.answer.cumulative_logprob == LOGPROB_FLOOR
    assert json.dumps(entry[20].logprob, allow_nan=False) == "-9999.0"


def test_prompt_logprobs_are_numbered_from_the_second_token_over_several_events():
    board = Board(prompt=[9, 10, 11, 12], prompt_logprobs=1)
    board.push(prompt_logprobs=words_of([10, 11]))
    board.push([20], prompt_logprobs=words_of([12]), finish_reason="length")
    assert board.out is not None
    known = board.out.prompt_logprobs
    assert known is not None
    assert known[0] is None
    assert [next(iter(d)) for d in known[1:] if d] == [10, 11, 12]


def test_times_are_of_the_first_and_the_last_token_and_counts_of_the_event():
    board = Board()
    board.push(spell("a"), first_scheduled_time=0.5, cached_tokens=2, num_preemptions=1)
    board.push(spell("bc"), first_scheduled_time=0.5, cached_tokens=2, num_preemptions=3)
    board.push(finish_reason="timeout", first_scheduled_time=0.5, cached_tokens=2, num_preemptions=3)
    metrics = board.answer.metrics
    assert (metrics.first_scheduled_time, metrics.first_token_time) == (0.5, 1.0)
    assert (metrics.last_token_time, metrics.finished_time) == (2.0, 3.0)
    assert (metrics.cached_tokens, metrics.num_preemptions, metrics.output_tokens) == (2, 3, 3)
    assert metrics.inter_token_latency_ms == pytest.approx(500.0)


def test_the_time_of_the_first_token_stays_at_a_clock_that_begins_at_zero():
    board = Board()
    board.now = -1.0
    board.push(spell("a"))
    board.push(spell("b"))
    assert board.answer.metrics.first_token_time == 0.0


@pytest.mark.parametrize(
    ("skips", "spaces", "text"),
    [
        (True, True, "ab"),
        (False, True, "a<|im_start|> <|im_end|>b"),
        (False, False, "a<|im_start|><|im_end|>b"),
    ],
)
def test_control_tokens_in_the_middle_of_an_answer(skips: bool, spaces: bool, text: str):
    spelt = TOKENIZER.control_spellings
    ids = [*spell("a"), spelt["<|im_start|>"], spelt["<|im_end|>"], *spell("b")]
    board = Board(skip_special_tokens=skips, spaces_between_special_tokens=spaces, ignore_eos=True)
    board.push(ids, finish_reason="length")
    assert (
        board.answer.text
        == text
        == TOKENIZER.decode(ids, skip_special_tokens=skips, spaces_between_special_tokens=spaces)
    )
