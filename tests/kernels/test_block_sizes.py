"""Tables of block sizes: what is found, what is left at its default, and what is refused with the file and the key."""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.block_sizes import (
    BadTable,
    BlockSizeTable,
    bucket,
    device_kind,
    parse,
    shape_bucket,
    work_bucket,
    write,
)
from pallas_kernels.ragged_paged_attention import AttentionOp, RaggedBatch, gpu, tpu

BUCKET = "decode/K8/G4/H128/Z64/bfloat16"
TABLE = {"TPU v5 lite": {BUCKET: {"pages": 4}, "work/Z64": {"queries": 256}}, "NVIDIA H200": {BUCKET: {"warps": 8}}}


@dataclass(frozen=True)
class Sizes:
    pages: int = 1
    queries: int = 128


def on(kind: str):
    """Compiling for a device that is not here, as under `jax.set_mesh` of its mesh."""
    here = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",)).abstract_mesh
    device = dataclasses.replace(here.abstract_device, device_kind=kind)
    return jax.sharding.use_abstract_mesh(here.update(abstract_device=device))


@pytest.fixture
def table(tmp_path: Path) -> BlockSizeTable:
    write(tmp_path, TABLE)
    return BlockSizeTable.load(tmp_path, "TPU", Sizes)


def test_a_bucket_is_spelt_by_its_shape():
    shape = {"num_kv_heads": 8, "group": 4, "head_dim": 128, "page_size": 64}
    assert shape_bucket("decode", kv_dtype=jnp.bfloat16, **shape) == BUCKET
    assert work_bucket(64) == "work/Z64"
    for dtype in ("int8", "float32", "float8_e4m3fn", "bfloat16"):
        assert parse(json.dumps({"x": {bucket("w8a16", K=8, dtype=dtype): {"pages": 1}}}), "x")


def test_what_is_not_tuned_has_its_default(table: BlockSizeTable):
    with on("TPU v5 lite"):
        assert table.choose(BUCKET, Sizes()) == Sizes(pages=4)
        assert table.choose(work_bucket(64), Sizes()) == Sizes(queries=256)
        assert table.choose(work_bucket(32), Sizes()) == Sizes()
    with on("TPU v6 lite"):
        assert table.choose(BUCKET, Sizes()) == Sizes()
    assert table.find("TPU v5 lite", BUCKET) == {"pages": 4}
    assert table.find("TPU v6 lite", BUCKET) is None


def test_an_implementation_reads_its_own_devices_alone(tmp_path: Path):
    write(tmp_path, TABLE)
    assert set(BlockSizeTable.load(tmp_path, "NVIDIA", dataclasses.make_dataclass("S", ["warps"])).sizes) == {
        "NVIDIA H200"
    }
    with pytest.raises(
        BadTable, match=r"tuned\.json: 'NVIDIA H200': 'decode/.*': 'warps' is no block size.*pages, que"
    ):
        BlockSizeTable.load(tmp_path, "NVIDIA", Sizes)


def test_without_a_file_everything_is_at_its_default(tmp_path: Path):
    assert BlockSizeTable.load(tmp_path, "TPU", Sizes).choose(BUCKET, Sizes(3, 4)) == Sizes(3, 4)


def test_a_written_table_reads_back(tmp_path: Path):
    write(tmp_path, TABLE)
    assert parse((tmp_path / "tuned.json").read_text(), "x") == TABLE
    with pytest.raises(BadTable):
        write(tmp_path, {"TPU v4": {"decode": {"pages": 1}}})
    assert parse((tmp_path / "tuned.json").read_text(), "x") == TABLE, "a bad table must not replace a good one"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "must be an object by device kind"),
        ('{"TPU v4": 1}', "'TPU v4' must be an object by shape bucket"),
        ('{"TPU v4": {"decode": {"pages": 1}}}', "'TPU v4': 'decode' is no shape bucket"),
        ('{"TPU v4": {"work/Z0": {"pages": 1}}}', "is no shape bucket"),
        ('{"TPU v4": {"Decode/K8/bfloat16": {"pages": 1}}}', "is no shape bucket"),
        ('{"TPU v4": {"decode/8/bfloat16": {"pages": 1}}}', "is no shape bucket"),
        ('{"TPU v4": {"work/Z64": []}}', "'work/Z64' must be an object of sizes"),
        ('{"TPU v4": {"work/Z64": {}}}', "'work/Z64' must be an object of sizes"),
        *(
            (f'{{"TPU v4": {{"work/Z64": {{"pages": {value}}}}}}}', "pages is .*; it must be an integer > 0")
            for value in ("0", "-1", "1.0", "true", '"4"', "null", "NaN")
        ),
        ('{"TPU v4": {}, "TPU v4": {}}', "'TPU v4' stands there twice"),
        ('{"TPU v4": {"work/Z64": {"pages": 1, "pages": 2}}}', "'pages' stands there twice"),
    ],
)
def test_a_bad_table_is_refused_with_file_and_key(text: str, message: str):
    with pytest.raises(BadTable, match=rf"^some/tuned\.json: .*{message}"):
        parse(text, "some/tuned.json")


