"""Lowers and compiles every program before the first request, and counts what is traced afterwards.

A program is known by its shapes alone; nothing a user can ask for adds one:

    decode   a bucket of rows (1, 2, 4, ... slots)          mixed   a bucket of query tokens
    admit, score, scrub, copy_out, copy_in   one each
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.model import scrub
from jaxinfer.step import programs as bodies
from jaxinfer.step.programs import NUM_ROW_NUMBERS, ProgramContext, PromptHidden
from jaxinfer.step.slot_state import NUM_ADMISSION_NUMBERS, admit

COPY_PAGES = 16  # pages per copy between device and host memory
MAX_ADMISSIONS = 8  # slots written by one call


def buckets(low: int, high: int) -> tuple[int, ...]:
    """Powers of two from `low`, then `high` itself."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return (*sizes, high)


@dataclass(frozen=True, kw_only=True)
class ProgramSizes:
    """The static sizes of all programs.

    Attributes:
      num_slots: S.
      max_num_batched_tokens: largest bucket of query tokens.
      max_rounds: most rounds of a decode dispatch.
      max_model_len: L.
      num_pages: pages in the pool, the null page included.
      table_width: M.
    """

    num_slots: int
    max_num_batched_tokens: int
    max_rounds: int
    max_model_len: int
    num_pages: int
    table_width: int

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Rows of the decode programs: powers of two, and from 16 on their halfway points, for a row costs there."""
        halfway = (3 * size // 2 for size in buckets(16, max(16, self.num_slots)))
        return tuple(sorted({*buckets(1, self.num_slots), *(h for h in halfway if h < self.num_slots)}))

    @property
    def token_buckets(self) -> tuple[int, ...]:
        """Query tokens of the mixed programs."""
        return buckets(min(16, self.max_num_batched_tokens), self.max_num_batched_tokens)

    def mixed_rows(self, num_tokens: int) -> int:
        """Rows of a mixed program: no more than it has tokens."""
        return min(num_tokens, self.num_slots)


class CompileCounter:
    """Counts the functions jax traces in this process while the counter lives, by jax's own monitoring events."""

    def __init__(self):
        counts: dict[int, int] = {}

        def on_event(event: str, duration_secs: float, **kwargs: Any) -> None:
            if event == "/jax/core/compile/jaxpr_trace_duration":
                thread = threading.get_ident()
                counts[thread] = counts.get(thread, 0) + 1

        self._counts = counts
        jax.monitoring.register_event_duration_secs_listener(on_event)
        weakref.finalize(self, jax.monitoring.unregister_event_duration_listener, on_event)

    @property
    def num_traces(self) -> int:
        """In all threads."""
        return sum(self._counts.values())

    @property
    def num_traces_here(self) -> int:
        """In the calling thread."""
        return self._counts.get(threading.get_ident(), 0)


