"""Thousands of random requests on model T: nothing leaks, nothing is traced, and answers are those of solo runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine.variants import CONTEXT, assert_idle, ids_of, prompts_of, run, shared_tiny, variant
from tiny import tiny_request

from jaxinfer.engine.loop import Engine
from jaxinfer.request import Request, RequestOutput, SamplingParams

VOCAB = 512
STEMS = prompts_of(99, [16, 32, 48, 47, 65, 80, 100, 128])
STOPS = ("a", "e ", "th", "\n", "er", "zq")
REPLAYED = 0.04  # share of the answers that are compared with a solo run

CONFIGS: list[dict[str, Any]] = [
    {"num_pages": 60, "preemption_mode": "recompute", "eviction_policy": "lru"},
    {"num_pages": 40, "preemption_mode": "swap", "eviction_policy": "lfu", "swap_capacity_pages": 30},
    {"num_pages": 50, "preemption_mode": "swap", "enable_prefix_caching": False, "max_num_batched_tokens": 17},
    {"num_pages": 45, "preemption_mode": "recompute", "eviction_policy": "cost", "max_in_flight": 1},
]


class Clock:
    """One second a step."""

    def __init__(self):
        self.now = 0.5

    def __call__(self) -> float:
        return self.now


def random_params(rng: np.random.Generator) -> SamplingParams:
    """Any mix of parameters, most of them off."""

    def maybe(share: float, value: Any, off: Any) -> Any:
        return value if rng.random() < share else off

    def ids(most: int) -> list[int]:
        return [int(i) for i in rng.integers(0, VOCAB, int(rng.integers(1, most)))]

    max_tokens = int(rng.integers(1, 25))
    return SamplingParams(
        temperature=float(maybe(0.5, rng.uniform(0.2, 1.5), 0.0)),
        top_k=int(maybe(0.2, rng.integers(1, 600), 0)),
        top_p=float(maybe(0.2, rng.uniform(0.1, 1.0), 1.0)),
        min_p=float(maybe(0.1, rng.uniform(0, 0.3), 0.0)),
        presence_penalty=float(maybe(0.1, rng.uniform(-2, 2), 0.0)),
        frequency_penalty=float(maybe(0.1, rng.uniform(-2, 2), 0.0)),
        repetition_penalty=float(maybe(0.1, rng.uniform(0.5, 2), 1.0)),
        n=int(maybe(0.1, rng.integers(2, 5), 1)),
        max_tokens=max_tokens,
        min_tokens=int(maybe(0.2, rng.integers(0, max_tokens + 1), 0)),
        ignore_eos=bool(rng.random() < 0.5),
        stop=maybe(0.2, [str(s) for s in rng.choice(STOPS, 2, replace=False)], []),
        include_stop_str_in_output=bool(rng.random() < 0.3),
        stop_token_ids=maybe(0.15, ids(8), []),
        logprobs=maybe(0.15, int(rng.integers(0, 21)), None),
        prompt_logprobs=maybe(0.07, int(rng.integers(0, 21)), None),
        logit_bias=maybe(0.1, {i: float(rng.uniform(-5, 5)) for i in ids(20)}, None),
        allowed_token_ids=maybe(0.07, ids(100), None),
        skip_special_tokens=bool(rng.random() < 0.7),
        priority=int(maybe(0.1, rng.integers(-3, 4), 0)),
        deadline_s=maybe(0.05, float(rng.uniform(1, 60)), None),
    )


def random_request(rng: np.random.Generator, index: int, now: float) -> Request:
    """A prompt of 1 to 200 tokens, half of them with a shared beginning."""
    prompt = rng.integers(4, VOCAB, int(rng.integers(1, 30) if rng.random() < 0.8 else rng.integers(30, 90))).tolist()
    if rng.random() < 0.5:
        prompt = [*STEMS[int(rng.integers(len(STEMS)))], *prompt]
    request = tiny_request(str(index), prompt[: CONTEXT - 1], random_params(rng), seed=int(rng.integers(2**62)))
    bad_words = tuple(tuple(int(i) for i in rng.integers(4, VOCAB, 2)) for _ in range(2)) if rng.random() < 0.1 else ()
    return replace(request, arrival_time=now, bad_word_ids=bad_words, cache_namespace=str(rng.integers(2)))


def drive(engine: Engine, clock: Clock, rng: np.random.Generator, count: int) -> list[tuple[Request, RequestOutput]]:
    """Poisson arrivals, aborts and forced preemptions; audits after every 100 requests."""
    live: dict[str, Request] = {}
    ended: list[tuple[Request, RequestOutput]] = []
    num_made = 0
    while num_made < count or engine.has_work():
        clock.now += 1.0
        for _ in range(min(int(rng.poisson(2.0)), count - num_made, 40 - len(live))):
            request = random_request(rng, num_made, clock.now)
            engine.submit(request)
            live[request.request_id] = request
            num_made += 1
            if num_made % 100 == 0:
                engine.scheduler.audit()
        if live and rng.random() < 0.03:
            request_id = str(rng.choice(list(live)))
            out = engine.abort(request_id)
            assert out is not None
            ended.append((live.pop(request_id), out))
        if rng.random() < 0.1 and (running := sorted(engine.scheduler._state.running)):
            engine.scheduler.force_preempt(running[int(rng.integers(len(running)))])
        for out in engine.step():
            if out.finished:
                ended.append((live.pop(out.request_id), out))
    assert not live
    return ended


def assert_well_formed(request: Request, out: RequestOutput) -> None:
    """What holds of every answer, however it ended."""
    params = request.params
    decode = shared_tiny().tokenizer.decode
    assert out.finished
    for answer in out.outputs:
        ids = answer.token_ids
        assert len(ids) <= (params.max_tokens or CONTEXT)
        assert answer.metrics.output_tokens == len(ids)
        assert answer.metrics.num_preemptions <= 8
        if answer.finish_reason == "length":
            assert len(ids) == min(params.max_tokens or CONTEXT, CONTEXT - len(request.prompt_token_ids))
        if answer.finish_reason in ("stop", "length"):
            assert len(ids) >= min(params.min_tokens, 1)
        assert answer.finish_reason != "error"
        if params.logprobs is not None:
            assert [next(iter(d)) for d in answer.logprobs or ()] == ids
            assert all(params.logprobs <= len(d) <= params.logprobs + 1 for d in answer.logprobs or ())
        if params.allowed_token_ids is not None:
            assert set(ids) <= set(params.allowed_token_ids)
        if not params.stop and answer.finish_reason == "length":
            assert answer.text == decode(ids, skip_special_tokens=params.skip_special_tokens)
        if params.stop and not params.include_stop_str_in_output:
            assert not any(s in answer.text for s in params.stop)
    if params.prompt_logprobs is not None and out.outputs[0].finish_reason in ("stop", "length"):
        assert len(out.prompt_logprobs or ()) == len(request.prompt_token_ids)


def assert_as_alone(request: Request, out: RequestOutput) -> None:
    """Ids, text, reasons and log probabilities of a solo run, as far as the request came."""
    calm = replace(request, params=SamplingParams(**(vars(request.params) | {"deadline_s": None})))
    engine = variant(shared_tiny(), max_in_flight=1, enable_prefix_caching=False).engine
    (alone,) = run(engine, [calm])
    for answer, expected in zip(out.outputs, alone.outputs, strict=True):
        label = f"request {request.request_id}, choice {answer.index}: {request.params}"
        if answer.finish_reason in ("abort", "timeout"):
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)], label
            continue
        assert answer.token_ids == expected.token_ids, label
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (
            expected.text,
            expected.finish_reason,
            expected.stop_reason,
        ), label
        if answer.cumulative_logprob is not None:
            assert answer.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3), label


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_requests_leak_nothing_trace_nothing_and_answer_as_alone_f1_f15_f17_f19(count: int):
    """F1, F4, F15, F17, F19: four configurations share the requests; see `CONFIGS`."""
    traces = shared_tiny().compile_counter.num_traces
    num_replayed = 0
    for number, config in enumerate(CONFIGS):
        rng = np.random.default_rng([count, number])
        clock = Clock()
        engine = variant(shared_tiny(), clock=clock, **config).engine
        ended = drive(engine, clock, rng, count // len(CONFIGS))
        assert_idle(engine)
        assert len({request.request_id for request, _ in ended}) == count // len(CONFIGS)
        num_choices = sum(request.params.n for request, _ in ended)
        counted = engine.scheduler.stats().finished
        assert sum(counted.values()) == num_choices
        shown = Counter(answer.finish_reason for _, out in ended for answer in out.outputs)
        assert shown["abort"] == counted.get("abort", 0)
        assert shown["timeout"] == counted.get("timeout", 0)
        assert engine.scheduler.stats().num_preemptions > 0
        for request, out in ended:
            assert_well_formed(request, out)
        for request, out in ended:
            if rng.random() < REPLAYED:
                assert_as_alone(request, out)
                num_replayed += 1
    assert shared_tiny().compile_counter.num_traces == traces
    assert num_replayed > 0.02 * count


def test_another_seed_is_noticed():
    """Mutant: an answer compared with a solo run under another seed differs."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    request = tiny_request("0", STEMS[0], params, seed=1)
    (out,) = run(variant(shared_tiny()).engine, [request])
    assert_as_alone(request, out)
    with pytest.raises(AssertionError, match="request 0"):
        assert_as_alone(replace(request, seed=2), out)
    assert ids_of([out]) != [[]]
