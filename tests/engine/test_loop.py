"""The loop on model T: deadlines, aborts, failures, faults on the device, and every stream whole and in order."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest
from engine.variants import (
    PAGE,
    SLOTS,
    assert_idle,
    greedy,
    ids_of,
    preempt_every,
    prompts_of,
    requests_of,
    run,
    shared_tiny,
    variant,
    variant_llm,
)

from jaxinfer.engine.loop import Engine
from jaxinfer.errors import EngineDead
from jaxinfer.request import RequestOutput, SamplingParams


class Clock:
    """Seconds that pass only when told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def engine_with(**changes) -> Engine:
    return variant(shared_tiny(), **changes).engine


def solo_ids(prompts, params) -> list[list[int]]:
    """Each prompt alone, nothing cached, nothing overlapped: the calm reference."""
    found = []
    for prompt in prompts:
        engine = engine_with(max_in_flight=1, enable_prefix_caching=False)
        found += ids_of(run(engine, requests_of([prompt], params)))
    return found


# Deadlines and aborts


def test_a_deadline_ends_running_and_waiting_requests_within_a_step_f8():
    """F8: finish reason "timeout", pages freed at once, neighbours untouched."""
    clock = Clock()
    engine = engine_with(clock=clock)
    prompts = prompts_of(1, [20] * (SLOTS + 2))
    late = [
        replace(request, arrival_time=clock.now, params=greedy(100, deadline_s=5.0))
        for request in requests_of(prompts[:-1], greedy())
    ]
    calm = replace(requests_of(prompts, greedy(40))[-1], arrival_time=clock.now)
    for request in [*late, calm]:
        engine.submit(request)
    for _ in range(6):
        engine.step()
    used = engine.scheduler.stats()
    assert (used.num_running, used.num_waiting) == (SLOTS, 2)
    clock.now += 4.999
    assert not [out for out in engine.step() if out.finished]
    clock.now += 0.001
    ended = [out for out in engine.step() if out.finished]
    assert {out.request_id for out in ended} == {request.request_id for request in late}
    assert {o.finish_reason for out in ended for o in out.outputs} == {"timeout"}
    assert sum(bool(out.outputs[0].token_ids) for out in ended) >= SLOTS - 1
    assert engine.scheduler.stats().num_running <= 1
    finished = run(engine, [])
    assert finished == []
    assert engine.scheduler.stats().finished == {"timeout": len(late), "length": 1}
    assert_idle(engine)


def test_an_expired_request_keeps_the_ids_it_had_f8():
    """F8: what came before the deadline is a prefix of the calm answer."""
    clock = Clock()
    engine = engine_with(clock=clock)
    prompts = prompts_of(2, [9, 30])
    expected = solo_ids(prompts, greedy(60))
    requests = [replace(r, arrival_time=clock.now) for r in requests_of(prompts, greedy(60))]
    engine.submit(replace(requests[0], params=greedy(60, deadline_s=1.0)))
    engine.submit(requests[1])
    finished: dict[str, RequestOutput] = {}
    for step in range(200):
        clock.now += 0.2 if step < 10 else 0.0
        finished |= {out.request_id: out for out in engine.step() if out.finished}
    cut = finished["0"].outputs[0]
    assert cut.finish_reason == "timeout"
    assert 0 < len(cut.token_ids) < 60
    assert cut.token_ids == expected[0][: len(cut.token_ids)]
    assert finished["1"].outputs[0].token_ids == expected[1]


def test_an_abort_frees_the_slot_for_the_next_step_r142():
    """R142: within one step; the neighbours' ids are those of their solo runs."""
    engine = engine_with()
    prompts = prompts_of(3, [20] * (SLOTS + 1))
    expected = solo_ids(prompts[1:], greedy(24))
    for request in requests_of(prompts, greedy(24)):
        engine.submit(request)
    outputs: dict[str, RequestOutput] = {}
    for _ in range(6):
        outputs |= {out.request_id: out for out in engine.step()}
    assert engine.scheduler.stats().num_waiting == 1
    aborted = engine.abort("0")
    assert aborted is not None
    assert (aborted.finished, aborted.outputs[0].finish_reason) == (True, "abort")
    kept = list(aborted.outputs[0].token_ids)
    assert engine.scheduler.stats().num_running == SLOTS - 1
    engine.step()
    assert engine.scheduler.stats().num_waiting == 0
    while engine.has_work():
        outputs |= {out.request_id: out for out in engine.step()}
    assert [outputs[str(i)].outputs[0].token_ids for i in range(1, SLOTS + 1)] == expected
    assert aborted.outputs[0].token_ids == kept
    assert engine.abort("0") is None
    assert engine.abort("never heard of") is None
    assert_idle(engine)


