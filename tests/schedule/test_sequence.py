"""Where a sequence ends, and how far its keys and values are certain."""

import pytest

from jaxinfer.request import Request, SamplingParams
from jaxinfer.schedule.sequence import append_tokens, choice_seed, make_sequences


def make(max_total_tokens: int = 10, **params):
    request = Request(
        request_id="r", prompt_token_ids=(5, 6, 7), params=SamplingParams(**params), seed=3, arrival_time=0.0
    )
    return make_sequences(request, 0, max_total_tokens, 2)


@pytest.mark.parametrize(
    ("params", "tokens", "wanted"),
    [
        ({}, (8, 9), (2, None, None)),
        ({}, (8, 1, 9), (2, "stop", None)),
        ({"ignore_eos": True}, (8, 1, 9), (3, None, None)),
        ({"stop_token_ids": (9,)}, (8, 9, 8), (2, "stop", 9)),
        ({"stop_token_ids": (1,)}, (1,), (1, "stop", None)),
        ({"stop_token_ids": (1,), "ignore_eos": True}, (1,), (1, "stop", 1)),
        ({}, (8,) * 9, (7, "length", None)),
        ({"min_tokens": 3}, (8, 1), (2, "stop", None)),
        ({}, (8, 8, 8, 8, 8, 8, 1), (7, "stop", None)),
    ],
)
def test_tokens_are_taken_up_to_the_one_that_ends(params, tokens, wanted):
    (seq,) = make(**params)
    assert append_tokens(seq, tokens, (1,)) == wanted
    assert len(seq.tokens) == 3 + wanted[0]


def test_only_the_leader_scores_the_prompt_and_other_parameters_are_shared():
    leader, sibling = make(n=2, prompt_logprobs=3, logit_bias={4: 1.0}, stop=("x",), allowed_token_ids=[4, 5])
    assert (leader.params.prompt_logprobs, sibling.params.prompt_logprobs) == (3, None)
    assert sibling.params.logit_bias == leader.params.logit_bias
    assert sibling.params.stop == leader.params.stop
    assert sibling.leader is leader


def test_last_tokens_keys_and_values_are_not_counted_on():
    (seq,) = make()
    seq.prefill_target = seq.num_kv = 3
    assert seq.num_final_kv == 3
    seq.num_kv = 7  # four rounds in flight
    assert seq.num_final_kv == 3
    seq.tokens += [8, 9]
    assert seq.num_final_kv == 4


def test_seeds_of_choices_differ_for_neighbouring_seeds():
    seeds = {choice_seed(seed, index) for seed in range(100) for index in range(1, 16)}
    assert len(seeds) == 1_500
