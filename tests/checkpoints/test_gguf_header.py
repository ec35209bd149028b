"""The GGUF header reader on damaged files: one clear error, little memory, quickly; never another exception."""

from __future__ import annotations

import os
import random
import struct
import time
import tracemalloc
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from gguf_files import raw_parts, text, u32, u64, write_gguf, write_parts

from checkpoints import GGUFError, GGUFFile, gguf_header

MAX_PEAK_BYTES = 4 << 20  # for files of under 1 kB


def refusal(path: Path) -> str | None:
    """Opens the file and loads every tensor: None when all goes well, else the message of the `GGUFError`."""
    try:
        file = GGUFFile.open(path)
        for name in file.tensors:
            file.load(name)
    except GGUFError as error:
        return str(error)
    return None


def traced_peak(run) -> int:
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


HUGE = u64(2**64 - 1)
BAD_FIELDS = [
    ({"magic": b"GGML"}, "magic: b'GGML' instead of"),
    ({"magic": b"PK\x03\x04"}, "magic: .* not a GGUF file"),
    ({"version": u32(1)}, "version: 1; versions 2 and 3"),
    ({"version": u32(4)}, "version: 4; versions 2 and 3"),
    ({"version": struct.pack(">I", 3)}, "version: .*big-endian"),
    ({"tensor count": HUGE}, "tensor count: 18446744073709551615 entries; at most"),
    ({"tensor count": u64(60_000)}, r"tensor count \(60000 entries\): needs"),
    ({"pair count": HUGE}, "metadata count: 18446744073709551615 entries; at most"),
    ({"pair count": u64(60_000)}, r"metadata count \(60000 entries\): needs"),
    ({"key 0": HUGE}, "metadata key 0: a string of 18446744073709551615 bytes"),
    ({"key 0": text("")}, "metadata key 0: empty"),
    ({"key 0": text(b"\xff\xfe")}, "metadata key 0: not valid UTF-8"),
    ({"key 1": text("general.architecture")}, "metadata key 1: 'general.architecture' is given twice"),
    ({"key 0": text("k" * 70_000)}, "metadata key 0: a string of 70000 bytes; at most 65535"),
    ({"type 0": u32(13)}, "'general.architecture' type: 13 is not a type"),
    ({"value 0": u64(2**62)}, "'general.architecture': a string of .* bytes"),
    ({"value 0": u64(50_000_000)}, "'general.architecture': needs 50000000 bytes"),
    ({"value 0": text(b"\x80")}, "'general.architecture': not valid UTF-8"),
    ({"element type 1": u32(9)}, "'tokens': an array of arrays"),
    ({"element type 1": u32(99)}, "'tokens' element type: 99 is not a type"),
    ({"length 1": HUGE}, "'tokens' length: 18446744073709551615 entries; at most"),
    ({"length 1": u64(60_000_000)}, r"'tokens' length \(60000000 entries\): needs"),
    ({"length 2": u64(2**61)}, "'scores' length: 2305843009213693952 entries"),
    ({"length 2": u64(60_000_000)}, r"'scores' length \(60000000 entries\): needs"),
    ({"value 3": b"\x02"}, "'flag': a boolean is 2"),
    ({"name 0": text("")}, "tensor 0 name: empty"),
    ({"name 0": text("n" * 65)}, "tensor 0 name: a string of 65 bytes; at most 64"),
    ({"name 1": text("blocks")}, "tensor 'blocks': its name is given twice"),
    ({"dimensions 0": u32(0)}, "tensor 'blocks' dimensions: 0; 1 to 4"),
    ({"dimensions 0": u32(5)}, "tensor 'blocks' dimensions: 5; 1 to 4"),
    ({"dims 0": u64(32) + u64(0)}, r"tensor 'blocks' dimensions: \[32, 0\]; their product"),
    ({"dims 0": u64(2**32) + u64(2**32)}, "tensor 'blocks' dimensions: .*product"),  # the product is 0 in 64 bits
    ({"dims 0": u64(2**40) + u64(2)}, "tensor 'blocks' data: .*cut short"),
    ({"dims 0": u64(33) + u64(2)}, "tensor 'blocks' dimensions: rows of 33 values; Q8_0 needs a multiple of 32"),
    ({"block type 0": u32(999)}, "tensor 'blocks' type: 999 is not a block type"),
    ({"block type 0": u32(4)}, "tensor 'blocks' type: 4 is not a block type"),  # Q4_2, withdrawn
    ({"block type 0": u32(10)}, "tensor 'blocks' type: Q2_K is not read; convert the file to one of F32, .*Q6_K"),
    ({"offset 1": u64(97)}, "tensor 'plain' offset: 97 is not a multiple of the alignment 32"),
    ({"offset 1": u64(64)}, "tensor 'plain' data: they overlap those of tensor 'blocks'"),
    ({"offset 1": u64(0)}, "data: they overlap"),
    ({"offset 1": u64(128)}, "tensor 'plain' data: .*cut short"),
    ({"offset 1": u64(2**64 - 32)}, "tensor 'plain' data: .*cut short"),
    ({"data": bytes(107)}, "tensor 'plain' data: .*cut short"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_FIELDS, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_field_is_named(tmp_path, changes, message):
    path = write_parts(tmp_path / "bad.gguf", changes)

    def run():
        with pytest.raises(GGUFError, match=rf"bad\.gguf: .*{message}") as caught:
            GGUFFile.open(path)
        assert "\n" not in str(caught.value)

    assert traced_peak(run) < MAX_PEAK_BYTES


@pytest.mark.parametrize(
    "value",
    [u32(4) + u32(0), u32(4) + u32(48), u32(6) + struct.pack("<f", 32.0), u32(7) + b"\x01", u32(8) + text("32")],
    ids=["zero", "not a power of two", "float", "bool", "string"],
)
def test_bad_alignment_is_refused(tmp_path, value):
    changes = {"key 3": text("general.alignment"), "type 3": value[:4], "value 3": value[4:]}
    with pytest.raises(GGUFError, match=r"'general\.alignment': it must be an integer and a power of two"):
        GGUFFile.open(write_parts(tmp_path / "bad.gguf", changes))


def test_other_alignment_moves_the_data(tmp_path):
    changes = {"key 3": text("general.alignment"), "type 3": u32(4), "value 3": u32(8), "offset 1": u64(72)}
    parts = raw_parts() | changes
    header_bytes = sum(len(value) for field, value in parts.items() if field not in ("padding", "data"))
    changes |= {"padding": bytes(-header_bytes % 8), "data": bytes(72) + struct.pack("<fff", 4, 5, 6)}
    file = GGUFFile.open(write_parts(tmp_path / "m.gguf", changes))
    assert file.load("plain").tolist() == [4, 5, 6]


def test_header_larger_than_the_limit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_header, "MAX_HEADER_BYTES", 4096)
    changes = {"value 0": text("x" * 4000)}
    with pytest.raises(GGUFError, match=r"bad\.gguf: .*: the header would exceed 4096 bytes"):
        GGUFFile.open(write_parts(tmp_path / "bad.gguf", changes))


def test_truncation_at_every_field_and_at_random_places_is_refused(tmp_path):
    parts = raw_parts()
    whole = b"".join(parts.values())
    boundaries = [0, *list(accumulate(map(len, parts.values())))[:-1]]
    rng = random.Random(0)
    for cut in [*boundaries, *(rng.randrange(len(whole)) for _ in range(200))]:
        path = tmp_path / "bad.gguf"
        path.write_bytes(whole[:cut])
        with pytest.raises(GGUFError, match=r"bad\.gguf: .*cut short"):
            GGUFFile.open(path)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.999])
