"""The built-in model with pages of 8 bits: its stored answers are as likely to it as with float32 pages, or nearly.

Measured over the 344 tokens of the stored answers: mean log probability off by 0.0004 (int8) and 0.0014 (fp8).
"""

from __future__ import annotations

from typing import Any

import pytest
from engine.variants import greedy

from jaxinfer import LLM

pytestmark = [pytest.mark.weights, pytest.mark.slow]
# Of the mean log probability, and of any token's own. Float32 pages are within 1e-3 of both (see `test_golden.py`).
MEAN_OFF = {"int8": 0.005, "fp8": 0.02}
MOST_OFF = {"int8": 0.5, "fp8": 1.5}


@pytest.mark.usefixtures("has_builtin")
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_stored_answers_stay_as_likely(golden: list[dict[str, Any]], kv_dtype: str):
    llm = LLM(
        "builtin",
        use_tqdm=False,
        kv_cache_dtype=kv_dtype,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        max_model_len=256,
        warm_up=False,
    )
    texts = [[*case["prompt_token_ids"], *case["token_ids"]] for case in golden]
    outputs = llm.generate(texts, greedy(1, prompt_logprobs=0), use_tqdm=False)
    off = []
    for case, text, out in zip(golden, texts, outputs, strict=True):
        assert out.prompt_logprobs is not None
        known = [entry[token].logprob for token, entry in zip(text, out.prompt_logprobs, strict=True) if entry]
        off += [a - b for a, b in zip(known[-len(case["token_ids"]) :], case["logprobs"], strict=True)]
    assert len(off) == sum(len(case["token_ids"]) for case in golden)
    assert abs(sum(off) / len(off)) < MEAN_OFF[kv_dtype]
    assert 0.005 < max(map(abs, off)) < MOST_OFF[kv_dtype]
    page_size = llm.loaded.engine.scheduler._state.pool.page_size
    assert llm.loaded.memory.page_bytes == 30 * 2 * page_size * 3 * (
        64 + 4
    )  # 30 layers, 3 KV heads of 64, a scale each
