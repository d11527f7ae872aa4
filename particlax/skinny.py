"""Clouds of few particles in many dimensions, such as networks: two passes over memory for a whole interaction.

An interaction needs the Gram matrix of the centred cloud, M x M, and then sums over particles of whole rows, both bound by
memory. In plain XLA they are padded, copied and joined on the way; on a GPU two fused kernels (Pallas, Triton) read every
number once. Coordinates are cut into tiles that hold all particles, so a tile centres itself.

Accuracy. Products are made of numbers split into two halves of 11 and 13 bits, so that tensor cores lose nothing of float32:
the relative error is about 1e-6. Clouds in float64 take the plain path.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from particlax import gpu

__all__ = ["gram", "mix", "suits"]

MOST = 64
"""Largest number of particles that a tile holds."""
CHUNK = 2048
"""Coordinates at a time on a CPU."""
LEAST = 1 << 13
"""Fewest coordinates for which a fused kernel pays."""
BLOCK, PROGRAMS = 128, 528
"""Coordinates of a tile, and how many tiles are worked on at a time (four for each processor of an H100)."""


def suits(num: int) -> bool:
    """Whether so few particles are for this module."""
    return num <= MOST


def matmul(a: Array, b: Array) -> Array:
    """a @ b in full precision on every backend."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def gram(x: Float[Array, "M D"]) -> tuple[Float[Array, "M M"], Float[Array, ""]]:
    """(x - m) (x - m)^T with m the mean over particles, and |m|^2.

    >>> product, norm = gram(jnp.array([[0.0, 3.0], [2.0, 3.0]]))
    >>> product.tolist(), float(norm)
    ([[1.0, -1.0], [-1.0, 1.0]], 10.0)
    """
    return _choose(x, _fused_gram, _plain_gram, x)


def mix(
    left: Float[Array, "M M"],
    x: Float[Array, "M D"],
    right: Float[Array, "M M"] | None = None,
    v: Float[Array, "M D"] | None = None,
) -> Float[Array, "M D"]:
    """left @ (x - m) + right @ v, with m the mean over particles; the second part if it is given.

    >>> mix(jnp.eye(2), jnp.array([[0.0], [2.0]])).tolist()
    [[-1.0], [1.0]]
    """
    if right is None or v is None:
        return _choose(x, _fused_turn, _plain_turn, left, x)
    return _choose(x, _fused_mix, _plain_mix, left, x, right, v)


def _choose(x: Array, fused: Any, plain: Any, *args: Array) -> Any:
    """The fused kernel where the program is for a GPU and the cloud is large enough."""
    fits = x.dtype == jnp.float32 and x.shape[1] >= LEAST and suits(len(x))
    return gpu.choose(fits, fused, plain, *args)


# ---------------------------------------------------------------------------------------------------------- plain


def _plain_gram(x: Array) -> tuple[Array, Array]:
    def of(x: Array) -> tuple[Array, Array]:
        mean = jnp.mean(x, 0)
        centred = x - mean
        return matmul(centred, centred.T), jnp.sum(mean * mean)

    add = lambda i, sums: jax.tree.map(jnp.add, sums, of(_piece(i, x)))
    whole, rest = divmod(x.shape[1], _width(x))
    sums = lax.fori_loop(1, whole, add, of(_piece(0, x)))
    return jax.tree.map(jnp.add, sums, of(x[:, -rest:])) if rest else sums


def _plain_turn(left: Array, x: Array) -> Array:
    return _written(lambda x: matmul(left, x - jnp.mean(x, 0)), x)


def _plain_mix(left: Array, x: Array, right: Array, v: Array) -> Array:
    both = jnp.concatenate([left, right], 1)
    return _written(lambda x, v: matmul(both, jnp.concatenate([x - jnp.mean(x, 0), v])), x, v)


def _width(x: Array) -> int:
    """Coordinates at a time: on a CPU so many that a piece of the cloud stays in cache while it is centred and multiplied."""
    return min(CHUNK, x.shape[1]) if jax.default_backend() == "cpu" else x.shape[1]


def _piece(i: Any, x: Array) -> Array:
    return lax.dynamic_slice_in_dim(x, i * _width(x), _width(x), 1)


def _written(of: Callable[..., Array], *arrays: Array) -> Array:
    """of(*pieces of the arrays), side by side."""
    width = _width(arrays[0])
    whole, rest = divmod(arrays[0].shape[1], width)
    if whole == 1 and not rest:
        return of(*arrays)

    def write(i: Any, out: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(out, of(*[_piece(i, a) for a in arrays]), i * width, 1)  # fmt: skip

    out = lax.fori_loop(0, whole, write, jnp.zeros_like(arrays[0]))
    return out.at[:, -rest:].set(of(*[a[:, -rest:] for a in arrays])) if rest else out


# ---------------------------------------------------------------------------------------------------------- fused


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


def _mix_body(left_ref: Any, x_ref: Any, *refs: Any, num: int, rows: int) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *more, out_ref = refs
    start = pl.program_id(0) * BLOCK
    tile, inside = _tile(x_ref, start, num, rows)
    tile, _ = _centre(tile, inside, num)
    out = gpu.exact(gpu.halves(left_ref[...]), gpu.halves(tile))
    if more:
        right_ref, v_ref = more
        out += gpu.exact(gpu.halves(right_ref[...]), gpu.halves(_tile(v_ref, start, num, rows)[0]))
    triton.store(out_ref.at[_window(start, rows)], out, mask=inside)


def _padded(matrix: Array) -> Array:
    extra = _rows(len(matrix)) - len(matrix)
    return jnp.pad(matrix, ((0, extra), (0, extra)))


def _launch_mix(left: Array, x: Array, *more: Array) -> Array:
    kernel = functools.partial(_mix_body, num=len(x), rows=_rows(len(x)))
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    rest = (_padded(more[0]), more[1]) if more else ()
    grid = (math.ceil(x.shape[1] / BLOCK),)
    return gpu.launch(kernel, shape, grid, _padded(left), x, *rest)


_fused_gram = gpu.differentiable(_launch_gram, _plain_gram)
_fused_turn = gpu.differentiable(_launch_mix, _plain_turn)
_fused_mix = gpu.differentiable(_launch_mix, _plain_mix)
