"""Draws of `choose` against the float64 reference, by chi-square over seeds 0 .. 16383 (F17).

A right sampler fails one configuration with probability 1e-4, so one of the 50 with probability 0.5 %; seeds are fixed,
so a run that passes passes always. Mutants: the same draws must be refused under a slightly wrong reference.
"""

import numpy as np
import pytest
from sampling_cases import chi_square_p, draws
from sampling_reference import Case, distribution

VOCAB = 50  # not a multiple of any block
NUM_DRAWS = 16384
FALSE_ALARM = 1e-4


def random_case(seed):
    """A configuration with a random handful of features on, and logits to match."""
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=VOCAB) * rng.uniform(0.5, 2.5)).astype(np.float32)
    params = {"temperature": float(rng.uniform(0.3, 2.0))}
    features = {
        "top_k": lambda: int(rng.integers(2, VOCAB + 2)),
        "top_p": lambda: float(rng.uniform(0.2, 1.0)),
        "min_p": lambda: float(rng.uniform(0.0, 0.3)),
        "presence_penalty": lambda: float(rng.uniform(-2, 2)),
        "frequency_penalty": lambda: float(rng.uniform(-1, 2)),
        "repetition_penalty": lambda: float(rng.uniform(0.6, 1.8)),
        "logit_bias": lambda: {int(i): float(rng.normal() * 2) for i in rng.choice(VOCAB, 5, replace=False)},
        "allowed_token_ids": lambda: [int(i) for i in rng.choice(VOCAB, 30, replace=False)],
        "min_tokens": lambda: int(rng.integers(0, 12)),
    }
    for name in rng.choice(list(features), int(rng.integers(0, 6)), replace=False):
        params[str(name)] = features[str(name)]()
    output = tuple(int(i) for i in rng.integers(0, VOCAB, int(rng.integers(0, 9))))
    bad_words = ((7,), (*output[-2:], 11), (*output[-1:], 3), (VOCAB - 1, VOCAB - 1, 4)) if seed % 3 == 0 else ()
    prompt = tuple(int(i) for i in rng.integers(0, VOCAB, 6))
    return logits, Case(params, prompt, output, eos=(1, 2), bad_words=bad_words)


@pytest.mark.parametrize("seed", range(50))
def test_draws_follow_the_reference_for_random_configurations(seed):
    logits, case = random_case(seed)
    tokens = draws(logits, case, NUM_DRAWS)
    assert chi_square_p(tokens, distribution(logits, case)) > FALSE_ALARM


BASE = Case({"temperature": 1.0}, prompt=(3, 3, 3, 5), output=(5, 8, 8, 8))
WRONG = {
    "temperature 10 % off": ({"temperature": 0.8}, {"temperature": 0.88}),
    "top_k one too many": ({"top_k": 8}, {"top_k": 9}),
    "top_k ignored": ({"top_k": 20}, {}),
    "top_p ignored": ({"top_p": 0.8}, {}),
    "top_p a little larger": ({"top_p": 0.8}, {"top_p": 0.88}),
    "min_p doubled": ({"min_p": 0.1}, {"min_p": 0.2}),
    "repetition inverted": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1 / 1.3}),
    "presence for frequency": ({"frequency_penalty": 0.5}, {"presence_penalty": 0.5}),
    "frequency for presence": ({"presence_penalty": 0.5}, {"frequency_penalty": 0.5}),
    "bias of a neighbour": ({"logit_bias": {8: 1.0}}, {"logit_bias": {9: 1.0}}),
    "end ids not banned": ({"min_tokens": 9}, {}),
    "allowed ids ignored": ({"allowed_token_ids": range(40)}, {}),
}


@pytest.mark.parametrize("name", WRONG)
def test_mutant_distributions_are_refused_and_the_right_one_is_not(name):
    right, wrong = ({"temperature": 1.0, **p} for p in WRONG[name])
    right, wrong = ({k: list(v) if isinstance(v, range) else v for k, v in params.items()} for params in (right, wrong))
    logits = np.random.default_rng(77).normal(size=VOCAB).astype(np.float32)
    logits[[3, 5, 8]] = 1.5, 2.0, 1.8
    case = Case(right, BASE.prompt, BASE.output, eos=(5,))
    tokens = draws(logits, case, NUM_DRAWS)
    assert chi_square_p(tokens, distribution(logits, case)) > FALSE_ALARM
    assert chi_square_p(tokens, distribution(logits, Case(wrong, BASE.prompt, BASE.output, eos=(5,)))) < FALSE_ALARM


def test_mutant_penalties_that_count_the_wrong_tokens_are_refused():
    """R075: repetition counts prompt and output, presence and frequency the output alone."""
    logits = np.zeros(VOCAB, np.float32) + np.float32(0.5)
    for params, wrong in (
        ({"repetition_penalty": 4.0}, {"prompt": (0,), "output": BASE.output}),
        ({"presence_penalty": 1.0}, {"prompt": (0,), "output": BASE.prompt + BASE.output}),
        ({"frequency_penalty": 1.0}, {"prompt": (0,), "output": BASE.prompt + BASE.output}),
    ):
        tokens = draws(logits, Case(params, BASE.prompt, BASE.output), NUM_DRAWS)
        assert chi_square_p(tokens, distribution(logits, Case(params, BASE.prompt, BASE.output))) > FALSE_ALARM
        assert chi_square_p(tokens, distribution(logits, Case(params, **wrong))) < FALSE_ALARM