def test_finish_reasons_are_counted_once_each_and_add_up_r135():
    """R135: abort 10 of 30; stop + length = 20. Every output's reason is the counted one."""
    engine = engine_with()
    (stop_id,) = [solo_ids(prompts_of(4, [5]), greedy(6))[0][3]]
    prompts = prompts_of(4, [5] * 20) + prompts_of(5, [9] * 10)
    params = greedy(12, stop_token_ids=[stop_id])
    for request in requests_of(prompts, params):
        engine.submit(request)
    outputs = [out for i in range(20, 30) if (out := engine.abort(str(i))) is not None]
    while engine.has_work():
        outputs += [out for out in engine.step() if out.finished]
    counted = engine.scheduler.stats().finished
    assert counted["abort"] == 10
    assert counted.get("stop", 0) + counted.get("length", 0) == 20
    assert Counter(out.outputs[0].finish_reason for out in outputs) == counted


def test_the_counted_reason_of_an_answer_is_the_one_it_shows_f19():
    """F19: a stop string found in the very step that reaches max_tokens is a stop, and counted as one."""
    llm = variant_llm(shared_tiny())
    tokenizer = llm.get_tokenizer()
    letters = [i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).isalpha()]
    shown: Counter[str | None] = Counter()
    for seed in range(12):
        params = SamplingParams(seed=seed, max_tokens=4, stop=["a", "e", "t"], allowed_token_ids=letters)
        (out,) = llm.generate([[9, 10]], params, use_tqdm=False)
        shown[out.outputs[0].finish_reason] += 1
    assert set(shown) == {"stop", "length"}
    assert llm.metrics()["request_success_total"] == shown


# Failures


def test_a_failed_step_kills_the_engine_and_the_next_request_hears_of_it(monkeypatch: pytest.MonkeyPatch):
    """Donated pages went with the failed program: 503 until a new engine is made."""
    engine = engine_with()
    for request in requests_of(prompts_of(6, [5, 6]), greedy(8)):
        engine.submit(request)
    engine.step()

    def fail(plan):
        raise RuntimeError("the device fell over")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "submit", fail)
        with pytest.raises(RuntimeError, match="fell over"):
            run(engine, [])
    (request,) = requests_of(prompts_of(6, [7]), greedy(2), request_id="next")
    with pytest.raises(EngineDead, match="make a new one") as caught:
        engine.submit(request)
    assert caught.value.status == 503
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert "next" not in engine.live_request_ids()
    assert engine.abort("0") is not None


def test_a_failure_inside_generate_reaches_the_caller_and_the_next_call(monkeypatch: pytest.MonkeyPatch):
    llm = variant_llm(shared_tiny())

    def fail(plan):
        raise RuntimeError("the device fell over")

    with monkeypatch.context() as patch:
        patch.setattr(llm.loaded.engine.runner, "submit", fail)
        with pytest.raises(RuntimeError, match="fell over"):
            llm.generate("x", greedy(4), use_tqdm=False)
    with pytest.raises(EngineDead):
        llm.generate("x", greedy(4), use_tqdm=False)


# Faults on the device


def every_page(engine: Engine) -> tuple[int, ...]:
    """The null page and all others."""
    return tuple(range(engine.scheduler.stats().num_pages + 1))


@pytest.fixture
def clean_pages() -> Iterator[None]:
    """The pages are shared by all tests here: whatever one leaves behind is wiped."""
    yield
    engine = engine_with()
    engine.runner.poison_pages(every_page(engine), 0.0)


def pages_of(engine: Engine, request_id: str) -> tuple[int, ...]:
    """Pages the request's sequences hold now, through the scheduler's own state."""
    running = engine.scheduler._state.running.values()
    return tuple(p for seq in running if seq.request.request_id == request_id for p in seq.page_ids)


