"""Every pair of a cloud once: particles in a circle, each with the half of the others that comes after it.

The pairs at distance s along the circle are two vectors, the cloud and the cloud shifted by s, so that sums over pairs are
vector operations on numbers that stay in cache: no matrix, no reduction. On a CPU a pass over the pairs of 2000 particles that
counts squared distances takes under a millisecond.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

__all__ = ["look", "sample"]

UNROLL, CHUNK = 8, 2048
"""Shifts at a time, and particles of the cloud at a time, which with their sums fit a small cache."""


def look(x: Float[Array, "M D"]) -> Callable[[Array], tuple[Array, Array]]:
    """Passes over the squared distances: look(pivot) is how many are <= pivot, and the least above it."""
    parts = [slice(begin, begin + CHUNK) for begin in range(0, len(x), CHUNK)]

    def passing(pivot: Array) -> tuple[Array, Array]:
        def measure(sums: Any, r2: Array) -> Any:
            under = r2 <= pivot
            above = jnp.minimum(sums[1], jnp.where(under, jnp.inf, r2))
            return sums[0] + under.astype(jnp.float32), above

        found = [_fold(x, part, measure) for part in parts]
        count = sum(jnp.sum(counts.astype(jnp.int32)) for counts, _ in found)
        return count, functools.reduce(jnp.minimum, [jnp.min(least) for _, least in found])  # pyright: ignore

    return passing


def _fold(x: Array, part: slice, measure: Callable[[Any, Array], Any]) -> Any:
    """`measure` over the squared distances of some particles to the half of the cloud after each."""
    num, shifts = len(x), len(x) // 2
    own = [x[part, d] for d in range(x.shape[1])]
    size = len(own[0])
    twice = [jnp.concatenate([x[:, d]] * 2)[part.start :] for d in range(x.shape[1])]

    def away(shift: Any) -> Array:
        others = [lax.dynamic_slice(a, (shift,), (size,)) for a in twice]
        squares = [(b - a) ** 2 for a, b in zip(own, others, strict=True)]
        return sum(squares[1:], squares[0])

    def block(i: Any, sums: Any) -> Any:
        return functools.reduce(measure, [away(1 + i * UNROLL + u) for u in range(UNROLL)], sums)

    start = (jnp.zeros(size, jnp.float32), jnp.full(size, jnp.inf, x.dtype))
    blocks = (shifts - (num % 2 == 0)) // UNROLL
    sums = lax.fori_loop(0, blocks, block, start)
    for shift in range(1 + blocks * UNROLL, shifts + 1):
        r2 = away(shift)
        if 2 * shift == num:  # half the circle away, pairs meet twice
            r2 = jnp.where(part.start + jnp.arange(size) < shift, r2, jnp.inf)
        sums = measure(sums, r2)
    return sums


def sample(num: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Random pairs of `num` particles, always the same."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, num, size)
    return first, (first + rng.integers(1, num, size)) % num
