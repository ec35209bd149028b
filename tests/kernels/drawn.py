"""Drawn arrays of a named case, filled page pools, and attention in numpy float64, for tests of every implementation.

Pages that no row owns, the null page among them, hold NaN: one read of them shows. Owned pages hold stale finite values
where nothing has been written, as recycled pages do.

Compiling costs a hundred times what running does, so cases are padded to a few shared shapes, as the engine pads its
steps (empty rows, unused table entries, padding tokens), and compiled at LLVM's lowest level.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention import AttentionOp, RaggedBatch
from pallas_kernels.ragged_paged_attention.cases import CASES, AttentionCase

# Largest difference of an output, whose values are averages of normal draws. A mutant must exceed ten times as much.
TOLERANCES = {
    "float32": 5e-6,  # sums of at most 400 products of size 1 in another order: measured 1e-6
    "bfloat16": 1.6e-2,  # the output is rounded to 8 bits: half a unit in the last place of values up to 8 is 1.6e-2
}
BY_NAME = {case.name: case for case in CASES}
NUM_PAGES = 64  # more than any case owns
ROWS = 8
TOKENS = (64, 256)
WIDTHS = (8, 32)
WRITTEN = 512  # positions of all contexts together, padded


@dataclass(frozen=True)
class Drawn:
    """A case's arrays.

    Attributes:
      q_TKGH, k, v: normal draws in the case's dtype; k and v are [S, K, H] per row of the case.
      batch: numpy arrays, with page ids shuffled over the pool.
      owned: ids of the pages that some row owns.
      max_query_len: a bound, as `prepare` takes it.
    """

    case: AttentionCase
    q_TKGH: np.ndarray
    k: tuple[np.ndarray, ...]
    v: tuple[np.ndarray, ...]
    batch: RaggedBatch
    owned: np.ndarray
    max_query_len: int


@functools.cache
def draw(case: AttentionCase, is_exact: bool = False) -> Drawn:
    """Draws a case; padded to a shared shape unless `is_exact`."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))

    def normal(*shape):
        return rng.standard_normal(shape).astype(jnp.dtype(case.dtype))

    num_rows = len(case.context_lens)
    rows, width, tokens = num_rows, case.table_width, case.num_tokens
    if not is_exact:
        rows = ROWS
        width = next(w for w in WIDTHS if w >= width)
        tokens = ROWS if case.is_decode else next(t for t in TOKENS if t >= tokens)
    free = rng.permutation(np.arange(1, NUM_PAGES, dtype=np.int32))
    table_BM = np.zeros((rows, width), np.int32)
    for row in range(num_rows):
        count = case.num_pages(row)
        table_BM[row, :count], free = free[:count], free[count:]
    # Rows added for padding are frozen ones in a decode batch, as in the engine's, and empty ones elsewhere.
    query_lens = [*case.query_lens, *[int(case.is_decode)] * (rows - num_rows)]
    kv_shape = (case.num_kv_heads, case.head_dim)
    k, v = (tuple(normal(n, *kv_shape) for n in case.context_lens) for _ in range(2))
    return Drawn(
        case=case,
        q_TKGH=normal(tokens, case.num_kv_heads, case.group, case.head_dim),  # last: its size alone depends on padding
        k=k,
        v=v,
        batch=RaggedBatch(
            page_table_BM=table_BM,
            context_len_B=np.array([*case.context_lens, *[0] * (rows - num_rows)], np.int32),
            query_start_R=np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32),
        ),
        owned=table_BM[table_BM > 0],
        max_query_len=1 if case.is_decode else tokens,
    )


def _as_stored(x_SKH: np.ndarray, kv_dtype: str | None) -> np.ndarray:
    """float64 values of keys or values after a stay in pages of `kv_dtype`; None leaves them as they are."""
    if kv_dtype is None:
        return x_SKH.astype(np.float64)
    dtype = jnp.dtype(kv_dtype)
    x_SKH = x_SKH.astype(np.float32)
    if kv_dtype not in ("int8", "float8_e4m3fn"):
        return x_SKH.astype(dtype).astype(np.float64)
    largest = np.float32(127 if kv_dtype == "int8" else jnp.finfo(dtype).max)
    scale_SK1 = np.abs(x_SKH).max(-1, keepdims=True) / largest
    scale_SK1[scale_SK1 == 0] = 1
    stored_SKH = x_SKH / scale_SK1
    if kv_dtype == "int8":
        stored_SKH = np.round(stored_SKH)
    return np.clip(stored_SKH, -largest, largest).astype(dtype).astype(np.float64) * scale_SK1.astype(np.float64)


def expected(drawn: Drawn, kv_dtype: str | None = None) -> list[np.ndarray]:
    """float64 [query_len, K, G, H] per row; of the rounded keys and values where pages are of another dtype."""
    case, window, out = drawn.case, drawn.case.window, []
    for row, (context, length) in enumerate(zip(case.context_lens, case.query_lens, strict=True)):
        start = int(drawn.batch.query_start_R[row])
        q = drawn.q_TKGH[start : start + length].astype(np.float64)
        k, v = _as_stored(drawn.k[row], kv_dtype), _as_stored(drawn.v[row], kv_dtype)
        values = np.zeros(q.shape)
        for i in range(length if context else 0):
            position = context - length + i
            first = 0 if window is None else max(0, position - window + 1)
            for kv_head in range(case.num_kv_heads):
                for g in range(case.group):
                    scores = k[first : position + 1, kv_head] @ q[i, kv_head, g] * case.scale
                    if case.soft_cap is not None:
                        scores = case.soft_cap * np.tanh(scores / case.soft_cap)
                    weights = np.exp(scores - scores.max())
                    values[i, kv_head, g] = weights @ v[first : position + 1, kv_head] / weights.sum()
        out.append(values)
    return out


