"""Clouds of few particles in many dimensions, such as networks: two passes over memory for a whole interaction.

An interaction needs the M x M squared distances, and then sums over particles of whole rows, both bound by memory. In plain XLA
rows are padded, copied and joined on the way; on a GPU two fused kernels (Pallas, Triton) take all leaves at once and read every
number once. Coordinates are cut into tiles that hold all particles.

Up to 20 particles, a GPU's ordinary units keep up with its memory: every pair's differences are squared and added up, and rows
are mixed number by number, without padding. More particles go through tensor cores, in tiles that centre themselves, with
numbers split into two halves of 11 and 13 bits, so that nothing of float32 is lost: the relative error is about 1e-6. Clouds in
float64 take the plain path.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from particlax import gpu

__all__ = ["distances", "mix", "suits"]

MOST = 64
"""Largest number of particles that a tile holds."""
DIRECT = 20
"""Largest number of particles whose pairs all fit into registers."""
CHUNK = 8192
"""Coordinates at a time on a CPU."""
LEAST = 1 << 13
"""Fewest coordinates for which a fused kernel pays."""
BLOCK, PROGRAMS = 128, 528
"""Coordinates of a tile, and how many tiles are worked on at a time (four for each processor of an H100)."""
WARPS = 1056
"""Tiles of one warp each that are worked on at a time: eight for each processor of an H100."""
REGISTERS = 200
"""Numbers that a thread may hold."""

Blocks = Sequence[Float[Array, "M _"]]


def suits(num: int) -> bool:
    """Whether so few particles are for this module."""
    return num <= MOST


def matmul(a: Array, b: Array) -> Array:
    """a @ b in full precision on every backend."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def distances(xs: Blocks) -> tuple[Float[Array, "M M"], Float[Array, ""]]:
    """|x_i - x_j|^2 and the mean of |x_i|^2, for particles whose coordinates are spread over several matrices.

    >>> r2, square = distances([jnp.array([[0.0, 3.0], [2.0, 3.0]]), jnp.array([[1.0], [1.0]])])
    >>> r2.tolist(), float(square)
    ([[0.0, 4.0], [4.0, 0.0]], 12.0)
    """
    fused = _direct_distances if len(xs[0]) <= DIRECT else _tensor_distances
    return _choose(xs, fused, _plain_distances, list(xs))


def mix(
    left: Float[Array, "M M"],
    xs: Blocks,
    right: Float[Array, "M M"] | None = None,
    vs: Blocks | None = None,
) -> list[Float[Array, "M _"]]:
    """left @ (x - m) + right @ v for every matrix, with m the mean over particles; the second part if it is given.

    >>> mix(jnp.eye(2), [jnp.array([[0.0], [2.0]])])[0].tolist()
    [[-1.0], [1.0]]
    """
    direct = len(xs[0]) <= DIRECT
    left = left.astype(xs[0].dtype)
    if right is None or vs is None:
        fused = _direct_turn if direct else _tensor_turn
        return _choose(xs, fused, _plain_turn, left, list(xs))
    fused = _direct_mix if direct else _tensor_mix
    return _choose(xs, fused, _plain_mix, left, list(xs), right.astype(left.dtype), list(vs))


def _choose(xs: Blocks, fused: Any, plain: Any, *args: Any) -> Any:
    """The fused kernel where the program is for a GPU and the cloud is large enough."""
    size = sum(x.shape[1] for x in xs)
    fits = all(x.dtype == jnp.float32 for x in xs) and size >= LEAST and suits(len(xs[0]))
    return gpu.choose(fits, fused, plain, *args)


def _from_gram(products: Array, norm: Array) -> tuple[Array, Array]:
    """Squared distances from (x - m) (x - m)^T; and the mean square, with |m|^2."""
    own = jnp.diagonal(products)
    r2 = jnp.maximum(own[:, None] + own[None, :] - 2 * products, 0)
    return r2, jnp.mean(own) + norm


# ---------------------------------------------------------------------------------------------------------- plain


