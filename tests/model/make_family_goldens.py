"""Makes `goldens/<name>.npz`: tiny random models of each family, and transformers' own logits of them in float32.

    python tests/model/make_family_goldens.py          # needs torch and transformers: `make test-reference` has them

Each file holds `config` (what transformers writes to config.json), every weight by its Hugging Face name, for each
sequence i `ids_<i>` and `logits_<i>` [T, V], and in `greedy` the likeliest tokens behind `prompt`. Weights are rounded
to float16 and stored so, which halves the files; the model computed with the rounded ones. Sizes are odd on purpose,
windows shorter than the sequences, caps and scalings near enough to the values met that leaving one out shows.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FOLDER = Path(__file__).parent / "goldens"
VOCAB_SIZE = 101
LENGTHS = (45, 23)
NUM_PROMPT, NUM_GREEDY = 9, 48
SMALLEST_GAP = 1e-3  # of the two best logits; two float32 programs differ by 1e-5
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 36,
    "intermediate_size": 54,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "llama",
        {
            "num_hidden_layers": 2,
            "head_dim": 10,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": LLAMA3_ROPE,
        },
    ),
    "smollm2": (
        "llama",
        {
            "num_hidden_layers": 2,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        },
    ),
    "qwen2": (
        "qwen2",
        {
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 11,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "qwen3": (
        "qwen3",
        {
            "num_hidden_layers": 2,
            "head_dim": 14,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "gemma2": (
        "gemma2",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 7,
            "sliding_window": 7,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
        },
    ),
}


def make(name: str) -> dict[str, np.ndarray]:
    """The arrays of one file."""
    model, random = random_model(name)
    arrays = {"config": np.array(model.config.to_json_string())}
    arrays |= {key: value.detach().numpy().astype(np.float16) for key, value in sorted(model.named_parameters())}
    for i, length in enumerate(LENGTHS):
        ids = random.integers(3, VOCAB_SIZE, length).astype(np.int32)
        with torch.inference_mode():
            logits_TV = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        arrays |= {f"ids_{i}": ids, f"logits_{i}": logits_TV.numpy()}
    return arrays | greedy(model, arrays["ids_1"].tolist())


def greedy(model: Any, ids: list[int]) -> dict[str, np.ndarray]:
    """The first part of `ids` whose likeliest continuation is nowhere in doubt, and that continuation."""
    for start in range(len(ids) - NUM_PROMPT):
        prompt = ids[start : start + NUM_PROMPT]
        tokens, gap = list(prompt), math.inf
        while len(tokens) < NUM_PROMPT + NUM_GREEDY and gap >= SMALLEST_GAP:
            with torch.inference_mode():
                best = torch.topk(model(torch.tensor([tokens])).logits[0, -1], 2)
            gap = float(best.values[0] - best.values[1])
            tokens.append(int(best.indices[0]))
        if gap >= SMALLEST_GAP:
            return {"prompt": np.array(prompt, np.int32), "greedy": np.array(tokens[NUM_PROMPT:], np.int32)}
    raise ValueError("two tokens are almost equally likely in every continuation: draw other weights")


def random_model(name: str) -> tuple[Any, np.random.Generator]:
    """transformers' model in float32 with weights that float16 holds, and the generator that made them."""
    kind, changes = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    random = np.random.default_rng(sum(map(ord, name)))
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            value = draw(random, key, tuple(parameter.shape), config).astype(np.float16)
            parameter.copy_(torch.from_numpy(value.astype(np.float32)))
    return model, random


def draw(random: np.random.Generator, key: str, shape: tuple[int, ...], config: Any) -> np.ndarray:
    """Values spread as a trained model's are: each product keeps its input's scale, norms and biases matter."""
    normal = random.standard_normal(shape)
    if "norm" in key:
        return 0.3 * normal + (0.0 if config.model_type == "gemma2" else 1.0)
    if key.endswith("bias"):
        return 0.5 * normal
    if "embed" in key and not config.tie_word_embeddings:
        return normal
    return 1.4 * normal / math.sqrt(shape[1])


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or MODELS:
        arrays = make(name)
        np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
        size = (FOLDER / f"{name}.npz").stat().st_size
        logits = arrays["logits_0"]
        model_type = json.loads(str(arrays["config"]))["model_type"]
        print(
            f"{name}: {model_type}, {size} bytes, logits of deviation {logits.std():.2f}, up to {abs(logits).max():.1f}"
        )


if __name__ == "__main__":
    main()
