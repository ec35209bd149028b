"""Draws and reported probabilities of the whole engine against the plain loop's logits, on model T.

False alarms: draws are fixed by their seeds, so a test that passes always passes. A correct sampler drawn afresh would
fail each chi-square test with probability ALARM; any of the twelve below with about 1 in 1,000.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest
from engine.variants import first, greedy, prompts_of, requests_of, run, shared_tiny, variant, variant_llm
from oracle import Oracle
from scipy import stats
from tiny import tiny_params, tiny_request

from jaxinfer.request import SamplingParams

ALARM = 1e-4
LOGPROB_TOLERANCE = 1e-4  # float32 of two layers against float64; 1e-5 seen
NUM_DRAWS = 4000
(PROMPT,) = prompts_of(31, [11])

CONFIGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 5},
    {"top_k": 40, "temperature": 1.3},
    {"top_p": 0.8},
    {"top_p": 0.5, "temperature": 2.0},
    {"min_p": 0.05},
    {"top_k": 30, "top_p": 0.9, "temperature": 1.5},
    {"top_k": 20, "top_p": 0.95, "min_p": 0.02, "temperature": 0.8},
]


@functools.cache
def oracle() -> Oracle:
    loaded = shared_tiny()
    return Oracle.of(tiny_params(loaded.arch, loaded.rules), loaded.arch)


def truth(logits_V: np.ndarray, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Probabilities by sorting, in vLLM's order: temperature, min_p, top_k, top_p."""
    weight_V = np.exp((logits_V - logits_V.max()) / temperature)
    weight_V[weight_V < min_p] = 0.0
    order = np.argsort(-logits_V)
    if top_k:
        weight_V[order[top_k:]] = 0.0
    sorted_V = weight_V[order] / weight_V.sum()
    # A token stays when what stands before it is short of top_p.
    weight_V[order[np.cumsum(sorted_V) - sorted_V >= top_p]] = 0.0
    return weight_V / weight_V.sum()


def drawn(config: dict[str, Any], count: int) -> np.ndarray:
    """First tokens of `count` requests that differ by their seeds alone."""
    params = SamplingParams(max_tokens=1, **config)
    requests = [tiny_request(str(s), PROMPT, params, seed=s) for s in range(count)]
    return np.array([out.outputs[0].token_ids[0] for out in run(variant(shared_tiny()).engine, requests)])


def chi_square(tokens: np.ndarray, probs_V: np.ndarray) -> float:
    """p value; tokens expected less than five times stand together."""
    counts_V = np.bincount(tokens, minlength=len(probs_V))
    expected_V = probs_V * len(tokens)
    is_large_V = expected_V >= 5
    seen = np.append(counts_V[is_large_V], counts_V[~is_large_V].sum())
    wanted = np.append(expected_V[is_large_V], expected_V[~is_large_V].sum())
    if wanted[-1] < 5:  # too few even together: they join the rarest of the others
        seen[-2:-1] += seen[-1]
        wanted[-2:-1] += wanted[-1]
        seen, wanted = seen[:-1], wanted[:-1]
    return float(stats.chisquare(seen, wanted).pvalue) if len(seen) > 1 else 1.0


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_first_tokens_are_distributed_as_the_models_logits_say_f17(config: dict[str, Any]):
    """F17."""
    probs_V = truth(oracle().logits(PROMPT)[-1], **config)
    tokens = drawn(config, NUM_DRAWS)
    assert probs_V[tokens].min() > 0, "a token that the filters remove was drawn"
    assert (probs_V > 0).sum() > 1
    assert chi_square(tokens, probs_V) > ALARM


def test_a_slightly_different_temperature_is_noticed():
    """Mutant: the test has the power to see 1.0 taken for 1.3, and top_k = 6 for 5."""
    logits_V = oracle().logits(PROMPT)[-1]
    assert chi_square(drawn({}, NUM_DRAWS), truth(logits_V, temperature=1.3)) < ALARM
    assert truth(logits_V, top_k=5)[drawn({"top_k": 6}, NUM_DRAWS)].min() == 0.0


def test_second_tokens_are_distributed_given_the_first_f17():
    """F17: the draw inside the decode program, not the one at the end of prefill; after the commonest first token."""
    free = SamplingParams(max_tokens=2, ignore_eos=True)
    requests = [tiny_request(str(s), PROMPT, free, seed=s) for s in range(2 * NUM_DRAWS)]
    outputs = run(variant(shared_tiny()).engine, requests)
    pairs = np.array([out.outputs[0].token_ids for out in outputs])
    common = int(np.bincount(pairs[:, 0]).argmax())
    second = pairs[pairs[:, 0] == common, 1]
    assert len(second) > 300, "too few for a test with any power"
    assert chi_square(second, truth(oracle().logits([*PROMPT, common])[-1])) > ALARM


