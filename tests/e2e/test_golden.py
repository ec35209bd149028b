"""The built-in model's greedy answers are those of transformers, token for token, whatever the engine does meanwhile.

Stored answers: shared/data/golden_smollm2.json and shared/peers/workload_ids.json, both made with transformers in
float32; how to remake them is written in the README files beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine.variants import assert_idle, greedy, ids_of, preempt_every, requests_of, run, variant, variant_llm

from jaxinfer import LLM, SamplingParams

pytestmark = pytest.mark.weights

LOGPROB_TOLERANCE = 1e-3  # stored with 5 decimals; float32 sums in another order differ by some 1e-5 over 30 layers
Case = dict[str, Any]

PARAMS = SamplingParams(temperature=0.0, max_tokens=48, logprobs=0)


def prompts(golden: list[Case]) -> list[list[int]]:
    return [case["prompt_token_ids"] for case in golden]


def expected_ids(golden: list[Case]) -> list[list[int]]:
    return [case["token_ids"] for case in golden]


def assert_golden(case: Case, answer: Any) -> None:
    """Ids, text and log probabilities of one stored case, as far as the answer goes."""
    assert answer.token_ids == case["token_ids"][: len(answer.token_ids)]
    assert answer.text == case["text"]
    found = [answer.logprobs[i][token_id].logprob for i, token_id in enumerate(answer.token_ids)]
    assert max(abs(a - b) for a, b in zip(found, case["logprobs"], strict=True)) < LOGPROB_TOLERANCE
    assert answer.cumulative_logprob == pytest.approx(sum(found))


def lengths(golden: list[Case]) -> list[SamplingParams]:
    """Each case to its own stored length."""
    return [greedy(len(case["token_ids"]), logprobs=0, ignore_eos=False) for case in golden]


def test_prompts_are_tokenized_as_stored_and_chats_have_one_bos_a_message_r102_r164(real: LLM, golden: list[Case]):
    """R102: no second BOS before a chat; R164: the ids of plain prompts."""
    for case in golden:
        if case["kind"] == "chat":
            ids = real.loaded.chat_template().render_ids(case["messages"])
            # The template adds a system message of its own where the chat has none; then the generation prompt.
            num_messages = len(case["messages"]) + (case["messages"][0]["role"] != "system")
            assert ids.count(1) == num_messages + 1
            assert ids[0] == 1
            assert ids[1] != 1
        else:
            ids = real.get_tokenizer().encode(case["prompt"])
        assert ids == case["prompt_token_ids"]


def test_golden_answers_in_one_batch_with_log_probabilities_r166(real: LLM, golden: list[Case]):
    """R166: the file has no output.weight; the head is the embedding."""
    for case, out in zip(golden, real.generate(prompts(golden), lengths(golden), use_tqdm=False), strict=True):
        assert_golden(case, out.outputs[0])


def test_golden_texts_through_text_prompts_and_chat(real: LLM, golden: list[Case]):
    for case in [golden[0], golden[-1]]:
        params = greedy(12)
        if case["kind"] == "chat":
            (out,) = real.chat(case["messages"], params, use_tqdm=False)
        else:
            (out,) = real.generate(case["prompt"], params, use_tqdm=False)
        assert out.prompt_token_ids == case["prompt_token_ids"]
        assert out.outputs[0].token_ids == case["token_ids"][:12]
        assert case["text"].startswith(out.outputs[0].text)


@pytest.mark.slow
def test_golden_answers_alone(real: LLM, golden: list[Case]):
    for case, params in zip(golden, lengths(golden), strict=True):
        (out,) = real.generate([case["prompt_token_ids"]], params, use_tqdm=False)
        assert_golden(case, out.outputs[0])


@pytest.mark.slow
def test_both_choices_of_every_golden_request_are_the_golden_answer(real: LLM, golden: list[Case]):
    params = [greedy(len(c["token_ids"]), n=2, ignore_eos=False) for c in golden]
    outputs = real.generate(prompts(golden), params, use_tqdm=False)
    assert ids_of(outputs) == ids_of(outputs, 1) == expected_ids(golden)


@pytest.mark.slow
def test_the_whole_workload_at_once(real: LLM, shared: Path):
    """32 requests of real text, exact ids of transformers and vLLM."""
    work = json.loads((shared / "peers" / "workload.json").read_text())
    expected = json.loads((shared / "peers" / "workload_ids.json").read_text())
    params = [greedy(w["max_tokens"], ignore_eos=w["ignore_eos"]) for w in work]
    traces = real.loaded.compile_counter.num_traces
    outputs = real.generate([w["prompt_token_ids"] for w in work], params, use_tqdm=False)
    wrong = [w["id"] for w, out in zip(work, outputs, strict=True) if out.outputs[0].token_ids != expected[w["id"]]]
    assert not wrong
    assert real.loaded.compile_counter.num_traces == traces
    assert_idle(real.loaded.engine)


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "budget", "attention"), [(16, 32, "xla"), (32, 128, "auto"), (64, 64, "xla")])
@pytest.mark.usefixtures("has_builtin")
def test_golden_answers_for_any_page_size_and_chunk_budget(
    golden: list[Case], page_size: int, budget: int, attention: str
):
    """Prompts of up to 39 tokens come in chunks here; pages end inside prompts and inside answers."""
    sizes = {"page_size": page_size, "max_num_seqs": 8, "max_num_batched_tokens": budget, "max_model_len": 512}
    llm = LLM("builtin", use_tqdm=False, attention=attention, **sizes)
    for case, out in zip(golden, llm.generate(prompts(golden), lengths(golden), use_tqdm=False), strict=True):
        assert_golden(case, out.outputs[0])
    again = llm.generate(prompts(golden), lengths(golden), use_tqdm=False)
    assert ids_of(again) == expected_ids(golden)
    assert all(out.metrics.cached_tokens == (len(out.prompt_token_ids) - 1) // page_size * page_size for out in again)
    assert_idle(llm.loaded.engine)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("every", [1, 3])
def test_golden_answers_under_forced_preemption(real: LLM, golden: list[Case], mode: str, every: int):
    engine = variant(real.loaded, preemption_mode=mode, rounds_per_dispatch=2).engine
    requests = [
        request
        for i, (case, params) in enumerate(zip(golden, lengths(golden), strict=True))
        for request in requests_of([case["prompt_token_ids"]], params, request_id=str(i))
    ]
    outputs = run(engine, requests, before_step=preempt_every(engine, every))
    for case, out in zip(golden, outputs, strict=True):
        assert_golden(case, out.outputs[0])
    stats = engine.scheduler.stats()
    assert stats.num_preemptions >= 4
    assert (stats.num_swap_outs > 0) == (mode == "swap")
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_golden_answers_with_a_chunk_budget_of_one_token_per_slot(real: LLM, golden: list[Case], max_in_flight: int):
    """32 query tokens a step for all prompts and answers together."""
    llm = variant_llm(real.loaded, max_num_batched_tokens=32, max_in_flight=max_in_flight)
    outputs = llm.generate(prompts(golden), lengths(golden), use_tqdm=False)
    assert ids_of(outputs) == expected_ids(golden)


@pytest.mark.slow
def test_prefix_hits_with_every_kind_of_tail(real: LLM, shared: Path):
    """A prompt of the workload cut to leave 0, 1 and page - 1 tokens after its last full page."""
    work = json.loads((shared / "peers" / "workload.json").read_text())
    page = real.loaded.engine.scheduler._state.pool.page_size
    source = max(work, key=lambda w: len(w["prompt_token_ids"]))["prompt_token_ids"]
    for tail in (0, 1, page - 1):
        prompt = source[: 3 * page + tail]
        cold = variant_llm(real.loaded, enable_prefix_caching=False).generate([prompt], greedy(16), use_tqdm=False)
        llm = variant_llm(real.loaded)
        llm.generate([prompt[: 3 * page + 1]], greedy(1), use_tqdm=False)
        for _ in range(2):
            (hit,) = llm.generate([prompt], greedy(16), use_tqdm=False)
            assert hit.metrics.cached_tokens == (len(prompt) - 1) // page * page
            assert hit.outputs[0].token_ids == ids_of(cold)[0]