def test_truncated_model_is_refused_at_once_and_before_weights_are_allocated(tmp_path, share):
    """R170."""
    weights = {f"blk.{i}.ffn_up.weight": (np.ones((512, 256), np.float32), "Q8_0") for i in range(16)}
    path = write_gguf(tmp_path / "bad.gguf", {"words": ["word"] * 5000}, weights)
    os.truncate(path, int(share * path.stat().st_size))

    def run():
        with pytest.raises(GGUFError, match=r"bad\.gguf: .*file ends at byte \d+; it is damaged or cut short"):
            GGUFFile.open(path)

    began = time.monotonic()
    assert traced_peak(run) < MAX_PEAK_BYTES
    assert time.monotonic() - began < 1.0


def mutate(whole: bytes, header_bytes: int, rng: random.Random) -> bytes:
    """One to four small damages inside the header: bytes changed, lost, added, or a field set to an extreme."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(header_bytes)
        match rng.randrange(5):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.randint(1, 16)]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 16))
            case 4:
                data[at : at + 8] = u64(rng.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]))
    return bytes(data)


@pytest.mark.parametrize("num_files", [2000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_mutated_header_either_loads_or_is_refused(tmp_path, num_files):
    parts = raw_parts()
    whole = b"".join(parts.values())
    header_bytes = len(whole) - len(parts["data"])
    path = tmp_path / "bad.gguf"
    rng = random.Random(num_files)
    num_loaded = 0

    def run():
        nonlocal num_loaded
        for _ in range(num_files):
            path.write_bytes(mutate(whole, header_bytes, rng))
            message = refusal(path)
            num_loaded += message is None
            assert message is None or "bad.gguf: " in message

    assert traced_peak(run) < MAX_PEAK_BYTES
    assert 0 < num_loaded < num_files / 2  # the damages reach something, and not always


def test_paths_that_are_no_file_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, reason in {
        tmp_path / "absent": "No such file",
        tmp_path: "regular file",
        tmp_path / "pipe": "regular file",
    }.items():
        with pytest.raises(GGUFError, match=reason):
            GGUFFile.open(path)


def test_names_in_messages_are_escaped_and_cut(tmp_path):
    assert gguf_header.quote("a\n\x1b[31m") == "'a\\n\\x1b[31m'"
    assert len(gguf_header.quote("n" * 1000)) < 100