def test_choices_of_one_request_are_independent_draws_f17():
    """F17: the sixteen choices' first tokens together have the model's distribution."""
    params = SamplingParams(max_tokens=1, n=16)
    requests = [tiny_request(str(s), PROMPT, params, seed=s) for s in range(NUM_DRAWS // 16)]
    outputs = run(variant(shared_tiny()).engine, requests)
    tokens = np.array([o.token_ids[0] for out in outputs for o in out.outputs])
    assert chi_square(tokens, truth(oracle().logits(PROMPT)[-1])) > ALARM


def expected_entry(logprobs_V: np.ndarray, token_id: int) -> tuple[float, int]:
    return float(logprobs_V[token_id]), int(1 + (logprobs_V > logprobs_V[token_id]).sum())


def assert_entries(found: Any, logprobs_TV: np.ndarray, token_ids: list[int], num_top: int) -> None:
    """Values, ranks and order of reported log probabilities against the plain loop's."""
    assert len(found) == len(token_ids)
    for entry, logprobs_V, token_id in zip(found, logprobs_TV, token_ids, strict=True):
        assert next(iter(entry)) == token_id
        top = np.argsort(-logprobs_V, kind="stable")[:num_top].tolist()
        assert [i for i in entry if i in top] == ([token_id] if token_id in top else []) + [
            i for i in top if i != token_id
        ]
        assert set(entry) == {token_id, *top}
        for i, known in entry.items():
            value, rank = expected_entry(logprobs_V, i)
            assert known.logprob == pytest.approx(value, abs=LOGPROB_TOLERANCE)
            assert known.rank == rank
            assert known.decoded_token == shared_tiny().tokenizer.token_text(i)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
def test_log_probabilities_and_ranks_are_the_plain_loops(num_top: int):
    params = SamplingParams(seed=3, max_tokens=12, logprobs=num_top, ignore_eos=True, temperature=1.5, top_k=50)
    answer = first(variant_llm(shared_tiny()).generate([PROMPT], params, use_tqdm=False))
    logprobs_TV = oracle().logprobs([*PROMPT, *answer.token_ids])[len(PROMPT) - 1 : -1]
    assert_entries(answer.logprobs, logprobs_TV, answer.token_ids, num_top)
    total = sum(logprobs_TV[i, token_id] for i, token_id in enumerate(answer.token_ids))
    assert answer.cumulative_logprob == pytest.approx(total, abs=12 * LOGPROB_TOLERANCE)


def test_a_shift_by_one_position_is_noticed():
    """Mutant: log probabilities of the neighbouring position."""
    params = SamplingParams(seed=3, max_tokens=12, logprobs=0, ignore_eos=True)
    answer = first(variant_llm(shared_tiny()).generate([PROMPT], params, use_tqdm=False))
    shifted_TV = oracle().logprobs([*PROMPT, *answer.token_ids])[len(PROMPT) :]
    with pytest.raises(AssertionError):
        assert_entries(answer.logprobs, shifted_TV, answer.token_ids, 0)


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("budget", [32, 9])
def test_prompt_log_probabilities_are_the_plain_loops_for_any_chunks(length: int, budget: int):
    """Prompts at, before and past the edges of chunks (32 or 9 tokens) and of the score program's blocks (32)."""
    (prompt,) = prompts_of(32 + length, [length])
    llm = variant_llm(shared_tiny(), max_num_batched_tokens=budget)
    (out,) = llm.generate([prompt], greedy(3, prompt_logprobs=4), use_tqdm=False)
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    assert_entries(out.prompt_logprobs[1:], oracle().logprobs(prompt)[:-1], prompt[1:], 4)


def test_prompt_log_probabilities_in_a_batch_with_choices_and_preemption():
    """Reported once, by the first choice, though the prompt is computed again after a preemption."""
    prompts = prompts_of(40, [50, 20, 90, 7])
    engine = variant(shared_tiny(), max_num_batched_tokens=24).engine
    scheduler = engine.scheduler

    def before_step(step: int) -> None:
        for seq_id in sorted(scheduler._state.running)[: step % 3]:
            scheduler.force_preempt(seq_id)

    outputs = run(engine, requests_of(prompts, greedy(6, n=2, prompt_logprobs=2)), before_step=before_step)
    assert engine.scheduler.stats().num_preemptions > 4
    for prompt, out in zip(prompts, outputs, strict=True):
        assert out.prompt_logprobs is not None
        assert_entries(out.prompt_logprobs[1:], oracle().logprobs(prompt)[:-1], prompt[1:], 2)
        assert out.outputs[0].token_ids == out.outputs[1].token_ids


def test_penalties_and_bias_act_on_logits_as_documented_r075():
    """R075: greedy choice against the plain loop's logits, penalised by hand; 12 tokens."""
    bias = {40: 2.0, 50: -3.0}
    params = greedy(12, logit_bias=bias, repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4)
    answer = first(variant_llm(shared_tiny()).generate([PROMPT], params, use_tqdm=False))
    ids: list[int] = []
    for _ in range(12):
        x_V = oracle().logits([*PROMPT, *ids])[-1].copy()
        for token, value in bias.items():
            x_V[token] += value
        for token in {*PROMPT, *ids}:
            x_V[token] = x_V[token] / 1.3 if x_V[token] > 0 else x_V[token] * 1.3
        for token in set(ids):
            x_V[token] -= 0.7 + 0.4 * ids.count(token)
        second, best = np.partition(x_V, -2)[-2:]
        assert best - second > 1e-4, "too close to call in float32; choose another prompt"
        ids.append(int(x_V.argmax()))
    assert answer.token_ids == ids
    assert all(math.isfinite(v) for v in bias.values())