def _plain_distances(xs: Blocks) -> tuple[Array, Array]:
    parts = [_plain_gram(x) for x in xs]
    products = sum(parts[1:], parts[0])
    return _from_gram(products[:-1, :-1], products[-1, -1])


def _plain_gram(x: Array) -> Array:
    """Products of the rows of x - m and, last, of m: one matrix, so that whoever needs a part of it makes the same loop."""

    def of(x: Array) -> Array:
        mean = jnp.mean(x, 0, keepdims=True)
        rows = jnp.concatenate([x - mean, mean])
        return matmul(rows, rows.T)

    add = lambda i, sums: sums + of(_piece(i, x))
    whole, rest = divmod(x.shape[1], _width(x))
    sums = lax.fori_loop(1, whole, add, of(_piece(0, x)))
    return sums + of(x[:, -rest:]) if rest else sums


def _plain_turn(left: Array, xs: Blocks) -> list[Array]:
    return [_written(lambda x: matmul(left, x - jnp.mean(x, 0)), x) for x in xs]


def _plain_mix(left: Array, xs: Blocks, right: Array, vs: Blocks) -> list[Array]:
    both = jnp.concatenate([left, right], 1)
    of = lambda x, v: matmul(both, jnp.concatenate([x - jnp.mean(x, 0), v]))
    return [_written(of, x, v) for x, v in zip(xs, vs, strict=True)]


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


# --------------------------------------------------------------------------------------------------------- direct


