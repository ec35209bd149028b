"""The reader of Hugging Face folders: values of every dtype, shards, and each way a file can be wrong."""

from __future__ import annotations

import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from checkpoints import HuggingFaceError, HuggingFaceFolder, huggingface

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
NAMES = {np.dtype(kind): name for name, kind in DTYPES.items()} | {np.dtype(np.int64): "I64"}


def packed(tensors: dict[str, np.ndarray], **changes: Any) -> bytes:
    """A safetensors file, written by hand. `changes` replace header entries: {tensor: {field: value}}."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, value in tensors.items():
        raw = value.tobytes()
        header[name] = {
            "dtype": NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        } | changes.get(name, {})
        data += raw
    return with_header(json.dumps(header).encode(), data)


def with_header(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def folder(path: Path, files: dict[str, bytes], config: bytes = b'{"model_type": "llama"}') -> Path:
    path.mkdir(exist_ok=True)
    for name, data in {"config.json": config, **files}.items():
        (path / name).write_bytes(data)
    return path


def single(path: Path, data: bytes) -> Path:
    return folder(path, {"model.safetensors": data})


def index(**weight_map: Any) -> bytes:
    return json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}).encode()


def values(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_back_bit_for_bit(tmp_path, dtype, monkeypatch):
    monkeypatch.setattr(huggingface, "CHUNK_BYTES", 64)  # several chunks, the last one shorter
    a, b = values((7, 9), DTYPES[dtype]), values((5,), DTYPES[dtype], 1)
    model = HuggingFaceFolder.open(single(tmp_path, packed({"a": a, "b": b, "one": a[0, 0], "none": a[:0]})))
    assert model.config == {"model_type": "llama"}
    assert set(model.tensors) == {"a", "b", "one", "none"}
    for name, want in {"a": a, "b": b, "one": a[0, 0], "none": a[:0]}.items():
        got = model.load(name)
        assert (got.dtype, got.shape) == (want.dtype, want.shape) == (DTYPES[dtype], model.tensors[name].shape)
        assert got.tobytes() == want.tobytes()


def test_shards_are_read_from_the_files_that_the_index_names(tmp_path):
    a, b = values((3, 4), np.float32), values((2, 2), np.float16)
    other_a = values((3, 4), np.float32, 9)
    files = {
        "m-1.safetensors": packed({"a": a}),
        "m-2.safetensors": packed({"b": b, "a": other_a}),
        "model.safetensors.index.json": index(a="m-1.safetensors", b="m-2.safetensors"),
    }
    model = HuggingFaceFolder.open(folder(tmp_path, files))
    assert set(model.tensors) == {"a", "b"}
    assert np.array_equal(model.load("a"), a)
    assert np.array_equal(model.load("b"), b)


def test_memory_is_the_tensors_own(tmp_path):
    value = np.ones((1024, 4096), np.float16)
    model = HuggingFaceFolder.open(single(tmp_path, packed({"w": value})))
    tracemalloc.start()
    try:
        model.load("w")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert value.nbytes <= peak <= value.nbytes + (4 << 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_refused_by_tensor(tmp_path, dtype, bad):
    largest = ml_dtypes.finfo(DTYPES[dtype]).max
    value = np.full((3, 5), largest, DTYPES[dtype])
    value[0, 0] = -largest
    model = HuggingFaceFolder.open(single(tmp_path, packed({"w": value})))
    assert np.array_equal(model.load("w"), value), "the largest finite value is let through"
    value[2, 4] = bad
    with pytest.raises(HuggingFaceError, match=r"model.safetensors: tensor 'w': holds a value that is not finite"):
        HuggingFaceFolder.open(single(tmp_path, packed({"w": value}))).load("w")


def test_a_missing_tensor_names_the_nearest(tmp_path):
    model = HuggingFaceFolder.open(single(tmp_path, packed({"model.norm.weight": values((4,), np.float32)})))
    with pytest.raises(HuggingFaceError, match=r"'model.nrm.weight': missing; the nearest is 'model.norm.weight'"):
        model.load("model.nrm.weight")


def test_a_tensor_of_another_dtype_is_refused_when_it_is_asked_for(tmp_path):
    both = {"ids": np.arange(3), "w": values((2,), np.float32)}
    model = HuggingFaceFolder.open(single(tmp_path, packed(both)))
    assert np.array_equal(model.load("w"), both["w"])
    with pytest.raises(HuggingFaceError, match="tensor 'ids': dtype I64 is not read; it must be one of F32"):
        model.load("ids")


A, B = values((2, 3), np.float32), values((4,), np.float16)
TWO = {"a": A, "b": B}
DAMAGED = {
    "empty": (b"", "header length: needs 8 bytes"),
    "cut in the length": (packed(TWO)[:5], "header length"),
    "cut in the header": (packed(TWO)[:40], "header length: needs .* it is damaged or cut short"),
    "cut in the data": (packed(TWO)[:-1], "tensor 'b' data_offsets: its data end at byte .* cut short"),
    "cut between tensors": (packed(TWO)[:-8], "tensor 'b' data_offsets: its data end at byte"),
    "data behind the last tensor": (packed(TWO) + b"x", "the tensors end at byte .*, but the file at byte"),
    "a length of 2**63": (b"\xff" * 8 + b"{}", "header length: needs"),
    "not JSON": (with_header(b"{"), "header: not valid JSON"),
    "not UTF-8": (with_header(b'{"\xff": 1}'), "header: not valid JSON"),
    "a list": (with_header(b"[]"), "header: a JSON list where an object is needed"),
    "nested too deeply": (with_header(b"[" * 100_000), "header: not valid JSON"),
    "a name twice": (with_header(b'{"a": 1, "a": 1}'), "header: not valid JSON: 'a' is given twice"),
    "an entry that is a number": (with_header(b'{"a": 1}'), "tensor 'a': must be an object of dtype"),
    "a field too many": (packed(TWO, a={"x": 1}), "tensor 'a': must be an object of dtype"),
    "unknown dtype": (packed(TWO, a={"dtype": "F31"}), "tensor 'a' dtype: 'F31' is not a type"),
    "dtype that is a list": (packed(TWO, a={"dtype": ["F32"]}), "tensor 'a' dtype: .* is not a type"),
    "another dtype": (packed(TWO, a={"dtype": "F16"}), r"tensor 'a' data_offsets: 24 bytes; F16 of shape \(2, 3\)"),
    "another shape": (packed(TWO, a={"shape": [3, 3]}), "tensor 'a' data_offsets: 24 bytes; .* takes 36"),
    "negative size": (packed(TWO, a={"shape": [-2, -3]}), "tensor 'a' shape: must be"),
    "fractional size": (packed(TWO, a={"shape": [2.0, 3]}), "tensor 'a' shape: must be"),
    "true as a size": (packed(TWO, a={"shape": [True, 6]}), "tensor 'a' shape: must be"),
    "sizes whose product overflows": (packed(TWO, a={"shape": [2**62, 2**62]}), "tensor 'a' shape: must be"),
    "too many dimensions": (packed(TWO, a={"shape": [1] * 9}), "tensor 'a' shape: must be at most 8"),
    "one offset": (packed(TWO, a={"data_offsets": [0]}), "tensor 'a' data_offsets: must be two"),
    "offsets backwards": (packed(TWO, a={"data_offsets": [24, 0]}), "tensor 'a' data_offsets: -24 bytes"),
    "overlap": (packed(TWO, b={"data_offsets": [20, 28]}), "tensor 'b' data_offsets: they overlap"),
    "a hole": (packed(TWO, a={"data_offsets": [8, 32]}), "tensor 'a' data_offsets: they leave a hole"),
    "far outside": (packed(TWO, b={"data_offsets": [2**40, 2**40 + 8]}), "tensor 'b' data_offsets: its data end"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused_on_opening(tmp_path, damage):
    data, message = DAMAGED[damage]
    with pytest.raises(HuggingFaceError, match=message) as caught:
        HuggingFaceFolder.open(single(tmp_path, data))
    assert str(caught.value).startswith(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize(
    "file_name",
    ["../other.safetensors", "/etc/x.safetensors", "a/b.safetensors", "m.bin", "", "m\0.safetensors", 7, None, ["m"]],
)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, file_name):
    (tmp_path / "other.safetensors").write_bytes(packed(TWO))
    model = folder(tmp_path / "model", {"model.safetensors.index.json": index(a=file_name)})
    with pytest.raises(
        HuggingFaceError, match=r"weight_map 'a': .* is not the name of a safetensors file in the folder"
    ):
        HuggingFaceFolder.open(model)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither model.safetensors nor model.safetensors.index.json is there"),
        ({"pytorch_model.bin": b""}, "pytorch_model.bin: pickled weights can run code and are not read"),
        ({"model.safetensors.index.json": b"{}"}, "index.json: weight_map: must be an object"),
        ({"model.safetensors.index.json": index(a="m.safetensors")}, "m.safetensors: cannot be read: No such file"),
        (
            {"model.safetensors.index.json": index(c="m.safetensors"), "m.safetensors": packed(TWO)},
            "m.safetensors: tensor 'c': missing, though model.safetensors.index.json names it",
        ),
    ],
)
def test_missing_files_and_tensors_are_named(tmp_path, files, message):
    with pytest.raises(HuggingFaceError, match=message):
        HuggingFaceFolder.open(folder(tmp_path, files))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (b"", "config.json: not valid JSON"),
        (b"[]", "config.json: a JSON list"),
        (b'{"a": NaN}', "config.json: not valid JSON: NaN is not a number of JSON"),
        (b'{"a": 1, "a": 2}', "config.json: not valid JSON: 'a' is given twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "config.json: not valid JSON"),
    ],
)
def test_a_damaged_configuration_is_refused(tmp_path, config, message):
    with pytest.raises(HuggingFaceError, match=message):
        HuggingFaceFolder.open(folder(tmp_path, {"model.safetensors": packed(TWO)}, config))


def test_what_is_no_folder_or_no_file_is_refused(tmp_path):
    with pytest.raises(HuggingFaceError, match="no such folder"):
        HuggingFaceFolder.open(tmp_path / "absent")
    with pytest.raises(HuggingFaceError, match=r"config.json: cannot be read: No such file"):
        HuggingFaceFolder.open(tmp_path)
    model = single(tmp_path, packed(TWO))
    (model / "model.safetensors").unlink()
    os.mkfifo(model / "model.safetensors")
    with pytest.raises(HuggingFaceError, match="not a regular file"):
        HuggingFaceFolder.open(model)


def test_a_file_that_changes_after_opening_is_refused(tmp_path):
    path = single(tmp_path, packed(TWO))
    model = HuggingFaceFolder.open(path)
    (path / "model.safetensors").write_bytes(packed(TWO)[:-1])
    with pytest.raises(HuggingFaceError, match="tensor 'b': the file's size changed since it was opened"):
        model.load("b")
    (path / "model.safetensors").unlink()
    with pytest.raises(HuggingFaceError, match="tensor 'b': No such file"):
        model.load("b")


def test_mutated_headers_give_clean_errors(tmp_path):
    """Any byte of the header changed: refused, or still a file whose tensors lie inside it."""
    good, rng = bytearray(packed(TWO)), random.Random(0)
    length = int.from_bytes(good[:8], "little")
    num_refused = 0
    for _ in range(2000):
        mutant = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            mutant[rng.randrange(8 + length)] = rng.choice(b'0123456789{}[]",:aF\x00\xff')
        try:
            model = HuggingFaceFolder.open(single(tmp_path, bytes(mutant)))
        except HuggingFaceError:
            num_refused += 1
            continue
        assert all(t.offset + t.num_bytes <= len(mutant) for t in model.tensors.values())
    assert 1000 < num_refused < 2000
