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
    num = len(x)
    parts = -(-num // CHUNK)
    size = -(-num // parts)

    def passing(pivot: Array) -> tuple[Array, Array]:
        def measure(sums: Any, r2: Array) -> Any:
            under = r2 <= pivot
            above = jnp.minimum(sums[1], jnp.where(under, jnp.inf, r2))
            return sums[0] + under.astype(jnp.float32), above

        def part(i: Any, found: tuple[Array, Array]) -> tuple[Array, Array]:
            counts, least = _fold(x, i * size, size, measure)
            counted = found[0] + jnp.sum(counts.astype(jnp.int32), dtype=jnp.int32)
            return counted, jnp.minimum(found[1], jnp.min(least))

        start = (jnp.zeros((), jnp.int32), jnp.array(jnp.inf, x.dtype))
        return lax.fori_loop(0, parts, part, start) if parts > 1 else part(0, start)

    return passing


def _fold(x: Array, begin: Any, size: int, measure: Callable[[Any, Array], Any]) -> Any:
    """`measure` over the squared distances of the particles from `begin` on to the half of the cloud after each."""
    num, shifts = len(x), len(x) // 2
    # The last part begins early, with particles that are done: they are put far from all.
    first = jnp.minimum(begin, num - size)
    place = first + jnp.arange(size)
    columns = [x[:, d] for d in range(x.shape[1])]
    own = [lax.dynamic_slice(a, (first,), (size,)) for a in columns]
    own = [jnp.where(place < begin, jnp.inf, a) for a in own]
    twice = [jnp.concatenate([a] * 2) for a in columns]

    def away(shift: Any) -> Array:
        others = [lax.dynamic_slice(a, (first + shift,), (size,)) for a in twice]
        squares = [(b - a) ** 2 for a, b in zip(own, others, strict=True)]
        return sum(squares[1:], squares[0])

    def block(i: Any, sums: Any) -> Any:
        return functools.reduce(measure, [away(1 + i * UNROLL + u) for u in range(UNROLL)], sums)

    sums = (jnp.zeros(size, jnp.float32), jnp.full(size, jnp.inf, x.dtype))
    most = shifts - (num % 2 == 0)
    blocks = most // UNROLL
    sums = lax.fori_loop(0, blocks, block, sums)
    single = lambda shift, sums: measure(sums, away(shift))
    sums = lax.fori_loop(1 + blocks * UNROLL, 1 + most, single, sums)
    if num % 2 == 0:  # half the circle away, pairs meet twice
        sums = measure(sums, jnp.where(place < shifts, away(shifts), jnp.inf))
    return sums


def sample(num: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Random pairs of `num` particles, always the same."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, num, size)
    return first, (first + rng.integers(1, num, size)) % num
