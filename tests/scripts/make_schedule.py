"""Makes data/pages_kernel.*.txt: what the TPU compiler dumps for a small kernel of the shape of paged attention.

    python -m tests.scripts.make_schedule v6e        (needs libtpu)

The kernel walks rows, and each row's pages: it fetches a page, and multiplies. An empty row is skipped by a branch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.plan.targets import find_target

DATA = Path(__file__).parent / "data"
STEPS = ("packed-bundles-post-ra", "original", "pre-delay_hlo-static-per-bundle-utilization")
ROWS, PAGES, PAGE_SIZE, WIDTH = 4, 3, 16, 128


def _kernel(table_ref, length_ref, q_ref, pages_hbm, out_ref, page_buf, sem):
    def one_row(row, _):
        @pl.when(length_ref[row] > 0)
        def _():
            out_ref[row] = jnp.zeros(out_ref.shape[1:], jnp.float32)

            def one_page(i, _):
                copy = pltpu.make_async_copy(pages_hbm.at[table_ref[row, i]], page_buf, sem)
                copy.start()
                copy.wait()
                out_ref[row] += lax.dot_general(
                    q_ref[row], page_buf[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
                )
                return 0

            lax.fori_loop(0, (length_ref[row] + PAGE_SIZE - 1) // PAGE_SIZE, one_page, 0)

        return 0

    lax.fori_loop(0, ROWS, one_row, 0)


def pages_kernel(table, length, q, pages):
    """float32 [rows, 8, page size]: each row's queries times its pages' rows, summed over its pages."""
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[pl.BlockSpec(q.shape, lambda *_: (0, 0, 0)), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((ROWS, 8, PAGE_SIZE), lambda *_: (0, 0, 0)),
            scratch_shapes=[pltpu.VMEM((PAGE_SIZE, WIDTH), pages.dtype), pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct((ROWS, 8, PAGE_SIZE), jnp.float32),
        name="pages_kernel",
    )(table, length, q, pages)


def arguments():
    """Shapes of the kernel's arguments."""
    return (
        jax.ShapeDtypeStruct((ROWS, PAGES), jnp.int32),
        jax.ShapeDtypeStruct((ROWS,), jnp.int32),
        jax.ShapeDtypeStruct((ROWS, 8, WIDTH), jnp.bfloat16),
        jax.ShapeDtypeStruct((ROWS * PAGES + 1, PAGE_SIZE, WIDTH), jnp.bfloat16),
    )


def _compile(target: str) -> None:
    mesh = find_target(target).mesh()
    place = NamedSharding(mesh, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place) for a in arguments()]
    with jax.set_mesh(mesh):
        jax.jit(pages_kernel).lower(*shapes).compile()


def _shortened(text: str) -> str:
    """Without the long comments, which nothing reads."""
    return re.sub(r"/\* (?:exit|entry) bundle.*?\*/", "", text, flags=re.DOTALL)


def main() -> None:
    target = sys.argv[1]
    if len(sys.argv) > 2:
        _compile(target)
        return
    DATA.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        env = dict(os.environ, JAX_PLATFORMS="cpu", LIBTPU_INIT_ARGS=flags)
        subprocess.run([sys.executable, "-m", "tests.scripts.make_schedule", target, "here"], env=env, check=True)
        for path in sorted(Path(folder).glob("*pages_kernel*.txt")):
            for step in STEPS:
                if re.search(rf"pages_kernel\.\d+-\d+-{step}\.txt$", path.name):
                    (DATA / f"pages_kernel.{target}.{step}.txt").write_text(_shortened(path.read_text()))


if __name__ == "__main__":
    main()
