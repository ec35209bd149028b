"""The GGUF reader on well-formed files: every block format, metadata getters, and files that change after opening."""

from __future__ import annotations

import os
import shutil
import tracemalloc

import numpy as np
import pytest
from gguf_files import u32, write_gguf, write_parts
from slow_blocks import FORMATS

from checkpoints import GGUFError, GGUFFile, gguf
from checkpoints.builtin import FILE_SHA256, file_sha256, find_builtin
from checkpoints.gguf_header import READABLE
from jaxinfer.config import cache_folder

# Largest error of a value drawn from [-1, 1], from the format's definition: half a step of the largest block, and the
# rounding of the 16-bit scale. F16 and BF16: half a unit in the last place at 1.
LARGEST_ERROR = {
    "F32": 0.0,
    "F16": 2.0**-11,
    "BF16": 2.0**-8,
    "Q4_0": 1 / 8 + 0.002,  # 16 levels over [-1, 7/8]: the last level cuts the far end off
    "Q4_1": 1 / 15 + 0.002,
    "Q5_0": 1 / 16 + 0.002,
    "Q5_1": 1 / 31 + 0.002,
    "Q8_0": 1 / 254 + 0.001,
}


def random_blocks(block_type: str, num_rows: int, blocks_per_row: int) -> np.ndarray:
    """uint8 [rows, bytes]: random bits, with normal draws where the block holds 16-bit floats."""
    _, _, num_bytes, halves = FORMATS[block_type]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (num_rows, blocks_per_row, num_bytes), np.uint8)
    for at in halves:
        draws = rng.normal(0, 0.02, (num_rows, blocks_per_row)).astype(np.float16)
        blocks[..., at : at + 2] = draws[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)


def decode_slowly(block_type: str, blocks: np.ndarray) -> np.ndarray:
    decode, _, num_bytes, _ = FORMATS[block_type]
    rows = [[decode(row[at : at + num_bytes].tobytes()) for at in range(0, len(row), num_bytes)] for row in blocks]
    return np.array(rows).reshape(len(blocks), -1)


@pytest.mark.parametrize("block_type", FORMATS)
def test_blocks_decode_as_the_layout_says(tmp_path, block_type, monkeypatch):
    monkeypatch.setattr(gguf, "CHUNK_BYTES", 1000)  # several chunks, the last one shorter
    blocks = random_blocks(block_type, 5, 3)
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", {}, {"w": (blocks, block_type)}))
    expected = decode_slowly(block_type, blocks)
    values = file.load("w")
    assert values.dtype == np.float32
    assert values.shape == file.tensors["w"].shape == (5, 3 * FORMATS[block_type][1])
    scale = np.abs(expected).max()
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6 * scale)
    # Mutant: one bit of one value's nibble must be seen.
    blocks[2, 40] ^= 1
    assert not np.allclose(values, decode_slowly(block_type, blocks), rtol=1e-5, atol=1e-6 * scale)


@pytest.mark.parametrize("block_type", LARGEST_ERROR)
def test_quantized_values_come_back_within_the_step_of_their_format(tmp_path, block_type):
    values = np.random.default_rng(1).uniform(-1, 1, (7, 64)).astype(np.float32)
    loaded = GGUFFile.open(write_gguf(tmp_path / "m.gguf", {}, {"w": (values, block_type)})).load("w")
    assert loaded.shape == values.shape
    assert np.abs(loaded - values).max() <= LARGEST_ERROR[block_type]
    assert np.abs(loaded - values[::-1]).max() > max(LARGEST_ERROR.values())  # mutant: rows in the wrong order


def test_every_readable_format_is_covered_above():
    from_layout_and_values = FORMATS.keys() | LARGEST_ERROR.keys()
    assert {kind.name for kind in READABLE} == from_layout_and_values


def test_shapes_are_in_numpy_order_and_tensors_keep_their_order(tmp_path):
    tensors = {name: (np.zeros(shape, np.float32), "F32") for name, shape in {"z": (2, 3, 4), "a": (5,)}.items()}
    tensors["m"] = (np.arange(6, dtype=np.float32).reshape(2, 3), "F32")
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", {}, tensors))
    assert [(t.name, t.shape) for t in file.tensors.values()] == [("z", (2, 3, 4)), ("a", (5,)), ("m", (2, 3))]
    assert file.load("m").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_tied_model_without_output_weight_opens(tmp_path):
    """R166: the reader must not ask for tensors that a model need not have."""
    file = GGUFFile.open(
        write_gguf(tmp_path / "m.gguf", {}, {"token_embd.weight": (np.ones((4, 8), np.float32), "F32")})
    )
    assert "output.weight" not in file.tensors
    assert file.load("token_embd.weight").sum() == 32


