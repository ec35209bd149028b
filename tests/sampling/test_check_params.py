"""Token ids that the model does not have are refused by name (R077)."""

import subprocess
import sys
from pathlib import Path

import pytest

import jaxinfer.sampling.check_params as module
from jaxinfer.errors import RequestError
from jaxinfer.request import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from jaxinfer.sampling import check_against_vocabulary

VOCAB = 100


@pytest.mark.parametrize("token", [VOCAB, 191222, 2**31 - 1])
@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_r077_ids_past_the_vocabulary_are_refused_by_name(name, token):
    """R077."""
    value = {token: -100.0} if name == "logit_bias" else [3, token]
    with pytest.raises(RequestError, match=f"{name}.*{token}") as error:
        check_against_vocabulary(SamplingParams(**{name: value}), VOCAB)
    assert error.value.param == name


@pytest.mark.parametrize("bias", [{"191222": -100}, {"-1": 5}, {"abc": 1}, {"3": 1000}, {"3": None}])
def test_r077_every_bad_bias_names_its_field(bias):
    """R077: all five of its inputs, by the request or by the vocabulary."""
    with pytest.raises(RequestError) as error:
        check_against_vocabulary(SamplingParams(logit_bias=bias), VOCAB)
    assert error.value.param == "logit_bias"


def test_ids_in_range_pass():
    params = SamplingParams(logit_bias={0: 1, VOCAB - 1: 1}, allowed_token_ids=[VOCAB - 1], stop_token_ids=[0])
    check_against_vocabulary(params, VOCAB, bad_word_ids=[[0], [VOCAB - 1] * MAX_BAD_WORD_TOKENS])
    check_against_vocabulary(SamplingParams(), VOCAB)


@pytest.mark.parametrize("ids", [[[]], [[1] * (MAX_BAD_WORD_TOKENS + 1)], [[VOCAB]], [[1]] * (MAX_BAD_WORDS + 1)])
def test_bad_words_that_do_not_fit_are_refused(ids):
    with pytest.raises(RequestError) as error:
        check_against_vocabulary(SamplingParams(bad_words=["x"]), VOCAB, ids)
    assert error.value.param == "bad_words"


def test_the_file_needs_no_jax():
    code = f"import sys, runpy; runpy.run_path({str(Path(module.__file__))!r}); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(module.__file__).parents[2])
