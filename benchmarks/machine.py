"""What the machine can do, measured where the benchmarks run, and what a step asks of it: their quotient is a roofline fraction.

The least time of a step is that of its scarcest resource: float32 operations, bytes to and from memory, or exponentials, each
divided by the rate that a tiny probe reaches here. Counts are of the formulas, not of our code: what every exact method has to do,
with the numbers that fit no cache read and written once. Medians, batches and optimisers of small clouds are not counted, so that
a fraction of 1 is out of reach.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.timing import seconds

MANY = 16
"""Exponentials for a number that is read, so that memory does not count."""


class Limits(NamedTuple):
    """What the machine does in a second."""

    flops: float
    """Float32 operations, in a product of matrices."""
    bytes: float
    """To and from memory, in a copy."""
    exps: float

    def rounded(self) -> dict[str, float]:
        """For a record."""
        return {name: float(f"{rate:.3g}") for name, rate in self._asdict().items()}


class Need(NamedTuple):
    """What a step asks for."""

    flops: float = 0.0
    bytes: float = 0.0
    exps: float = 0.0

    def seconds(self, limits: Limits) -> float:
        """The least time: that of the scarcest resource."""
        return max(need / limit for need, limit in zip(self, limits, strict=True))


def measured(small: bool = False) -> Limits:
    """Three probes, about a second each; `small` ones for tests."""
    on_gpu = jax.default_backend() == "gpu"
    side, size, short = (256, 1 << 16, 1 << 12) if small else (8192, 1 << 28, 1 << 24) if on_gpu else (2048, 1 << 26, 1 << 18)  # fmt: skip
    turn = 0.01 if small else 0.2

    eye = jnp.eye(side)

    kernels = lambda a: sum(jnp.exp(-k * a) for k in range(1, 1 + MANY)) / MANY
    multiply = lambda a: jnp.matmul(eye, a, precision=lax.Precision.HIGHEST)
    return Limits(
        flops=2 * side**3 / _turn(multiply, jnp.eye(side), turn),
        bytes=8 * size / _turn(lambda a: a + 1, jnp.zeros(size), turn),
        exps=MANY * short / _turn(kernels, jnp.linspace(0, 1, short), turn),
    )


def _turn(function: Callable[[jax.Array], Any], a: jax.Array, turn: float) -> float:
    """Seconds of `function` in a compiled loop that writes where it reads: fresh memory is slow."""

    @functools.partial(jax.jit, donate_argnums=0)
    def many(a: jax.Array, count: int) -> jax.Array:
        return lax.fori_loop(0, count, lambda _, a: function(a), a)

    def call(count: int) -> jax.Array:
        nonlocal a
        a = many(a, count)
        return a

    return seconds(call, turn)


def svgd(num: int, dim: int) -> Need:
    """The Stein direction: for each of M^2 pairs a distance (3 D), one exponential and two sums of D terms (4 D)."""
    return Need(flops=7 * dim * num**2, exps=num**2)


def regression(num: int, dim: int, batch: int) -> Need:
    """Two products with the batch's rows for the score, an exponential for each of M B logits, and the Stein direction."""
    pairs = svgd(num, dim)
    return Need(flops=4 * num * batch * dim + pairs.flops, exps=num * batch + pairs.exps)


def networks(num: int, sizes: tuple[int, ...], batch: int, passes: int = 0) -> Need:
    """M perceptrons: three products with every matrix, but two with the first; RMSprop reads cloud, gradient and squares and writes
    cloud and squares, after the gradient was written: six passes over M D numbers, and an interaction's own `passes`.
    """
    areas = [a * b for a, b in itertools.pairwise(sizes)]
    dim = sum(areas) + sum(sizes[1:])
    flops = 2 * num * batch * (3 * sum(areas) - areas[0])
    return Need(flops=flops, bytes=4 * num * dim * (6 + passes))
