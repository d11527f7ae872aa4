"""Entries of a wanted rank without sorting them all: by bisection on the bits of floats, whose order is that of integers."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

__all__ = ["bisect", "count", "integer", "row_counts", "sorted_ranks", "upper"]


def integer(dtype: Any) -> Any:
    """The integers of a float's size."""
    return jnp.int64 if dtype == jnp.float64 else jnp.int32


def row_counts(entries: Array, bits: Array) -> Array:
    """How many entries of each row are <= bits; by matvec, over twice as fast as by a sum."""
    return (entries <= bits).astype(jnp.float32) @ jnp.ones(entries.shape[1], jnp.float32)


def count(entries: Array, bits: Array) -> Array:
    """How many entries are <= bits; a sum of floats vectorises where one of integers does not."""
    return jnp.sum((entries <= bits).astype(jnp.float32)).astype(jnp.int32)


def sorted_ranks(half: Array, ranks: list[int], zeros: int) -> list[Array]:
    """Entries by rank among `zeros` zeros and two copies of every one of `half`.

    By a sort, or between 32 and 128 particles by comparing all entries with all, for which one launch is enough.
    """
    zero = jnp.zeros((), half.dtype)
    wanted = [(rank - zeros - 1) // 2 for rank in ranks]
    if not 496 <= len(half) <= 8128:
        ordered = jnp.sort(half)
        return [ordered[place] if place >= 0 else zero for place in wanted]
    upto = jnp.sum((half[None, :] <= half[:, None]).astype(jnp.int32), 1)
    most = jnp.iinfo(half.dtype).max
    found = [jnp.min(jnp.where(upto > place, half, most)) for place in wanted]
    return [value if place >= 0 else zero for value, place in zip(found, wanted, strict=True)]


def upper(num: int) -> np.ndarray:
    """Where the pairs i < j are in the flattened matrix."""
    rows, columns = np.triu_indices(num, 1)
    return (rows * num + columns).astype(np.int32)


def bisect(count: Callable[[Array], Array], ranks: list[int], dtype: Any) -> list[Array]:
    """The smallest integers that at least `rank` entries do not exceed, for one or two ranks.

    Both by one loop body, so that distances that `count` computes anew round in the same way.
    """
    passes, top = jnp.iinfo(dtype).bits - 1, jnp.iinfo(dtype).max - 1
    wanted = jnp.array(ranks, jnp.int32)

    def halve(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, high, first = carry
        again = i == passes
        first, high = jnp.where(again, low, first), jnp.where(again, top, high)
        middle = low + (high - low) // 2
        enough = count(middle) >= wanted[i // passes]
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high), first

    start = (jnp.zeros((), dtype), jnp.array(top, dtype), jnp.zeros((), dtype))
    last, _, first = lax.fori_loop(0, passes * len(ranks), halve, start)
    return [last] if len(ranks) == 1 else [first, last]
