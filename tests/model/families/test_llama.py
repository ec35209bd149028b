"""The family `llama` from GGUF: sizes, every refusal, the order of query and key rows, and a whole file end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import write_gguf
from oracle import Oracle
from tiny import VOCAB_SIZE, run_greedy, tiny_architecture, tiny_mesh, tiny_metadata, tiny_params

from checkpoints import GGUFFile
from jaxinfer.config import EngineConfig
from jaxinfer.engine import load
from jaxinfer.errors import CheckpointError, JaxInferError
from jaxinfer.model import Architecture
from jaxinfer.model.families import gguf_architecture, gguf_weight

SIZES: dict[str, Any] = {
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.feed_forward_length": 128,
    "llama.context_length": 256,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}


def _architecture(changes: dict[str, Any] | None = None, tensors: tuple[str, ...] = ()) -> Architecture:
    """From plain metadata; None removes a key."""
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": ["a"] * 512, **SIZES, **(changes or {})}

    def find(key, kind):
        value = metadata.get(key)
        assert value is None or type(value) is kind, (key, value, kind)
        return value

    def require(key, kind):
        value = find(key, kind)
        if value is None:
            raise CheckpointError(f"{key}: missing")
        return value

    return gguf_architecture(require, find, tensors, "some.gguf")


def test_sizes_come_from_the_metadata():
    got = _architecture(tensors=("output.weight",))
    assert got == tiny_architecture(rms_norm_eps=1e-5, rope_theta=10000.0, is_tied=False)


def test_absent_metadata_have_llamas_defaults():
    got = _architecture({"llama.attention.head_count_kv": None, "llama.rope.freq_base": None})
    assert (got.num_kv_heads, got.rope_theta, got.head_dim) == (4, 10000.0, 16)
    assert _architecture({"llama.attention.key_length": 32}).head_dim == 32


def test_without_an_output_tensor_the_head_is_the_embedding():
    """R166."""
    assert _architecture().is_tied
    assert not _architecture(tensors=("token_embd.weight", "output.weight")).is_tied


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"general.architecture": "gemma"}, (), r"general\.architecture is 'gemma'; this version runs: llama"),
        ({"llama.attention.head_count": 5}, (), "5 heads, 2 KV heads and width 64 do not fit together"),
        ({"llama.attention.head_count_kv": 3}, (), "4 heads, 3 KV heads and width 64 do not fit together"),
        ({"llama.embedding_length": 66}, (), "4 heads, 2 KV heads and width 66 do not fit together"),
        ({"llama.attention.head_count": 0}, (), "0 heads"),
        ({"llama.embedding_length": 0}, (), "width 0"),
        ({"llama.expert_count": 8}, (), r"llama\.expert_count: mixtures of experts are not supported"),
        ({"llama.rope.scaling.type": "linear"}, (), r"llama\.rope\.scaling\.type: rotary scaling .* is not supported"),
        ({}, ("rope_freqs.weight",), r"rope_freqs\.weight: rotary scaling .* is not supported"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, tensors, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        _architecture(changes, tensors)
    assert str(caught.value).startswith("some.gguf: ")


@pytest.mark.parametrize(
    "key", [key for key in SIZES if key not in ("llama.attention.head_count_kv", "llama.rope.freq_base")]
)
def test_a_missing_size_is_named(key):
    with pytest.raises(CheckpointError, match=key):
        _architecture({key: None})


def test_rotary_scaling_of_type_none_is_no_scaling():
    assert _architecture({"llama.rope.scaling.type": "none"}).rope_scaling is None


def test_an_odd_head_dim_is_the_files_fault():
    with pytest.raises(JaxInferError):
        _architecture({"llama.attention.key_length": 15})


@pytest.mark.parametrize("change", [{"llama.rope.dimension_count": 8}, {"llama.rope.scale_linear": 4.0}])
def test_rotary_embedding_of_another_kind_is_refused(change):
    with pytest.raises(CheckpointError):
        _architecture(change)


def gguf_tensors(oracle: Oracle) -> dict[str, np.ndarray]:
    """The oracle's weights as a GGUF file has them: [out, in], query and key rows of a head interleaved.

    llama.cpp's converter: row 2 i of a head is row i of the original, row 2 i + 1 is row i + H / 2.
    """
    arch, w = oracle.arch, oracle.weights
    half = arch.head_dim // 2
    tensors = {"token_embd.weight": w["top.embedding"], "output_norm.weight": w["top.norm.weight"]}
    if not arch.is_tied:
        tensors["output.weight"] = w["top.head"]

    def interleaved(head_HD):
        out_HD = np.empty_like(head_HD)
        for i in range(half):
            out_HD[2 * i], out_HD[2 * i + 1] = head_HD[i], head_HD[i + half]
        return out_HD

    for layer in range(arch.num_layers):
        mine, its = f"layers.{layer}.", f"blk.{layer}."
        qkv = oracle.heads_of(layer)
        q, k, v = [], [], []
        for kv_head in range(arch.num_kv_heads):
            for g in range(arch.group_size):
                q.append(interleaved(qkv[kv_head, g].T))
            k.append(interleaved(qkv[kv_head, arch.group_size].T))
            v.append(qkv[kv_head, arch.group_size + 1].T)
        for name, rows in (("attn_q", q), ("attn_k", k), ("attn_v", v)):
            tensors[f"{its}{name}.weight"] = np.concatenate(rows)
        tensors[f"{its}attn_output.weight"] = w[mine + "attention.out.weight"].T
        gate_DF, up_DF = oracle.gate_and_up_of(layer)
        tensors[f"{its}ffn_gate.weight"], tensors[f"{its}ffn_up.weight"] = gate_DF.T, up_DF.T
        tensors[f"{its}ffn_down.weight"] = w[mine + "mlp.down.weight"].T
        tensors[f"{its}attn_norm.weight"] = w[mine + "attention_norm.weight"]
        tensors[f"{its}ffn_norm.weight"] = w[mine + "mlp_norm.weight"]
    return {name: np.ascontiguousarray(value, np.float32) for name, value in tensors.items()}


def write_tiny(path: Path, oracle: Oracle) -> Path:
    tensors = {name: (value, "F32") for name, value in gguf_tensors(oracle).items()}
    return write_gguf(path, {**SIZES, **tiny_metadata()}, tensors)


def tiny_oracle(**changes: Any) -> Oracle:
    """Random weights, norms among them."""
    arch = tiny_architecture(**changes)
    oracle = Oracle.of(tiny_params(arch, tiny_mesh()), arch)
    rng = np.random.default_rng(3)
    for name, value in oracle.weights.items():
        if "norm" in name:
            value[:] = rng.uniform(0.5, 1.5, value.shape).astype(np.float32)
    return oracle


@pytest.mark.parametrize("order", ["in_out", "out_in"])
def test_weights_are_put_back_in_order(tmp_path, order):
    """Through the file, against the original rows."""
    oracle = tiny_oracle(is_tied=False)
    file = GGUFFile.open(write_tiny(tmp_path / "tiny.gguf", oracle))
    for name, value in oracle.weights.items():
        got = gguf_weight(oracle.arch, name, file.load, order)
        if order == "out_in" and name.split(".")[-2] in ("qkv", "out", "gate_up", "down"):
            value = value.T
        assert got.dtype == np.float32
        assert got.flags.c_contiguous
        assert np.array_equal(got, value), name


def test_the_architecture_of_a_file_is_the_one_it_was_written_from(tmp_path):
    oracle = tiny_oracle(is_tied=True)
    file = GGUFFile.open(write_tiny(tmp_path / "tiny.gguf", oracle))
    got = gguf_architecture(file.require, file.find, file.tensors, "tiny.gguf")
    assert got == tiny_architecture(is_tied=True, rms_norm_eps=float(np.float32(1e-5)))


@pytest.mark.parametrize(("is_tied", "order"), [(True, "in_out"), (False, "out_in")])
def test_a_loaded_file_writes_the_oracles_text(tmp_path, monkeypatch, is_tied, order):
    """R166: from the file to greedy text, token for token, with and without an output tensor."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "choose_weight_order", lambda *args: order)
    oracle = tiny_oracle(is_tied=is_tied, rms_norm_eps=float(np.float32(1e-5)))
    path = write_tiny(tmp_path / "tiny.gguf", oracle)
    loaded = load.load_engine(
        EngineConfig.from_flat(
            model=str(path), compilation_cache="", warm_up=False, page_size=8, max_num_seqs=1, max_num_batched_tokens=16
        )
    )
    assert loaded.arch == oracle.arch
    assert loaded.tokenizer.vocab_size == VOCAB_SIZE
    prompt = [40, 41, 300, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22]
    want = oracle.greedy(prompt, 12)
    assert want.smallest_gap > 1e-3, "the oracle itself must be sure"
    (output,) = run_greedy(loaded, [prompt], max_tokens=12, logprobs=0)
    assert tuple(output.outputs[0].token_ids) == want.token_ids
    got = [entry[token].logprob for entry, token in zip(output.outputs[0].logprobs, want.token_ids, strict=True)]
    np.testing.assert_allclose(got, want.logprobs, atol=2e-5)


