"""From a file to a ready engine: model T written as a GGUF file comes back as itself; what cannot work says why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine.variants import ids_of, prompts_of
from gguf_files import write_gguf
from oracle import Oracle
from text.small_vocabulary import small_metadata
from tiny import run_greedy, tiny_architecture, tiny_mesh, tiny_params, tiny_tokenizer

from jaxinfer import LLM
from jaxinfer.config import EngineConfig
from jaxinfer.engine.load import LoadedEngine, load_engine
from jaxinfer.errors import CheckpointError, ConfigError

ARCH = tiny_architecture()
SMALL: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "warm_up": False, "compilation_cache": ""}


@pytest.fixture(autouse=True)
def own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What loading writes down goes to a folder of the test's own."""
    monkeypatch.setenv("JAXINFER_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle.of(tiny_params(ARCH, tiny_mesh()), ARCH)


def tiny_metadata(**changes: Any) -> dict[str, Any]:
    """Model T's sizes and vocabulary; `changes` replace fields, None removes one."""
    vocabulary = tiny_tokenizer()._vocabulary
    fields = small_metadata(
        tokens=list(vocabulary.tokens),
        token_type=[int(kind) for kind in vocabulary.token_types],
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in vocabulary.merges],
    ) | {
        "llama.block_count": ARCH.num_layers,
        "llama.context_length": ARCH.max_positions,
        "llama.embedding_length": ARCH.hidden_size,
        "llama.feed_forward_length": ARCH.intermediate_size,
        "llama.attention.head_count": ARCH.num_heads,
        "llama.attention.head_count_kv": ARCH.num_kv_heads,
        "llama.attention.key_length": ARCH.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(ARCH.rms_norm_eps),
        "llama.rope.freq_base": float(ARCH.rope_theta),
    }
    return {name: value for name, value in (fields | changes).items() if value is not None}


