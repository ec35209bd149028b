"""One row's distribution in float64, by full sorts and plain loops. Shares nothing with jaxinfer.sampling."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Case:
    """Everything that decides one token's distribution; `params` holds SamplingParams fields by name."""

    params: dict
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    eos: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    def get(self, name, default):
        return self.params.get(name, default)


def adjusted(logits, case):
    """Bias, masks, penalties in vLLM's order."""
    x = np.array(logits, np.float64)
    for token, bias in case.get("logit_bias", {}).items():
        x[token] += bias
    penalised = x.copy()
    r = case.get("repetition_penalty", 1.0)
    for token in set(case.prompt) | set(case.output):
        penalised[token] = x[token] / r if x[token] > 0 else x[token] * r
    for token in set(case.output):
        penalised[token] -= case.get("frequency_penalty", 0.0) * case.output.count(token)
        penalised[token] -= case.get("presence_penalty", 0.0)
    x = penalised
    if "allowed_token_ids" in case.params:
        for token in range(len(x)):
            if token not in case.params["allowed_token_ids"]:
                x[token] = -np.inf
    left = x.copy()
    if len(case.output) < case.get("min_tokens", 0):
        ends = () if case.get("ignore_eos", False) else case.eos
        left[list(ends) + list(case.get("stop_token_ids", ()))] = -np.inf
    for word in case.bad_words:
        before = list(word[:-1])
        if len(before) <= len(case.output) and list(case.output[len(case.output) - len(before) :]) == before:
            left[word[-1]] = -np.inf
    return left if np.isfinite(left).any() else x


def keep_top_k(x, k):
    return np.ones(len(x), bool) if k <= 0 or k >= len(x) else x >= np.sort(x)[::-1][k - 1]


def keep_top_p(prob, x, p):
    """Smallest set of whole groups of equal x, from the top, that holds p of the mass."""
    if p >= 1:
        return np.ones(len(x), bool)
    keep = np.zeros(len(x), bool)
    for value in np.unique(x)[::-1]:
        keep |= x == value
        if prob[keep].sum() >= p * prob.sum():
            break
    return keep


def filtered(x, case):
    """Probabilities [V] of the next token from adjusted logits."""
    temperature = case.get("temperature", 1.0)
    if temperature < 1e-5 or case.get("top_k", 0) == 1:
        return np.eye(len(x))[int(np.argmax(x))]
    prob = np.exp((x - x.max()) / temperature)
    prob = np.where(prob >= case.get("min_p", 0.0) * prob.max(), prob, 0.0)
    prob = np.where(keep_top_k(x, case.get("top_k", 0)), prob, 0.0)
    prob = np.where(keep_top_p(prob, x, case.get("top_p", 1.0)), prob, 0.0)
    return prob / prob.sum()


def distribution(logits, case):
    return filtered(adjusted(logits, case), case)
