"""Model T: a two-layer decoder with random weights and a 512-token vocabulary, for tests of everything above it.

    loaded = shared_engine()                         # compiled once per test run; `tiny_engine()` makes a new one
    outputs = run_greedy(loaded, [[10, 11], [12]], max_tokens=8)

Its weights come from one seed and are the same on every mesh.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from text.small_vocabulary import CONTROL, MERGES, USER_DEFINED, small_metadata, spelling

from jaxinfer.config import EngineConfig
from jaxinfer.engine.load import LoadedEngine, build_engine, make_mesh
from jaxinfer.model import Architecture, Decoder, MeshRules, ModelParams, random_params
from jaxinfer.request import Request, RequestOutput, SamplingParams
from jaxinfer.text import Tokenizer
from jaxinfer.text.byte_level import BYTE_TO_CHAR

VOCAB_SIZE = 512
MAX_POSITIONS = 256
EMBEDDING_SCALE = 20.0  # without it greedy text falls into a loop of two or three tokens
TIED_SCALE = 3.0  # of a table that is both: a larger one repeats its input
HEAD_SCALE = 10.0  # without it logits are all but equal


def tiny_architecture(**changes: Any) -> Architecture:
    """Sizes of model T; `changes` replace fields."""
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "num_layers": 2,
        "hidden_size": 64,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "max_positions": MAX_POSITIONS,
        "is_tied": False,
    }
    return Architecture(**(fields | changes))


def tiny_mesh(data: int = 1, model: int = 1) -> MeshRules:
    """A mesh of the first data x model devices."""
    return MeshRules(make_mesh(EngineConfig.from_flat(data_parallel_size=data, tensor_parallel_size=model)))


def tiny_params(
    arch: Architecture, rules: MeshRules, *, order: str = "in_out", dtype: Any = jnp.float32, seed: int = 0
) -> ModelParams:
    """Random parameters whose logits spread over several nats, so that greedy text varies."""
    params = random_params(functools.partial(_decoder, arch, order, dtype), rules, seed)
    scales = {"embedding": TIED_SCALE} if arch.is_tied else {"embedding": EMBEDDING_SCALE, "head": HEAD_SCALE}
    for name, scale in scales.items():
        leaf = params.top[name]
        value = leaf.get_value()
        params.top[name] = leaf.replace(jax.device_put(value * jnp.asarray(scale, value.dtype), value.sharding))
    return params


@functools.cache
def tiny_tokenizer() -> Tokenizer:
    """The tokenizer of `tiny_metadata`; every id has a text."""
    return Tokenizer.from_gguf_metadata(tiny_metadata(), "tiny.gguf")


def tiny_metadata() -> dict[str, Any]:
    """`small_metadata` with pairs of letters merged as well, up to 512 tokens."""
    num_pairs = VOCAB_SIZE - len(CONTROL) - len(USER_DEFINED) - 256 - len(MERGES)
    known = {a + b for a, b in MERGES}
    letters = [bytes([c]) for c in b"acefgjkmnopqrsuvxyz"]
    pairs = [(a, b) for a in letters for b in letters if a + b not in known]
    merges = [*MERGES, *pairs[:num_pairs]]
    return small_metadata(
        tokens=[*CONTROL, *USER_DEFINED, *BYTE_TO_CHAR, *(spelling(a + b) for a, b in merges)],
        token_type=[3] * len(CONTROL) + [4] * len(USER_DEFINED) + [1] * (256 + len(merges)),
        merges=[f"{spelling(a)} {spelling(b)}" for a, b in merges],
    )


def tiny_engine(
    *,
    arch: Architecture | None = None,
    order: str = "in_out",
    dtype: Any = jnp.float32,
    weight_seed: int = 0,
    data: int = 1,
    model: int = 1,
    max_in_flight: int = 2,
    params: ModelParams | None = None,
    **options: Any,
) -> LoadedEngine:
    """A ready engine around model T.

    Args:
      arch: None for `tiny_architecture()`.
      weight_seed: of the weights; `seed` is the engine's own.
      data, model: mesh sizes; there are four virtual devices.
      params: weights to use instead of random ones.
      **options: fields of `EngineConfig`'s parts: page_size, num_pages, preemption_mode, rounds_per_dispatch,
        max_num_seqs, max_num_batched_tokens, enable_prefix_caching, max_model_len, attention, warm_up and others.
    """
    defaults = {"page_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32, "rounds_per_dispatch": 4}
    config = EngineConfig.from_flat(
        data_parallel_size=data,
        tensor_parallel_size=model,
        compilation_cache="",
        **(defaults | options),
    )
    arch = arch or tiny_architecture()
    rules = MeshRules(make_mesh(config))
    if params is None:
        params = tiny_params(arch, rules, order=order, dtype=dtype, seed=weight_seed)
    return build_engine(config, arch, params, tiny_tokenizer(), rules, max_in_flight=max_in_flight)


@functools.cache
def shared_engine(**options: Any) -> LoadedEngine:
    """One `tiny_engine` per set of options for the whole test run: compiling takes seconds.

    For tests that leave it idle, and that do not mind a prefix cache filled by others. Its pool, of 32 MiB unless asked
    for otherwise, is far larger than anything else in it, so that a program that copied it would be found out.
    """
    return tiny_engine(**({"num_pages": 4096} | options))


def tiny_request(request_id: str, prompt: Sequence[int], params: SamplingParams, *, seed: int = 0) -> Request:
    """A request of token ids."""
    return Request(
        request_id=request_id, prompt_token_ids=tuple(prompt), params=params, seed=seed, arrival_time=time.monotonic()
    )


def run_all(loaded: LoadedEngine, requests: Sequence[Request]) -> list[RequestOutput]:
    """Submits the requests together and turns the loop until all have finished; outputs in their order."""
    for request in requests:
        loaded.engine.submit(request)
    finished: dict[str, RequestOutput] = {}
    while loaded.engine.has_work():
        finished |= {out.request_id: out for out in loaded.engine.step() if out.finished}
    return [finished[request.request_id] for request in requests]


def run_greedy(
    loaded: LoadedEngine, prompts: Sequence[Sequence[int]], *, max_tokens: int = 16, **params: Any
) -> list[RequestOutput]:
    """Greedy outputs of prompts run together; end-of-sequence ids are ignored unless `params` say otherwise."""
    sampling = SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | params))
    return run_all(loaded, [tiny_request(f"tiny-{i}", prompt, sampling) for i, prompt in enumerate(prompts)])


def _decoder(arch: Architecture, order: str, dtype: Any, rngs: Any) -> Decoder:
    return Decoder(arch, order=order, dtype=dtype, rngs=rngs)