def pairs(rows_XD: np.ndarray) -> np.ndarray:
    """Rows of heads from halves to neighbouring pairs, as GGUF stores queries and keys."""
    return rows_XD.reshape(-1, 2, ARCH.head_dim // 2, rows_XD.shape[-1]).swapaxes(1, 2).reshape(rows_XD.shape)


def tiny_tensors(oracle: Oracle) -> dict[str, tuple[np.ndarray, str]]:
    """Model T's weights under their names in a GGUF file, [out, in]."""
    w, group, width = oracle.weights, ARCH.group_size, ARCH.hidden_size
    tensors = {
        "token_embd.weight": w["top.embedding"],
        "output_norm.weight": w["top.norm.weight"],
        "output.weight": w["top.head"],
    }
    for i in range(ARCH.num_layers):
        layer, block = f"layers.{i}.", f"blk.{i}."
        qkv_KXHD = oracle.heads_of(i).swapaxes(2, 3)
        gate_DF, up_DF = oracle.gate_and_up_of(i)
        tensors |= {
            block + "attn_norm.weight": w[layer + "attention_norm.weight"],
            block + "ffn_norm.weight": w[layer + "mlp_norm.weight"],
            block + "attn_q.weight": pairs(qkv_KXHD[:, :group].reshape(-1, width)),
            block + "attn_k.weight": pairs(qkv_KXHD[:, group].reshape(-1, width)),
            block + "attn_v.weight": qkv_KXHD[:, group + 1].reshape(-1, width),
            block + "attn_output.weight": w[layer + "attention.out.weight"].T,
            block + "ffn_gate.weight": gate_DF.T,
            block + "ffn_up.weight": up_DF.T,
            block + "ffn_down.weight": w[layer + "mlp.down.weight"].T,
        }
    return {name: (np.ascontiguousarray(value, np.float32), "F32") for name, value in tensors.items()}


@pytest.fixture
def write(tmp_path: Path, oracle: Oracle):
    """Writes model T; `tensors` replace (None removes) tensors, `changes` metadata."""

    def write_tiny(tensors: Mapping[str, Any] | None = None, name: str = "tiny.gguf", **changes: Any) -> Path:
        kept = {k: v for k, v in (tiny_tensors(oracle) | dict(tensors or {})).items() if v is not None}
        return write_gguf(tmp_path / name, tiny_metadata(**changes), kept)

    return write_tiny


def load(path: Path | str, **options: Any) -> LoadedEngine:
    return load_engine(EngineConfig.from_flat(model=str(path), **(SMALL | options)))


def test_a_model_read_from_its_file_answers_as_the_plain_loop(write, oracle: Oracle):
    told: list[tuple[str, int, int]] = []
    config = EngineConfig.from_flat(model=str(write()), **SMALL)
    loaded = load_engine(config, lambda *news: told.append(news))
    assert replace(loaded.arch, rms_norm_eps=ARCH.rms_norm_eps) == ARCH
    assert loaded.arch.rms_norm_eps == pytest.approx(ARCH.rms_norm_eps)  # stored as float32
    assert (loaded.dtype, loaded.source) == ("float32", "tiny.gguf")
    prompts = prompts_of(1, [5, 40])
    outputs = run_greedy(loaded, prompts, max_tokens=12)
    expected = [oracle.greedy(prompt, 12) for prompt in prompts]
    assert min(text.smallest_gap for text in expected) > 1e-4
    assert ids_of(outputs) == [list(text.token_ids) for text in expected]
    weights = [(done, total) for what, done, total in told if what == "loading weights"]
    assert weights == [(i + 1, len(weights)) for i in range(len(weights))]
    assert set(loaded.seconds) == {"open", "weights", "pages", "compile"}
    assert loaded.chat_template().render_ids([{"role": "user", "content": "x"}])[0] == 1


def weights_of(loaded: LoadedEngine, order: str) -> dict[str, np.ndarray]:
    """What the engine holds, in the plain loop's layout."""
    params = loaded.programs._context.rebuild(loaded.engine.runner._leaves)
    return Oracle.of(params, loaded.arch, order).weights


@pytest.mark.parametrize("order", ["in_out", "out_in"])
def test_every_weight_comes_back_bit_for_bit(write, oracle: Oracle, order: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxinfer.engine.load.choose_weight_order", lambda *args: order)
    found = weights_of(load(write()), order)
    assert found.keys() == oracle.weights.keys()
    assert all(np.array_equal(found[name], value) for name, value in oracle.weights.items())


def test_an_unhalved_key_matrix_is_noticed(write, oracle: Oracle, monkeypatch: pytest.MonkeyPatch):
    """Mutant: keys stored in the order of the other layout."""
    monkeypatch.setattr("jaxinfer.engine.load.choose_weight_order", lambda *args: "in_out")
    name = "blk.0.attn_k.weight"
    value = tiny_tensors(oracle)[name][0]
    found = weights_of(load(write({name: (np.ascontiguousarray(pairs(value)), "F32")})), "in_out")
    wrong = [name for name, value in oracle.weights.items() if not np.array_equal(found[name], value)]
    assert wrong == ["layers.0.attention.qkv.weight"]


def test_llm_loads_a_path_and_its_options_reach_the_engine(write):
    llm = LLM(str(write()), use_tqdm=False, page_size=8, max_model_len=64, **SMALL)
    sizes = llm.loaded.programs.sizes
    assert (sizes.num_slots, sizes.max_num_batched_tokens, sizes.max_model_len) == (1, 16, 64)
    assert sizes.table_width == 8
    assert llm.get_tokenizer().vocab_size == ARCH.vocab_size


def test_two_engines_of_one_process_count_their_own_recompiles(write):
    """F15: making another engine is no recompile of the first."""
    path = write()
    one = load(path)
    load(path, max_model_len=96, page_size=8).programs.get(("admit",))
    assert one.num_recompiles == 0


def test_a_chat_template_file_replaces_the_models_own(write, tmp_path: Path):
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    loaded = load(write(), chat_template=str(template))
    chat = loaded.chat_template().render([{"role": "user", "content": "x"}])
    assert chat.text == "[x]"
    with pytest.raises(ConfigError, match=r"absent\.jinja"):
        load(write(), chat_template=str(tmp_path / "absent.jinja"))


def test_another_files_tokenizer_may_be_used_when_it_fits(write, tmp_path: Path):
    other = write_gguf(tmp_path / "other.gguf", small_metadata() | {"llama.block_count": 1}, {})
    loaded = load(write(), tokenizer=str(other))
    assert loaded.tokenizer.source == "other.gguf"
    assert loaded.tokenizer.vocab_size < loaded.arch.vocab_size
    tokens = [*tiny_metadata()["tokenizer.ggml.tokens"], "extra"]
    kinds = [*tiny_metadata()["tokenizer.ggml.token_type"], 1]
    large = tiny_metadata() | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    larger = write_gguf(tmp_path / "larger.gguf", large, {})
    with pytest.raises(ConfigError, match="the tokenizer has 513 tokens; the model 512"):
        load(write(), tokenizer=str(larger))


@pytest.mark.parametrize(("asked", "stored"), [("bfloat16", "bfloat16"), ("fp16", "bfloat16"), ("auto", "float32")])
def test_weights_and_pages_have_the_dtype_asked_for(write, asked: str, stored: str):
    loaded = load(write(), dtype=asked)
    assert loaded.dtype == stored
    assert {str(leaf.dtype) for leaf in loaded.engine.runner._pages[0]} == {stored}
    mixed = load(write(), dtype="float32", kv_cache_dtype="bf16")
    assert {str(leaf.dtype) for leaf in mixed.engine.runner._pages[0]} == {"bfloat16"}
    assert mixed.dtype == "float32"


def test_a_missing_model_says_what_may_be_given(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"no such file; give `builtin` or the path of a \.gguf file"):
        load(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match=r"reads \.gguf files only"):
        load(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"reads \.gguf files only"):
        load(tmp_path / "model.bin")
    with pytest.raises(CheckpointError, match=r"python -m jaxinfer\.fetch"):
        load("builtin")


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused_by_name_r170(write, share: float):
    """R170: before weights are allocated."""
    path = write()
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        load(path)


def test_a_missing_tensor_is_named_f14(write):
    """F14."""
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight"):
        load(write({"blk.1.ffn_up.weight": None}))


@pytest.mark.parametrize("name", ["attn_q", "attn_v", "attn_output", "ffn_up", "ffn_gate", "ffn_down", "attn_norm"])
def test_a_misshapen_tensor_is_an_error_that_names_it_f14(write, oracle: Oracle, name: str):
    """F14: half as many rows as the architecture needs."""
    full = f"blk.1.{name}.weight"
    value, kind = tiny_tensors(oracle)[full]
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        load(write({full: (np.ascontiguousarray(value[: len(value) // 2]), kind)}))


def test_a_misshapen_embedding_is_an_error_that_names_it_f14(write):
    embedding = np.zeros((ARCH.vocab_size - 1, ARCH.hidden_size), np.float32)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: parameter top\.embedding has shape \(511, 64\)"):
        load(write({"token_embd.weight": (embedding, "F32")}))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"llama.block_count": None}, "block_count"),
        ({"llama.attention.head_count": 3}, "do not fit together"),
        ({"llama.expert_count": 8}, "expert"),
        ({"llama.rope.scaling.type": "yarn"}, "scaling"),
        ({"tokenizer.ggml.pre": "never heard of"}, "never heard of"),
        ({"tokenizer.ggml.eos_token_id": 600}, "eos"),
    ],
    ids=str,
)
def test_metadata_that_cannot_work_are_named_r164_r172(write, change: dict[str, Any], says: str):
    """R164: an unknown pre-tokenizer is no default; R172: an end id outside the vocabulary."""
    with pytest.raises(CheckpointError, match=says):
        load(write(**change))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_num_seqs": 32}, r"max_num_batched_tokens is 16; it must be at least max_num_seqs \(32\)"),
        ({"num_pages": 4, "page_size": 16, "max_model_len": 256}, "largest max_model_len that fits is 48"),
        ({"num_pages": 10**9}, "ask for fewer or raise memory_utilization"),
        ({"page_size": 24}, "power of two"),
        ({"attention": "flash"}, "attention is 'flash'"),
        ({"tensor_parallel_size": 8}, "there are 4"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"eviction_policy": "lruu"}, "did you mean 'lru'"),
        ({"max_model_length": 100}, "did you mean 'max_model_len'"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_work_says_what_would_r176(write, options: dict[str, Any], says: str):
    """R176: too little memory names the largest length that fits."""
    with pytest.raises(ConfigError, match=says):
        load(write(), **options)