@functools.cache
def filled_pages(case: AttentionCase, op: AttentionOp, kv_dtype: str | None = None):
    """The pool with every context written, in one call that is padded with writes to the null page."""
    drawn = draw(case)
    page_T, offset_T = np.zeros(WRITTEN, np.int32), np.zeros(WRITTEN, np.int32)
    k_TKH, v_TKH = (np.zeros((WRITTEN, *drawn.q_TKGH.shape[1::2]), drawn.q_TKGH.dtype) for _ in range(2))
    end = 0
    for row, context in enumerate(case.context_lens):
        position = np.arange(context, dtype=np.int32)
        start, end = end, end + context
        page_T[start:end] = drawn.batch.page_table_BM[row, position // case.page_size]
        offset_T[start:end] = position % case.page_size
        k_TKH[start:end], v_TKH[start:end] = drawn.k[row], drawn.v[row]
    rng = np.random.default_rng(7)

    def stale(struct):
        array = filled_with_nan(struct.shape, struct.dtype)
        array[drawn.owned] = (3 * rng.standard_normal((len(drawn.owned), *struct.shape[1:]))).astype(struct.dtype)
        return array

    shapes = op.page_shapes(
        NUM_PAGES, case.num_kv_heads, case.head_dim, case.page_size, jnp.dtype(kv_dtype or case.dtype)
    )
    pages = writer(op)(jax.tree.map(stale, shapes), k_TKH, v_TKH, page_T, offset_T)
    return jax.tree.map(_with_null_page_nan, pages)


def filled_with_nan(shape, dtype) -> np.ndarray:
    """NaN, or the largest number of a dtype that has none."""
    dtype = jnp.dtype(dtype)
    return np.full(shape, np.iinfo(dtype).max if dtype.kind == "i" else np.nan, dtype)


@functools.cache
def writer(op: AttentionOp):
    """The op's `write`, compiled quickly."""
    return jax.jit(op.write, compiler_options={"xla_backend_optimization_level": 0})


def _with_null_page_nan(array):
    array = np.array(array)
    array[0] = filled_with_nan(array.shape[1:], array.dtype)
    return array


@functools.cache
def attender(
    op: AttentionOp,
    window: int | None,
    soft_cap: float | None,
    page_size: int,
    max_query_len: int,
    scale: float,
    llvm_level: int = 0,
):
    """The op's `prepare` and `attend`, compiled: (q_TKGH, pages, batch) -> out_TKGH."""

    def attend(q_TKGH, pages, batch):
        work = op.prepare(
            batch,
            num_tokens=q_TKGH.shape[0],
            max_query_len=max_query_len,
            page_size=page_size,
            sliding_window=window,
        )
        return op.attend(q_TKGH, pages, work, scale=scale, soft_cap=soft_cap)

    return jax.jit(attend, compiler_options={"xla_backend_optimization_level": llvm_level})


def run(
    case: AttentionCase,
    op: AttentionOp,
    *,
    batch: RaggedBatch | None = None,
    q_scale: int = 1,
    max_query_len: int | None = None,
    is_exact: bool = False,
    kv_dtype: str | None = None,
) -> np.ndarray:
    """Outputs [T, K, G, H] as float32."""
    drawn = draw(case, is_exact)
    bound = max_query_len or drawn.max_query_len
    program = attender(op, case.window, case.soft_cap, case.page_size, bound, case.scale, 3 if is_exact else 0)
    q_TKGH = drawn.q_TKGH * np.asarray(q_scale, drawn.q_TKGH.dtype)
    out_TKGH = np.asarray(program(q_TKGH, filled_pages(case, op, kv_dtype), batch or drawn.batch))
    assert out_TKGH.dtype == jnp.dtype(case.dtype)
    return out_TKGH.astype(np.float32)


def largest_error(
    case: AttentionCase, out_TKGH: np.ndarray, is_exact: bool = False, kv_dtype: str | None = None
) -> float:
    """Over the rows that mean something; infinite when an output is not finite."""
    drawn = draw(case, is_exact)
    errors = [0.0]
    for row, want in enumerate(expected(drawn, kv_dtype)):
        start = int(drawn.batch.query_start_R[row])
        if case.context_lens[row] and len(want):
            errors.append(float(np.abs(out_TKGH[start : start + len(want)] - want).max()))
    return max(errors) if np.isfinite(errors).all() else np.inf


def shortened(case: AttentionCase) -> RaggedBatch | None:
    """A mutant: a context one too short, in every row that has room for it; None where no row has."""
    batch = draw(case).batch
    room_B = batch.context_len_B > np.diff(batch.query_start_R)
    return batch._replace(context_len_B=(batch.context_len_B - room_B).astype(np.int32)) if room_B.any() else None


def with_wrong_page(case: AttentionCase) -> RaggedBatch:
    """A mutant: the last page of the longest row replaced by another, a stranger's or one that nobody owns."""
    drawn = draw(case)
    row = int(np.argmax(case.context_lens))
    table_BM = drawn.batch.page_table_BM.copy()
    last = case.num_pages(row) - 1
    table_BM[row, last] = next(p for p in range(1, NUM_PAGES) if p != table_BM[row, last])
    return drawn.batch._replace(page_table_BM=table_BM)


def sees_two(case: AttentionCase) -> bool:
    """Whether a query of the case sees more than one position, so that weights matter."""
    return case.window != 1 and max(case.context_lens) > 1
