"""The exact median of all distances within a cloud, without a sort and without a matrix of a large one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, PyTree

from particlax import circle, gpu, radix, selection, sharding
from particlax.blocks import as_matrices
from particlax.errors import OptionError
from particlax.pairwise import (
    DIRECT_DIM,
    Blocks,
    _around,
    _centres,
    _few,
    _few_sqdist,
    _sqdist,
    _strip_elements,
    reduce_rows,
)
from particlax.skinny import matmul

__all__ = ["median_sqdist"]

HALF_ELEMENTS = 1 << 20
"""Largest matrix of which the median keeps the upper half: it has fewer entries than float32 counts exactly."""
CIRCLE = 512
"""On a CPU: most particles for which distances are kept although they are cheap to compute."""


def median_sqdist(x: PyTree, *, itself: bool = False, of_squares: bool = False) -> Float[Array, ""]:
    """Exact squared median distance over distinct pairs, without a sort: some ten counting passes.

    `itself` counts all M^2 entries with the zero diagonal, as the reference SVGD code does;
    `of_squares` averages the two middle squares of an even number, and not the distances.
    """
    few = _few(x, x)
    xs = lax.stop_gradient(as_matrices(x)[0])
    num = xs[0].shape[0]
    if num > 46340:
        raise OptionError(
            f"the exact median over {num} particles needs more pairs than a 32-bit count holds; "
            "take a median over a subsample, for instance Median(subsample=512)"
        )
    entries = num * num if itself else num * (num - 1)
    rank, even = (entries + 1) // 2, entries % 2 == 0

    def fast(xs: Blocks) -> tuple[Array, Array]:
        lower, upper = radix.middle(xs[0], rank if itself else rank + num)
        return lower, upper if even else lower

    # Among the M zeros of the diagonal and two copies of every pair.
    places = [(place - (num if itself else 0) - 1) // 2 for place in (rank, rank + even)]
    fits = not few and len(xs) == 1 and radix.suits(xs[0])

    def middle(add: Any, xs: Blocks) -> tuple[Array, Array]:
        xs = xs if few else _around(_centres(xs), xs, xs)[0]
        return gpu.choose(fits, fast, functools.partial(_middle, places, add), xs)

    if few:
        lower, upper = sharding.by_coordinates(middle, (xs,), result="same")
    else:
        lower, upper = sharding.together(functools.partial(middle, None), xs)
    if of_squares:
        return (lower + upper) / 2
    return ((jnp.sqrt(lower) + jnp.sqrt(upper)) / 2) ** 2


def _middle(places: list[int], add: Any, xs: Blocks) -> tuple[Array, Array]:
    """The squared distances at one or two adjacent places in the order of all pairs i < j; below 0 there are zeros."""
    num, zero = xs[0].shape[0], jnp.zeros((), xs[0].dtype)
    pairs, place = num * (num - 1) // 2, max(places[0], 0)
    cheap = len(xs) == 1 and xs[0].shape[1] <= DIRECT_DIM and _on_cpu()
    if num * num <= min(_strip_elements(), HALF_ELEMENTS) and not (cheap and num > CIRCLE):
        r2 = _few_sqdist(add, xs) if add else _sqdist(xs, xs)
        # The barrier keeps one rounding of the distances for all passes.
        half = lax.optimization_barrier(r2.ravel()[selection.upper(num)])
        found = (selection.narrowed if _on_cpu() else selection.by_sort)(half, place)
    else:
        look = circle.look(xs[0]) if cheap else _look_in_strips(xs)
        found = selection.adjacent(look, pairs, place, _some_sqdist(xs, pairs))
    lower, upper = (zero if p < 0 else found[p - place] for p in places)
    return lower, upper


def _on_cpu() -> bool:
    return jax.default_backend() == "cpu"


def _sample_size(pairs: int) -> int:
    return min(selection.SAMPLE, max(64, pairs // 16))


def _some_sqdist(xs: Blocks, pairs: int) -> Array:
    rows, others = circle.sample(len(xs[0]), _sample_size(pairs))
    parts = [jnp.sum((x[rows] - x[others]) ** 2, 1) for x in xs]
    return sum(parts[1:], parts[0])


def _look_in_strips(xs: Blocks) -> selection.Look:
    """Passes over the pairs i < j with distances computed anew in each."""
    num = len(xs[0])

    def look(pivot: Array) -> tuple[Array, Array]:
        def strip(part: Any) -> tuple[Array, Array]:
            rows, own = part
            after = own[:, None] < jnp.arange(num)[None, :]
            r2 = jnp.where(after, _sqdist(rows, xs), jnp.inf)
            under = r2 <= pivot
            # By a matvec, over twice as fast as by a sum.
            counts = matmul(under.astype(jnp.float32), jnp.ones(num, jnp.float32))
            return counts, jnp.min(jnp.where(under, jnp.inf, r2), 1)

        counts, least = reduce_rows(strip, (xs, jnp.arange(num)), num)
        return jnp.sum(counts.astype(jnp.int32)), jnp.min(least)

    return look
