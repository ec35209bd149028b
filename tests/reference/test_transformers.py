"""The built-in model beside transformers in float32, computed anew: `make test-reference` (torch, transformers).

The committed and shared golden files come from the same library; this test finds out when they, or it, have changed.
"""

import json

import numpy as np
import pytest

from checkpoints.builtin import find_builtin
from jaxinfer import LLM, SamplingParams
from jaxinfer.config import cache_folder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# transformers and torch warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

NUM_PROMPTS = 12
NUM_TOKENS = 24
# Two float32 programs of 30 layers differ by up to 4e-5 in a log probability here; a wrong mask or weight by far more.
TOLERANCE = 1e-3
# Below this gap between the two best logits, rounding may choose: the comparison of that prompt ends there.
TIE = 1e-4


@pytest.fixture(scope="module")
def model():
    path = find_builtin(cache_folder())
    if path is None:
        pytest.skip("the built-in model is not there: python -m jaxinfer.fetch")
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(str(path.parent), gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm():
    return LLM("builtin", dtype="float32", max_num_seqs=8, use_tqdm=False)


def greedy(model, ids):
    """Ids, their log probabilities, and the gap between the two best logits at each step."""
    found, logprobs, gaps = [], [], []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(torch.tensor([ids + found])).logits[0, -1].double()
            best = torch.topk(logits, 2)
            found.append(int(best.indices[0]))
            logprobs.append(float(torch.log_softmax(logits, -1)[found[-1]]))
            gaps.append(float(best.values[0] - best.values[1]))
    return found, logprobs, gaps


def test_greedy_ids_and_logprobs_equal_transformers(model, llm, shared):
    lines = (shared / "data" / "eval_text.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines[:: len(lines) // NUM_PROMPTS]][:NUM_PROMPTS]
    prompts = [llm.get_tokenizer().encode(text)[: 8 + 9 * i] for i, text in enumerate(texts)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    compared = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        ids, logprobs, gaps = greedy(model, prompt)
        num_sure = next((i for i, gap in enumerate(gaps) if gap < TIE), NUM_TOKENS)
        answer = output.outputs[0]
        assert answer.token_ids[:num_sure] == ids[:num_sure]
        ours = [next(iter(entry.values())).logprob for entry in answer.logprobs or []]
        np.testing.assert_allclose(ours[:num_sure], logprobs[:num_sure], atol=TOLERANCE, rtol=0)
        compared += num_sure
    assert compared > 0.9 * NUM_PROMPTS * NUM_TOKENS
