"""What this machine reaches, measured with two plain programs: reading memory, and one large float32 product.

The matrix is read by a product with a vector, which XLA divides over threads; it is larger than any cache. Both are the
best of several tries: other load on the machine only ever makes them slower.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

READ_SHAPE = (16384, 8192)  # 512 MiB
PRODUCT_SIZE = 2048
NUM_TRIES = 2
NUM_VISITS = 4


@dataclass(frozen=True)
class MachineRates:
    """Measured limits.

    Attributes:
      read_bytes_per_s: memory bandwidth, one large float32 array read once.
      flops_per_s: of a float32 product of two square matrices.
      device: jax's name of the device.
    """

    read_bytes_per_s: float
    flops_per_s: float
    device: str


class MachineProbe:
    """Measures at each visit, and keeps the best. Holds the read array (512 MiB) while it lives."""

    def __init__(self, read_shape: tuple[int, int] = READ_SHAPE, product_size: int = PRODUCT_SIZE):
        # Ones, not random numbers: drawing 512 MiB would take longer than all the rest.
        self._matrix, self._vector = jnp.ones(read_shape, jnp.float32), jnp.ones(read_shape[1], jnp.float32)
        self._square = jnp.ones((product_size, product_size), jnp.float32)
        self._read_s = self._product_s = math.inf

    def visit(self) -> None:
        """Some tries of both, less than a second."""
        self._read_s = min(self._read_s, best_seconds(lambda: _product(self._matrix, self._vector), NUM_TRIES))
        self._product_s = min(self._product_s, best_seconds(lambda: _product(self._square, self._square), NUM_TRIES))

    def rates(self) -> MachineRates:
        """The best of all visits."""
        assert math.isfinite(self._product_s), "visit first"
        flops = 2 * self._square.shape[0] ** 3
        device = jax.devices()[0].device_kind
        return MachineRates(self._matrix.nbytes / self._read_s, flops / self._product_s, device)


def measure_machine() -> MachineRates:
    """Several visits in a row."""
    probe = MachineProbe()
    for _ in range(NUM_VISITS):
        probe.visit()
    return probe.rates()


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def best_seconds(call: Callable[[], jax.Array], num_tries: int, calls_per_try: int = 1) -> float:
    """Least time of a call, its result ready, after one that is not counted; a try is the mean of several in a row."""
    jax.block_until_ready(call())
    return min(_seconds(call, calls_per_try) / calls_per_try for _ in range(num_tries))


def _seconds(call: Callable[[], jax.Array], num_calls: int) -> float:
    start = time.perf_counter()
    for _ in range(num_calls):
        jax.block_until_ready(call())  # each in turn: a CPU would run several at once
    return time.perf_counter() - start