class Programs:
    """The compiled programs of one engine.

    Of parameters, pages and slots it takes shapes, dtypes and shardings alone: arrays, or `jax.ShapeDtypeStruct`, on
    devices that may be a topology to compile for.

    Attributes:
      sizes: static sizes.
      num_compiled: programs compiled so far.
      num_recompiles: functions traced on this engine's behalf outside warm-up: 0, or a bug.
    """

    def __init__(
        self,
        context: ProgramContext,
        sizes: ProgramSizes,
        leaves,
        pages,
        state,
        vocab_row_words: int,
        counter: CompileCounter,
    ):
        self.sizes = sizes
        self.num_recompiles = 0
        self._counter = counter
        self._is_counting = False
        self._context = context
        self._leaves = _shapes(leaves)
        self._pages = _shapes(pages)
        self._state = _shapes(state)
        self._vocab_row_words = vocab_row_words
        self._compiled: dict[tuple, Any] = {}
        self._lock = threading.Lock()

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    @property
    def replicated(self):
        """Sharding of what the host sends."""
        return self._context.rules.replicated

    def keys(self) -> list[tuple]:
        """Every program there is, most used first."""
        decode = [("decode", rows) for rows in reversed(self.sizes.row_buckets)]
        mixed = [("mixed", tokens) for tokens in reversed(self.sizes.token_buckets)]
        return [("admit",), *mixed, *decode, ("score",), ("scrub",), ("copy_out",), ("copy_in",)]

    def get(self, key: tuple) -> Callable[..., Any]:
        """A compiled program; compiled now, and counted, if warm-up left it out."""
        if key not in self._compiled:
            with self.counting():
                self._compile(key)
        return self._compiled[key]

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Adds what this thread traces meanwhile to `num_recompiles`. May be nested; for the engine's own thread."""
        if self._is_counting:
            yield
            return
        before, self._is_counting = self._counter.num_traces_here, True
        try:
            yield
        finally:
            self._is_counting = False
            self.num_recompiles += self._counter.num_traces_here - before

    def warm_up(self, on_done: Callable[[tuple], None], num_threads: int = 2) -> None:
        """Compiles all programs. Tracing holds the interpreter; compiling runs in threads beside it.

        Args:
          on_done: called with each finished program's key, in this thread.
        """
        with ThreadPoolExecutor(num_threads) as pool:
            waiting = {pool.submit(self._compile, key): key for key in self.keys()}
            for done in as_completed(waiting):
                done.result()
                on_done(waiting[done])

    def lower(self, key: tuple) -> jax.stages.Lowered:
        """A program as it is handed to the compiler; needs shapes alone. One thread at a time, the others wait."""
        make = getattr(self, f"_lower_{key[0]}")
        with self._lock, jax.set_mesh(self._context.rules.mesh):
            return make(*key[1:])

    def _compile(self, key: tuple) -> None:
        self._compiled[key] = self.lower(key).compile()

    def _int32(self, *shape: int):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._context.rules.replicated)

    def _lower_decode(self, rows: int):
        body = functools.partial(bodies.decode, self._context, self.sizes.max_rounds)
        packed = self._int32(rows, 1 + self.sizes.table_width)
        outs = (_shardings(self._pages), _shardings(self._state), self.replicated)
        program = jax.jit(body, donate_argnums=(1, 2), out_shardings=outs)
        return program.lower(self._leaves, self._pages, self._state, packed, self._int32())

    def _lower_mixed(self, tokens: int):
        body = functools.partial(bodies.mixed, self._context, tokens, self.sizes.max_num_batched_tokens)
        packed = self._int32(self.sizes.mixed_rows(tokens), NUM_ROW_NUMBERS + self.sizes.table_width)
        outs = (_shardings(self._pages), _shardings(self._state), self.replicated, self.replicated)
        program = jax.jit(body, donate_argnums=(1, 2), out_shardings=outs)
        return program.lower(self._leaves, self._pages, self._state, packed)

    def _lower_admit(self):
        words = NUM_ADMISSION_NUMBERS + self.sizes.max_model_len + self._vocab_row_words
        program = jax.jit(admit, donate_argnums=0, out_shardings=_shardings(self._state))
        return program.lower(self._state, self._int32(MAX_ADMISSIONS, words))

    def _lower_score(self):
        tokens, width = self.sizes.max_num_batched_tokens, self._context.arch.hidden_size
        dtype = self._context.rebuild(self._leaves).top["embedding"].get_value().dtype
        x_TD: Any = jax.ShapeDtypeStruct((tokens, width), dtype, sharding=self.replicated)
        target_T: Any = self._int32(tokens)
        program = jax.jit(functools.partial(bodies.score, self._context), out_shardings=self.replicated)
        return program.lower(self._leaves, PromptHidden(x_TD, target_T), self._int32())

    def _lower_scrub(self):
        program = jax.jit(scrub, donate_argnums=0, out_shardings=_shardings(self._pages))
        return program.lower(self._pages, self._int32(COPY_PAGES))

    def _lower_copy_out(self):
        program = jax.jit(bodies.copy_out, out_shardings=_shardings(self._pages))
        return program.lower(self._pages, self._int32(COPY_PAGES))

    def _lower_copy_in(self):
        values = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((COPY_PAGES, *a.shape[1:]), a.dtype, sharding=a.sharding), self._pages
        )
        program = jax.jit(bodies.copy_in, donate_argnums=0, out_shardings=_shardings(self._pages))
        return program.lower(self._pages, self._int32(COPY_PAGES), values)


def _shardings(tree):
    return jax.tree.map(lambda a: a.sharding, tree)


def _shapes(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def traced_once(function: Callable[..., Any], num_static: int) -> Callable[..., Any]:
    """`function` traced once for each value of its first `num_static` (hashable) arguments and shapes of the rest."""
    return jax.jit(function, static_argnums=tuple(range(num_static)))