def page_values(engine: Engine, page_ids: tuple[int, ...]) -> list[np.ndarray]:
    return [np.asarray(a)[list(page_ids)] for a in jax.tree.leaves(engine.runner._pages)]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("when", [3, 6])
def test_a_poisoned_page_ends_its_own_request_alone_f13(clean_pages: None, value: float, max_in_flight: int, when: int):
    """F13: neighbours bit-identical, pages scrubbed, never found in the cache, right when used again."""
    prompts = prompts_of(7, [40, 23, 37, 9])
    expected = solo_ids(prompts, greedy(30))
    engine = engine_with(max_in_flight=max_in_flight)
    victim = requests_of(prompts, greedy(30))[0]
    for request in requests_of(prompts, greedy(30)):
        engine.submit(request)
    finished: dict[str, RequestOutput] = {}
    poisoned: tuple[int, ...] = ()
    for step in range(200):
        if step == when:
            poisoned = pages_of(engine, victim.request_id)
            assert poisoned
            engine.runner.poison_pages(poisoned[:1], value)
        finished |= {out.request_id: out for out in engine.step() if out.finished}
        engine.scheduler.audit()
        if not engine.has_work():
            break
    bad = finished["0"].outputs[0]
    assert bad.finish_reason == "error"
    assert bad.token_ids == expected[0][: len(bad.token_ids)]
    assert len(bad.token_ids) < 30
    for i in (1, 2, 3):
        assert finished[str(i)].outputs[0].token_ids == expected[i]
    assert engine.scheduler.stats().finished == {"error": 1, "length": 3}
    assert_idle(engine)
    again = run(engine, requests_of(prompts, greedy(30)))
    assert ids_of(again) == expected
    assert again[0].metrics.cached_tokens == 0
    assert all(np.isfinite(a).all() for a in page_values(engine, poisoned))
    assert all(np.isfinite(np.asarray(a)).all() for a in jax.tree.leaves(engine.runner._pages))


def test_a_poisoned_shared_page_is_never_found_again_f13(clean_pages: None):
    """F13: two requests share a cached prefix with a fault in it. Both end; the third computes it anew and is right."""
    (prefix,) = prompts_of(8, [3 * PAGE])
    prompts = [[*prefix, *tail] for tail in prompts_of(9, [4, 5, 6])]
    expected = solo_ids(prompts, greedy(20))
    engine = engine_with()
    run(engine, requests_of([[*prefix, 9]], greedy(2)))
    for request in requests_of(prompts[:2], greedy(20)):
        engine.submit(request)
    engine.step()
    shared = set(pages_of(engine, "0")) & set(pages_of(engine, "1"))
    assert len(shared) == 3
    engine.runner.poison_pages(tuple(sorted(shared))[1:2], float("nan"))
    outputs = []
    while engine.has_work():
        outputs += [out for out in engine.step() if out.finished]
        engine.scheduler.audit()
    assert [out.outputs[0].finish_reason for out in outputs] == ["error", "error"]
    (third,) = run(engine, requests_of(prompts[2:], greedy(20)))
    assert third.outputs[0].token_ids == expected[2]
    assert third.metrics.cached_tokens == 0
    assert_idle(engine)


def test_a_poisoned_prefill_page_is_not_cached_f13(clean_pages: None):
    """F13: the fault comes between two chunks of a prompt, before any token."""
    prompts = prompts_of(10, [100])
    expected = solo_ids(prompts, greedy(12))
    engine = engine_with()
    engine.submit(requests_of(prompts, greedy(12))[0])
    engine.step()
    engine.runner.poison_pages(pages_of(engine, "0")[:1], float("nan"))
    outputs = []
    while engine.has_work():
        outputs += [out for out in engine.step() if out.finished]
    assert outputs[0].outputs[0].finish_reason == "error"
    assert outputs[0].outputs[0].token_ids == []
    assert engine.scheduler.stats().num_pages_cached == 0
    assert ids_of(run(engine, requests_of(prompts, greedy(12)))) == expected
    assert_idle(engine)


