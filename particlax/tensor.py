"""Fused GPU kernels for up to 64 particles in many dimensions, on tensor cores (Pallas, Triton).

Coordinates are cut into tiles that hold all particles and centre themselves. Numbers are split into two halves of 11 and 13 bits, so
that nothing of float32 is lost: the relative error is about 1e-6.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from particlax import gpu

__all__ = ["distances", "from_gram", "mix"]

MOST = 64
"""Largest number of particles that a tile holds."""
BLOCK, PROGRAMS = 128, 528
"""Coordinates of a tile, and how many tiles are worked on at a time (four for each processor of an H100)."""

Blocks = Sequence[Float[Array, "M _"]]


def from_gram(products: Array, norm: Array) -> tuple[Array, Array]:
    """Squared distances from (x - m) (x - m)^T; and the mean square, with |m|^2."""
    own = jnp.diagonal(products)
    r2 = jnp.maximum(own[:, None] + own[None, :] - 2 * products, 0)
    return r2, jnp.mean(own) + norm


def _tile(ref: Any, start: Any, num: int, rows: int) -> tuple[Array, Array]:
    """All particles in BLOCK coordinates, zeros beyond the array; and where the array is."""
    from jax.experimental.pallas import triton

    columns = start + lax.broadcasted_iota(jnp.int32, (rows, BLOCK), 1)
    inside = (lax.broadcasted_iota(jnp.int32, (rows, BLOCK), 0) < num) & (columns < ref.shape[1])
    part = triton.load(ref.at[_window(start, rows)], mask=inside, other=0.0)
    return part, inside


def _window(start: Any, rows: int) -> Any:
    """A slice that may reach beyond the array, where a mask holds: so it must not begin at a constant."""
    from jax.experimental import pallas as pl

    return pl.ds(0 * start, rows), pl.ds(start, BLOCK)


def _centre(tile: Array, inside: Array, num: int) -> tuple[Array, Array]:
    mean = jnp.sum(tile, 0, keepdims=True) / num
    return jnp.where(inside, tile - mean, 0.0), mean


def _rows(num: int) -> int:
    return max(16, 1 << (num - 1).bit_length())


def _gram_body(
    x_ref: Any, square_ref: Any, norm_ref: Any, *, num: int, rows: int, programs: int
) -> None:
    from jax.experimental import pallas as pl

    own = pl.program_id(0)
    tiles = math.ceil(x_ref.shape[1] / BLOCK)

    def add(i: Any, sums: Any) -> Any:
        begin = (i * programs + own) * BLOCK
        tile, inside = _tile(x_ref, begin, num, rows)
        tile, mean = _centre(tile, inside, num)
        high, low = gpu.halves(tile)
        major, minor, norm = sums
        # A tensor core cuts off what it adds, which tells in long sums: times 1, an ordinary addition is left outside.
        one = jnp.minimum(begin + 1, 1).astype(jnp.float32)
        major, minor = major + one * gpu.dot(high, high.T), minor + one * gpu.dot(high, low.T)
        return major, minor, norm + jnp.sum(mean * mean)

    zero = jnp.zeros((rows, rows), jnp.float32)
    start = (zero, zero, jnp.float32(0))
    major, minor, norm = lax.fori_loop(0, math.ceil(tiles / programs), add, start)
    square_ref[own, 0] = major
    square_ref[own, 1] = minor
    norm_ref[own] = norm


def _launch_gram(x: Array) -> tuple[Array, Array]:
    num, dim = x.shape
    rows, programs = _rows(num), min(PROGRAMS, math.ceil(dim / BLOCK))
    kernel = functools.partial(_gram_body, num=num, rows=rows, programs=programs)
    shapes = (
        jax.ShapeDtypeStruct((programs, 2, rows, rows), jnp.float32),
        jax.ShapeDtypeStruct((programs,), jnp.float32),
    )
    squares, norms = gpu.launch(kernel, shapes, (programs,), x)
    major, minor = jnp.sum(squares, 0)[:, :num, :num]
    return major + minor + minor.T, jnp.sum(norms)


def distances(xs: Blocks) -> tuple[Array, Array]:
    """Squared distances, and the mean of the squared norms."""
    products, norms = zip(*[_launch_gram(x) for x in xs], strict=True)
    return from_gram(jnp.sum(jnp.stack(products), 0), jnp.sum(jnp.stack(norms)))


def _mix_body(left_ref: Any, x_ref: Any, *refs: Any, num: int, rows: int) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *more, out_ref = refs
    start = pl.program_id(0) * BLOCK
    x, inside = _tile(x_ref, start, num, rows)
    tile, _ = _centre(x, inside, num)
    out = gpu.exact(gpu.halves(left_ref[...]), gpu.halves(tile))
    if more:
        right_ref, pull_ref, v_ref = more
        value = _tile(v_ref, start, num, rows)[0] - pull_ref[0] * x
        out += gpu.exact(gpu.halves(right_ref[...]), gpu.halves(value))
    triton.store(out_ref.at[_window(start, rows)], out, mask=inside)


def _padded(matrix: Array) -> Array:
    extra = _rows(len(matrix)) - len(matrix)
    return jnp.pad(matrix.astype(jnp.float32), ((0, extra), (0, extra)))


def mix(
    left: Array,
    xs: Blocks,
    right: Array | None = None,
    vs: Blocks = (),
    pull: Array | None = None,
) -> list[Array]:
    """left @ (x - m) + right @ (v - pull * x)."""
    num = len(left)
    kernel = functools.partial(_mix_body, num=num, rows=_rows(num))
    pulls = jnp.full(1, 0.0 if pull is None else pull, jnp.float32)
    out = []
    for x, *v in zip(xs, vs, strict=True) if vs else zip(xs, strict=True):
        more = () if right is None else (_padded(right), pulls, *v)
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        grid = (math.ceil(x.shape[1] / BLOCK),)
        out.append(gpu.launch(kernel, shape, grid, _padded(left), x, *more))
    return out