def test_the_device_is_that_of_the_mesh_in_use_else_the_first_here():
    assert device_kind() == jax.devices()[0].device_kind
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))):
        assert device_kind() == jax.devices()[0].device_kind
    with on("TPU v6 lite"):
        assert device_kind() == "TPU v6 lite"
        seen = []

        def kernel(x):
            seen.append(device_kind())
            return x

        spec = jax.sharding.PartitionSpec()
        jax.eval_shape(jax.shard_map(kernel, in_specs=spec, out_specs=spec, check_vma=False), SHAPE)
        assert seen == ["TPU v6 lite"], "also while tracing, and in the part of one device"


SHAPE = jax.ShapeDtypeStruct((64, 8, 4, 128), jnp.bfloat16)  # T, K, G, H
BATCH = RaggedBatch(*(jax.ShapeDtypeStruct(s, jnp.int32) for s in ((2, 64), (2,), (3,))))


def work_of(op: AttentionOp):
    """The work list's shapes, for pages of 64."""
    return jax.eval_shape(
        functools.partial(op.prepare, num_tokens=64, max_query_len=64, page_size=64, sliding_window=None), BATCH
    )


def test_the_tpu_kernel_takes_what_is_tuned(monkeypatch: pytest.MonkeyPatch):
    tuned = {BUCKET: {"pages_per_block": 3}, "work/Z64": {"queries_per_tile": 32}}
    monkeypatch.setattr(tpu, "TUNED", BlockSizeTable({"TPU v5 lite": tuned}))
    pages = tpu.OP.page_shapes(3, 8, 128, 64, jnp.bfloat16)
    default = tpu.default_block_sizes(8, 128, 64, jnp.bfloat16)
    with on("TPU v5 lite"):
        work = work_of(tpu.OP)
        assert work.queries_per_tile == 32
        assert tpu.tuned_block_sizes(SHAPE, pages, work) == default, "this step is not decode"
        decode = dataclasses.replace(work, queries_per_tile=1)
        assert tpu.tuned_block_sizes(SHAPE, pages, decode) == dataclasses.replace(default, pages_per_block=3)
    with on("TPU v4"):
        assert work_of(tpu.OP).queries_per_tile == 64, "no more than the step has"
        assert tpu.tuned_block_sizes(SHAPE, pages, decode) == default


def test_the_gpu_kernels_take_what_is_tuned(monkeypatch: pytest.MonkeyPatch):
    tuned = {BUCKET: {"decode_warps": 2}, "work/Z64": {"split_keys": 4096}}
    monkeypatch.setattr(gpu, "TUNED", BlockSizeTable({"NVIDIA H200": tuned}))
    pages = gpu.OP.page_shapes(3, 8, 128, 64, jnp.bfloat16)
    default = gpu.default_block_sizes(head_dim=128, dtype=jnp.bfloat16)
    with on("NVIDIA H200"):
        work = work_of(gpu.OP)
        assert work.items.row_W.shape == (2,), "an item of 4096 positions holds a whole row"
        assert gpu.tuned_block_sizes(SHAPE, pages, work) == default, "this step is not decode"
        decode = dataclasses.replace(work, has_tiles=False)
        assert gpu.tuned_block_sizes(SHAPE, pages, decode) == dataclasses.replace(default, decode_warps=2)
    with on("NVIDIA H100"):
        assert work_of(gpu.OP).items.row_W.shape == (2 * 4096 // default.split_keys,)
        assert gpu.tuned_block_sizes(SHAPE, pages, decode) == default


def test_every_table_of_the_repository_is_read_by_this_module():
    for path in Path(pallas_kernels.__file__).parent.glob("*/tuned.json"):
        assert parse(path.read_text(encoding="utf-8"), str(path))
