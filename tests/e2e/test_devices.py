"""The same tokens on every mesh: four virtual CPU devices, divided over "data" and "model".

Two KV heads divide over two devices and are replicated on four; the real model's three never divide.
"""

from __future__ import annotations

from typing import Any

import pytest
from engine.variants import (
    assert_idle,
    greedy,
    ids_of,
    preempt_every,
    prompts_of,
    requests_of,
    run,
    shared_tiny,
    variant,
)
from tiny import tiny_engine, tiny_request

from jaxinfer import LLM
from jaxinfer.errors import ConfigError
from jaxinfer.request import Request, SamplingParams

PROMPTS = prompts_of(51, [3, 40, 17, 1, 33, 9])


def some_requests() -> list[Request]:
    """Greedy and seeded, with a chunked prompt and choices."""
    sampled = SamplingParams(max_tokens=12, top_p=0.9, n=2, ignore_eos=True)
    return [
        *requests_of(PROMPTS, greedy(16)),
        *(tiny_request(f"s{i}", prompt, sampled, seed=i) for i, prompt in enumerate(PROMPTS)),
    ]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    outputs = run(variant(shared_tiny()).engine, some_requests())
    return ids_of(outputs) + ids_of(outputs[len(PROMPTS) :], 1)


@pytest.mark.parametrize(
    ("data", "model"),
    [
        (1, 2),
        pytest.param(1, 4, marks=pytest.mark.slow),
        pytest.param(2, 1, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
    ],
)
def test_every_mesh_gives_the_same_tokens(expected: list[list[int]], data: int, model: int):
    """Programs are compiled when first used here: a mesh costs a start each."""
    loaded = tiny_engine(data=data, model=model, max_num_seqs=2, max_num_batched_tokens=16, warm_up=False)
    assert loaded.rules.mesh.devices.shape == (data, model)
    outputs = run(loaded.engine, some_requests())
    assert ids_of(outputs) + ids_of(outputs[len(PROMPTS) :], 1) == expected
    pages = loaded.engine.runner._pages[0][0]
    assert len(pages.sharding.device_set) == data * model
    divided = model if loaded.arch.num_kv_heads % model == 0 else 1
    assert pages.sharding.shard_shape(pages.shape)[1] == loaded.arch.num_kv_heads // divided
    assert_idle(loaded.engine)


@pytest.mark.slow
def test_preemption_on_two_devices_gives_the_same_tokens(expected: list[list[int]]):
    """Pages divided by heads leave for the host and come back, or are computed again."""
    loaded = tiny_engine(model=2, max_num_seqs=4, max_num_batched_tokens=16, warm_up=False)
    for mode in ("recompute", "swap"):
        engine = variant(loaded, preemption_mode=mode, rounds_per_dispatch=1).engine
        outputs = run(engine, some_requests(), before_step=preempt_every(engine, 2))
        assert ids_of(outputs) + ids_of(outputs[len(PROMPTS) :], 1) == expected
        stats = engine.scheduler.stats()
        assert stats.num_preemptions > 5
        assert (stats.num_swap_outs > 0) == (mode == "swap")
        assert_idle(engine)


def test_more_devices_than_there_are_is_refused_with_numbers():
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size 4 x data_parallel_size 2 needs 8 devices; there are 4"
    ):
        tiny_engine(model=4, data=2)


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.usefixtures("has_builtin")
@pytest.mark.parametrize("size", [2, 4])
def test_the_real_model_on_several_devices_gives_the_golden_answers(golden: list[dict[str, Any]], size: int):
    llm = LLM(
        "builtin",
        use_tqdm=False,
        tensor_parallel_size=size,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=256,
        warm_up=False,
    )
    params = [greedy(len(case["token_ids"]), ignore_eos=False) for case in golden]
    outputs = llm.generate([case["prompt_token_ids"] for case in golden], params, use_tqdm=False)
    assert ids_of(outputs) == [case["token_ids"] for case in golden]