def _lanes(held: int, most: int) -> int:
    """Coordinates of a tile of one warp whose threads hold so many numbers for each."""
    each = max(1, min(most, REGISTERS // held))
    return 32 << (each.bit_length() - 1)


class _Leaf(NamedTuple):
    """Where the tile at hand would be in one of the arrays, and whether it is there."""

    start: Any
    here: Any
    inside: Any


def _leaves(refs: Any, tile: Any, lanes: int) -> list[_Leaf]:
    """Tiles are counted through all arrays."""
    found, before = [], 0
    for ref in refs:
        start = (tile - before) * lanes
        tiles = math.ceil(ref.shape[1] / lanes)
        here = (tile >= before) & (tile < before + tiles)
        found.append(_Leaf(start, here, start + lax.iota(jnp.int32, lanes) < ref.shape[1]))
        before += tiles
    return found


def _particles(refs: Any, leaves: list[_Leaf], num: int, lanes: int) -> list[Array]:
    """One vector of coordinates for each particle, from the array where the tile is; zeros beyond its end."""
    from jax.experimental.pallas import triton

    def load(ref: Any, leaf: _Leaf) -> list[Array]:
        rows = [ref.at[_row(i, leaf.start, lanes)] for i in range(num)]
        return [triton.load(row, mask=leaf.inside, other=0.0) for row in rows]

    found = [jnp.zeros(lanes, jnp.float32)] * num
    for ref, leaf in zip(refs, leaves, strict=True):
        take = functools.partial(load, ref, leaf)
        found = lax.cond(leaf.here, take, lambda found=found: found)
    return found


def _row(i: Any, start: Any, lanes: int) -> Any:
    """A window on a row, which the interpreter wants as a number that is not a constant."""
    from jax.experimental import pallas as pl

    return i + 0 * start, pl.ds(start, lanes)


def _distance_body(*refs: Any, num: int, lanes: int, programs: int) -> None:
    from jax.experimental import pallas as pl

    *x_refs, out_ref = refs
    own = pl.program_id(0)
    pairs = list(itertools.combinations(range(num), 2))

    def add(i: Any, sums: Any) -> Any:
        x = _particles(x_refs, _leaves(x_refs, i * programs + own, lanes), num, lanes)
        *found, square = sums
        found = [gpu.add_square(x[i], x[j], s) for (i, j), s in zip(pairs, found, strict=True)]
        for one in x:
            square = gpu.fma(one, one, square)
        return [*found, square]

    sums: Any = [jnp.zeros(lanes, jnp.float32)] * (len(pairs) + 1)
    sums = lax.fori_loop(0, math.ceil(_tiles(x_refs, lanes) / programs), add, sums)
    for place, one in enumerate(sums):
        out_ref[place, own] = jnp.sum(one)


def _tiles(arrays: Any, lanes: int) -> int:
    return sum(math.ceil(array.shape[1] / lanes) for array in arrays)


def _launch_distances(xs: Blocks) -> tuple[Array, Array]:
    num = len(xs[0])
    pairs = num * (num - 1) // 2
    lanes = _lanes(pairs + num, 8)
    programs = min(WARPS, _tiles(xs, lanes))
    kernel = functools.partial(_distance_body, num=num, lanes=lanes, programs=programs)
    shape = jax.ShapeDtypeStruct((pairs + 1, programs), jnp.float32)
    sums = jnp.sum(gpu.launch(kernel, shape, (programs,), *xs, warps=1), 1)
    place = np.full((num, num), pairs)
    place[np.triu_indices(num, 1)] = np.arange(pairs)
    place = np.minimum(place, place.T)
    return jnp.where(place < pairs, sums[place], 0.0), sums[-1] / num


def _direct_body(weights_ref: Any, *refs: Any, num: int, lanes: int, both: bool) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    count = len(refs) // (3 if both else 2)
    x_refs, out_refs = refs[:count], refs[-count:]
    leaves = _leaves(x_refs, pl.program_id(0), lanes)
    x = _particles(x_refs, leaves, num, lanes)
    mean = sum(x[1:], x[0]) / num
    terms = [one - mean for one in x]
    if both:
        terms += _particles(refs[count : 2 * count], leaves, num, lanes)

    def write(i: Any, nothing: Any) -> Any:
        out = jnp.zeros(lanes, jnp.float32)
        for j, term in enumerate(terms):
            out = gpu.fma(term, weights_ref[i, j], out)
        for ref, leaf in zip(out_refs, leaves, strict=True):

            @pl.when(leaf.here)
            def _(ref: Any = ref, leaf: _Leaf = leaf) -> None:
                triton.store(ref.at[_row(i, leaf.start, lanes)], out, mask=leaf.inside)

        return nothing

    lax.fori_loop(0, num, write, jnp.int32(0))


def _launch_direct(left: Array, xs: Blocks, right: Array | None = None, vs: Blocks = ()) -> Any:
    num, both = len(left), right is not None
    lanes = _lanes(2 * num if both else num, 4)
    weights = left if right is None else jnp.concatenate([left, right], 1)
    kernel = functools.partial(_direct_body, num=num, lanes=lanes, both=both)
    shapes = [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in xs]
    return list(gpu.launch(kernel, shapes, (_tiles(xs, lanes),), weights, *xs, *vs, warps=1))


_direct_distances = gpu.differentiable(gpu.once(_launch_distances), _plain_distances)
_direct_turn = gpu.differentiable(gpu.once(_launch_direct), _plain_turn)
_direct_mix = gpu.differentiable(gpu.once(_launch_direct), _plain_mix)


# --------------------------------------------------------------------------------------------------- tensor cores


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


def _launch_grams(xs: Blocks) -> tuple[Array, Array]:
    products, norms = zip(*[_launch_gram(x) for x in xs], strict=True)
    return _from_gram(jnp.sum(jnp.stack(products), 0), jnp.sum(jnp.stack(norms)))


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


def _launch_mix(left: Array, xs: Blocks, right: Array | None = None, vs: Blocks = ()) -> Any:
    num = len(left)
    kernel = functools.partial(_mix_body, num=num, rows=_rows(num))
    out = []
    for x, *v in zip(xs, vs, strict=True) if vs else zip(xs, strict=True):
        more = () if right is None else (_padded(right), *v)
        shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
        grid = (math.ceil(x.shape[1] / BLOCK),)
        out.append(gpu.launch(kernel, shape, grid, _padded(left), x, *more))
    return out


_tensor_distances = gpu.differentiable(gpu.once(_launch_grams), _plain_distances)
_tensor_turn = gpu.differentiable(gpu.once(_launch_mix), _plain_turn)
_tensor_mix = gpu.differentiable(gpu.once(_launch_mix), _plain_mix)