def test_garbage_that_no_row_owns_does_no_harm(clean_pages: None):
    """The guard's other side: NaN in every page nobody holds, the null page too, changes nothing."""
    prompts = prompts_of(11, [5, 9])
    expected = solo_ids(prompts, greedy(PAGE - 9))
    engine = engine_with()
    for request in requests_of(prompts, greedy(PAGE - 9)):
        engine.submit(request)
    engine.step()
    held = set(pages_of(engine, "0")) | set(pages_of(engine, "1"))
    assert len(held) == 2
    engine.runner.poison_pages(tuple(p for p in every_page(engine) if p not in held), float("nan"))
    outputs = {}
    while engine.has_work():
        outputs |= {out.request_id: out.outputs[0].token_ids for out in engine.step() if out.finished}
    assert [outputs["0"], outputs["1"]] == expected


# Streams


def stream_all(engine: Engine, requests, deltas: queue.SimpleQueue) -> list[RequestOutput]:
    """Runs requests and puts (request id, new ids, new text) of every step on a queue."""
    seen: dict[str, tuple[int, int]] = {}
    finished: dict[str, RequestOutput] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for out in engine.step():
            ids, text = out.outputs[0].token_ids, out.outputs[0].text
            num_ids, num_chars = seen.get(out.request_id, (0, 0))
            deltas.put((out.request_id, ids[num_ids:], text[num_chars:]))
            seen[out.request_id] = (len(ids), len(text))
            if out.finished:
                finished[out.request_id] = out
    deltas.put(None)
    return [finished[request.request_id] for request in requests]


@pytest.mark.parametrize("num_streams", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_every_stream_gets_exactly_its_ids_in_order_r043(num_streams: int):
    """R043: 64 tokens each, a slow consumer in another thread; texts add up too (F16)."""
    engine = engine_with()
    prompts = prompts_of(13, [3 + i % 20 for i in range(num_streams)])
    deltas: queue.SimpleQueue = queue.SimpleQueue()
    got: dict[str, list[int]] = {}
    texts: dict[str, str] = {}

    def consume() -> None:
        while (item := deltas.get()) is not None:
            request_id, ids, text = item
            got.setdefault(request_id, []).extend(ids)
            texts[request_id] = texts.get(request_id, "") + text
            if len(got) % 50 == 0:
                time.sleep(0.001)

    consumer = threading.Thread(target=consume)
    consumer.start()
    outputs = stream_all(engine, requests_of(prompts, greedy(64)), deltas)
    consumer.join()
    for out in outputs:
        assert got[out.request_id] == out.outputs[0].token_ids
        assert texts[out.request_id] == out.outputs[0].text == shared_tiny().tokenizer.decode(got[out.request_id])
        assert len(got[out.request_id]) == 64
    some = list(range(0, num_streams, num_streams // 10))
    assert [got[str(i)] for i in some] == solo_ids([prompts[i] for i in some], greedy(64))
    assert_idle(engine)


def test_a_preempted_stream_shows_no_repeat_and_no_gap_f4_r137():
    """F4, R137: first-token time is set once; every token comes once."""
    for mode in ("recompute", "swap"):
        engine = engine_with(preemption_mode=mode)
        prompts = prompts_of(14, [20, 30, 40, 9, 50])
        requests = requests_of(prompts, greedy(40))
        before_step = preempt_every(engine, 3)
        first_times: dict[str, set[float | None]] = {}
        deltas: dict[str, list[int]] = {}
        for request in requests:
            engine.submit(request)
        step = 0
        while engine.has_work():
            before_step(step)
            step += 1
            for out in engine.step():
                got = deltas.setdefault(out.request_id, [])
                got.extend(out.outputs[0].token_ids[len(got) :])
                first_times.setdefault(out.request_id, set()).add(out.metrics.first_token_time)
        assert [deltas[r.request_id] for r in requests] == solo_ids(prompts, greedy(40))
        assert all(len(times - {None}) == 1 for times in first_times.values())
        assert engine.scheduler.stats().num_preemptions >= 5
        assert_idle(engine)


def test_outputs_of_a_step_come_once_each():
    engine = engine_with()
    for request in requests_of(prompts_of(15, [5] * 6), greedy(20, n=2)):
        engine.submit(request)
    while engine.has_work():
        changed = [out.request_id for out in engine.step()]
        assert len(changed) == len(set(changed))


def test_a_step_without_work_does_nothing():
    engine = engine_with()
    assert engine.step() == []
    assert not engine.has_work()
