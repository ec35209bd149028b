"""Plans to packed arrays and news back to records, numpy only."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.request import MAX_LOGPROBS, SamplingParams
from jaxinfer.sampling import pack_row
from jaxinfer.schedule.step_plan import Admission, PlannedRow, RowTokens, StepPlan, TokenLogprobs
from jaxinfer.step.batch import pack_admissions, pack_decode, pack_mixed, unpack_logprobs, unpack_row
from jaxinfer.step.programs import LOGPROB_WORDS

TABLE = np.array([[3, 9, 0], [4, 0, 0]], np.int32)
DECODE_ROWS = (
    PlannedRow(seq_id=10, slot=2, start=None, num_tokens=1, samples=True),
    PlannedRow(seq_id=11, slot=0, start=None, num_tokens=1, samples=True),
)
MIXED_ROWS = (
    PlannedRow(seq_id=10, slot=2, start=16, num_tokens=7, samples=False),
    PlannedRow(seq_id=11, slot=0, start=None, num_tokens=1, samples=True),
)


def _plan(kind: str, rows: tuple[PlannedRow, ...]) -> StepPlan:
    return StepPlan(step_id=0, kind=kind, rows=rows, page_table=TABLE, num_rounds=2 if kind == "decode" else 1)


def _admission(slot: int, ids: tuple[int, ...], **params) -> Admission:
    return Admission(
        slot=slot,
        seq_id=slot,
        token_ids=ids,
        num_prompt_tokens=len(ids) - 1,
        max_total_tokens=20,
        params=SamplingParams(**params),
        seed=2**62 + 1,
    )


def test_decode_rows_are_slot_and_table_and_padding_names_no_slot():
    assert pack_decode(_plan("decode", DECODE_ROWS), 4, num_slots=8).tolist() == [
        [2, 3, 9, 0],
        [0, 4, 0, 0],
        [8, 0, 0, 0],
        [8, 0, 0, 0],
    ]


def test_mixed_rows_carry_start_length_kind_and_whether_they_sample():
    assert pack_mixed(_plan("mixed", MIXED_ROWS), 3, num_slots=8).tolist() == [
        [2, 16, 7, 0, 0, 3, 9, 0],
        [0, 0, 1, 1, 1, 4, 0, 0],
        [8, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_a_chunk_from_position_0_is_no_decode_row():
    row = PlannedRow(seq_id=1, slot=1, start=0, num_tokens=3, samples=True)
    packed = pack_mixed(StepPlan(step_id=0, kind="mixed", rows=(row,), page_table=TABLE[:1]), 1, num_slots=8)
    assert packed[0, :5].tolist() == [1, 0, 3, 0, 1]


@pytest.mark.parametrize("pack", [pack_decode, pack_mixed])
def test_packed_arrays_share_no_memory_with_the_plan(pack):
    """R040, the host's half."""
    plan = _plan("mixed", DECODE_ROWS)
    packed = pack(plan, 4, 8)
    assert not np.shares_memory(packed, plan.page_table)
    assert not np.shares_memory(packed, pack(plan, 4, 8)), "a fresh array per call"
    assert packed.dtype == np.int32


def test_admissions_hold_history_and_parameters():
    admissions = (_admission(5, (7, 8, 9), temperature=0.5), _admission(1, (4, 4), top_k=3))
    packed = pack_admissions(admissions, 4, num_slots=8, max_model_len=10, vocab_size=512, eos_token_ids=(2,))
    assert packed[0, :14].tolist() == [5, 3, 2, 20, 7, 8, 9, 0, 0, 0, 0, 0, 0, 0]
    assert packed[1, :14].tolist() == [1, 2, 1, 20, 4, 4, 0, 0, 0, 0, 0, 0, 0, 0]
    assert packed[2:, 0].tolist() == [8, 8], "unused rows name no slot"
    for row, a in zip(packed, admissions, strict=False):
        want = pack_row(a.params, seed=a.seed, vocab_size=512, eos_token_ids=(2,))
        assert np.array_equal(row[14:], want)


def _words(logprob: float, rank: int, ids: list[int], logprobs: list[float]) -> np.ndarray:
    words = np.zeros(LOGPROB_WORDS, np.int32)
    words[0:1] = np.array([logprob], np.float32).view(np.int32)
    words[1] = rank
    words[2 : 2 + len(ids)] = ids
    words[2 + MAX_LOGPROBS : 2 + MAX_LOGPROBS + len(ids)] = np.array(logprobs, np.float32).view(np.int32)
    return words


WORDS_NW = np.stack([_words(-0.5, 1, [5, 6, 7], [-0.5, -1.0, -2.0]), _words(-9.0, 40, [8, 9, 1], [-0.25, -3.0, -4.0])])


@pytest.mark.parametrize("num_top", [0, 1, 3])
def test_logprobs_come_back_as_they_were(num_top):
    assert unpack_logprobs(WORDS_NW, num_top) == (
        TokenLogprobs(-0.5, 1, (5, 6, 7)[:num_top], (-0.5, -1.0, -2.0)[:num_top]),
        TokenLogprobs(-9.0, 40, (8, 9, 1)[:num_top], (-0.25, -3.0, -4.0)[:num_top]),
    )


def test_the_largest_number_of_logprobs_fits():
    ids, logprobs = list(range(MAX_LOGPROBS)), [-float(i) for i in range(MAX_LOGPROBS)]
    (got,) = unpack_logprobs(_words(-1.0, 2, ids, logprobs)[None], MAX_LOGPROBS)
    assert (got.top_ids, got.top_logprobs) == (tuple(ids), tuple(logprobs))


@pytest.mark.parametrize(
    ("tokens", "want"),
    [
        ([2, 0, 41, 42, 0], RowTokens(token_ids=(41, 42))),
        ([0, 0, 0, 0, 0], RowTokens()),
        ([1, 1, 41, 0, 0], RowTokens(token_ids=(41,), is_bad=True)),
        ([3, 0, 0, 0, 5], RowTokens(token_ids=(0, 0, 5))),
    ],
    ids=["two", "none", "bad after one", "token 0 counts"],
)
def test_only_counted_tokens_are_read(tokens, want):
    assert unpack_row(DECODE_ROWS[0], np.array(tokens, np.int32), WORDS_NW, None, None, None) == want


def test_logprobs_only_for_the_row_that_asked_and_only_counted_ones():
    tokens = np.array([1, 0, 41, 0], np.int32)
    got = unpack_row(DECODE_ROWS[0], tokens, WORDS_NW, None, 2, None)
    assert got.logprobs == unpack_logprobs(WORDS_NW[:1], 2)
    assert unpack_row(DECODE_ROWS[0], tokens, None, None, 2, None).logprobs == ()


@pytest.mark.parametrize(("samples", "scored"), [(True, 1), (False, 2)])
def test_the_last_position_of_a_prompt_scores_no_prompt_token(samples, scored):
    row = PlannedRow(seq_id=1, slot=0, start=0, num_tokens=2, samples=samples, prompt_logprobs=True)
    got = unpack_row(row, np.array([0, 0, 0], np.int32), None, WORDS_NW, None, 1)
    assert got.prompt_logprobs == unpack_logprobs(WORDS_NW[:scored], 1)