def test_metadata_values_have_python_types(tmp_path):
    given = {"int": 7, "float": 1.5, "yes": True, "str": "x\ny", "words": ["a", "", "ä"], "ints": [3, -4]}
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", given, {}))
    for key, kind in {"int": int, "float": float, "yes": bool, "str": str, "words": list}.items():
        assert type(file.metadata[key]) is kind
        assert file.require(key, kind) == given[key]
    assert file.require("ints", np.ndarray).tolist() == [3, -4]
    assert not file.require("ints", np.ndarray).flags.writeable
    assert file.find("absent", int) is None


@pytest.mark.parametrize(("key", "kind"), [("flag", int), ("number", float), ("number", bool), ("words", np.ndarray)])
def test_metadata_of_another_type_is_refused_by_name(tmp_path, key, kind):
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", {"flag": True, "number": 3, "words": ["a"]}, {}))
    with pytest.raises(GGUFError, match=rf"m\.gguf: metadata '{key}': .* where .* is needed"):
        file.require(key, kind)


def test_missing_names_are_refused_with_the_nearest_one(tmp_path):
    file = GGUFFile.open(write_parts(tmp_path / "m.gguf"))
    with pytest.raises(GGUFError, match=r"m\.gguf: metadata 'score': missing; the nearest is 'scores'"):
        file.require("score", float)
    with pytest.raises(GGUFError, match=r"m\.gguf: tensor 'block': missing; the nearest is 'blocks'"):
        file.load("block")


def test_metadata_float_that_is_not_finite_is_refused(tmp_path):
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", {"base": float("nan")}, {}))
    with pytest.raises(GGUFError, match="'base': nan is not finite"):
        file.require("base", float)


@pytest.mark.parametrize("block_type", ["F32", "F16", "BF16", "Q4_1", "Q6_K"])
def test_value_that_is_not_finite_is_refused_at_load(tmp_path, block_type):
    kinds = {"F32": (4, b"\0\0\xc0\x7f"), "F16": (2, b"\0\x7c"), "BF16": (2, b"\x80\xff")}
    if block_type in kinds:
        num_bytes, bad = kinds[block_type]
        blocks, at = np.zeros((1, 256 * num_bytes), np.uint8), 8
    else:
        blocks, (at, *_), bad = random_blocks(block_type, 1, 2), FORMATS[block_type][3], b"\0\x7c"
    blocks[0, at : at + len(bad)] = list(bad)
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", {}, {"w": (blocks, block_type)}))
    with pytest.raises(GGUFError, match=r"m\.gguf: tensor 'w': holds a value that is not finite"):
        file.load("w")


def test_file_that_changes_after_opening_is_refused_at_load(tmp_path):
    path = write_parts(tmp_path / "m.gguf")
    file = GGUFFile.open(path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(GGUFError, match="'plain': the file's size changed"):
        file.load("plain")
    path.unlink()
    with pytest.raises(GGUFError, match="'plain': No such file"):
        file.load("plain")


def test_loading_holds_one_copy_of_the_tensor(tmp_path):
    values = np.zeros((512, 8192), np.float32)
    file = GGUFFile.open(write_gguf(tmp_path / "m.gguf", {}, {"w": (values, "Q8_0")}))
    tracemalloc.start()
    loaded = file.load("w")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert loaded.nbytes <= peak_bytes < loaded.nbytes + (4 << 20)


@pytest.mark.parametrize("version", [2, 3])
def test_both_versions_are_read(tmp_path, version):
    file = GGUFFile.open(write_parts(tmp_path / "m.gguf", {"version": u32(version)}))
    assert file.version == version
    assert file.load("blocks").tolist() == [[0.0] * 32] * 2
    assert file.load("plain").tolist() == [1.0, 2.0, 3.0]
    assert file.metadata["tokens"] == ["a", "<0x-1>", "a"]


@pytest.mark.weights
def test_builtin_model_is_the_pinned_one_and_loads(tmp_path):
    path = find_builtin(cache_folder())
    if path is None:
        pytest.skip("the built-in model is absent; run `python -m jaxinfer.fetch`")
    assert file_sha256(path) == FILE_SHA256
    file = GGUFFile.open(path)
    assert file.require("llama.block_count", int) == 30
    assert len(file.require("tokenizer.ggml.tokens", list)) == 49152
    assert "output.weight" not in file.tensors
    embedding = file.load("token_embd.weight")
    assert embedding.shape == (49152, 576)
    assert 0.01 < embedding.std() < 1.0
    short = tmp_path / "short.gguf"
    with open(path, "rb") as source, open(short, "wb") as out:
        shutil.copyfileobj(source, out)
        out.truncate(path.stat().st_size // 10)
    with pytest.raises(GGUFError, match="cut short"):
        GGUFFile.open(short)