def test_a_tensor_of_another_shape_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "choose_weight_order", lambda *args: "in_out")
    oracle = tiny_oracle(is_tied=True)
    tensors = {name: (value, "F32") for name, value in gguf_tensors(oracle).items()}
    tensors["output_norm.weight"] = (np.ones(32, np.float32), "F32")
    path = write_gguf(tmp_path / "bad.gguf", {**SIZES, **tiny_metadata()}, tensors)
    with pytest.raises(CheckpointError, match=r"top\.norm\.weight has shape \(32,\); the architecture needs \(64,\)"):
        load.load_engine(EngineConfig.from_flat(model=str(path), compilation_cache=""))


@pytest.mark.parametrize(
    "name",
    [
        "blk.1.ffn_down.weight",
        "blk.0.attn_q.weight",
    ],
)
def test_a_matrix_of_another_size_is_a_checkpoint_error(tmp_path, monkeypatch, name):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "choose_weight_order", lambda *args: "in_out")
    oracle = tiny_oracle(is_tied=True)
    tensors = {key: (value, "F32") for key, value in gguf_tensors(oracle).items()}
    tensors[name] = (tensors[name][0][:32], "F32")
    path = write_gguf(tmp_path / "bad.gguf", {**SIZES, **tiny_metadata()}, tensors)
    with pytest.raises(CheckpointError):
        load.load_engine(EngineConfig.from_flat(model=str(path), compilation_cache=""))


@pytest.mark.parametrize(
    "change",
    [
        {"llama.block_count": 3},
        {"llama.block_count": 0},
    ],
)
def test_a_file_without_the_layers_it_names_is_refused(tmp_path, monkeypatch, change):
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load, "choose_weight_order", lambda *args: "in_out")
    tensors = {key: (value, "F32") for key, value in gguf_tensors(tiny_oracle(is_tied=True)).items()}
    path = write_gguf(tmp_path / "bad.gguf", {**SIZES, **change, **tiny_metadata()}, tensors)
    with pytest.raises(CheckpointError):
        load.load_engine(EngineConfig.from_flat(model=str(path), compilation_cache="", warm_up=False))
