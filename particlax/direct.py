"""Fused GPU kernels for up to 20 particles in many dimensions, by ordinary arithmetic (Pallas, Triton).

A GPU's ordinary units keep up with its memory there: every pair's differences are squared and added up, and rows are mixed number
by number, without padding. All leaves of a cloud go through one launch, in tiles of one warp that are counted through all of them.
A warp asks for what comes next before it works on what it has.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from particlax import gpu
from particlax.tensor import Blocks
from particlax.updates import Todo

__all__ = ["distances", "from_pairs", "mix", "move"]

MOST = 20
"""Largest number of particles whose pairs all fit into registers."""
WARPS = 1056
"""Tiles that are worked on at a time: eight for each processor of an H100."""
REGISTERS = 200
"""Numbers that a thread may hold."""
AHEAD = 2
"""How many particles ahead mixing asks for what else a step needs of them."""


def _lanes(held: int, most: int) -> int:
    """Coordinates of a tile whose threads hold so many numbers for each."""
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


def _tiles(arrays: Any, lanes: int) -> int:
    return sum(math.ceil(array.shape[1] / lanes) for array in arrays)


def _row(i: Any, start: Any, lanes: int) -> Any:
    """A window on a row, which the interpreter wants as a number that is not a constant."""
    from jax.experimental import pallas as pl

    return i + 0 * start, pl.ds(start, lanes)


def _load(ref: Any, i: Any, leaf: _Leaf, lanes: int) -> Array:
    """Coordinates of particle i; zeros beyond the end of the array."""
    from jax.experimental.pallas import triton

    return triton.load(ref.at[_row(i, leaf.start, lanes)], mask=leaf.inside, other=0.0)


# ------------------------------------------------------------------------------------------------------ distances


def _distance_body(*refs: Any, num: int, lanes: int, programs: int) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    *x_refs, out_ref = refs
    own = pl.program_id(0)
    pairs = list(itertools.combinations(range(num), 2))

    def load(turn: Any) -> list[Array]:
        found = [jnp.zeros(lanes, jnp.float32)] * num
        for ref, leaf in zip(x_refs, _leaves(x_refs, turn * programs + own, lanes), strict=True):
            take = lambda ref=ref, leaf=leaf: [_load(ref, i, leaf, lanes) for i in range(num)]
            found = lax.cond(leaf.here, take, lambda found=found: found)
        return found

    def add(turn: Any, carry: Any) -> Any:
        x, (square, *sums) = carry
        later = load(turn + 1)
        sums = [gpu.add_square(x[i], x[j], s) for (i, j), s in zip(pairs, sums, strict=True)]
        for one in x:
            square = gpu.fma(one, one, square)
        return later, [square, *sums]

    zeros = [jnp.zeros(lanes, jnp.float32)] * (1 + len(pairs))
    turns = math.ceil(_tiles(x_refs, lanes) / programs)
    _, sums = lax.fori_loop(0, turns, add, (load(jnp.int32(0)), zeros))
    if lanes != 32:
        for place, one in enumerate(sums):
            out_ref[place, own] = jnp.sum(one)
        return
    for start in range(0, len(sums), 32):
        some = sums[start : start + 32]
        lane = lax.iota(jnp.int32, 32)
        inside = start + lane < len(sums)
        triton.store(out_ref.at[start + lane, own], _totals(some), mask=inside)


def _totals(sums: list[Array]) -> Array:
    """The totals of up to 32 arrays with a number per thread of a warp, the k-th in thread k.

    Each halving adds what a thread and its partner hold of two arrays at a time: 31 exchanges, where one total after the other would
    take 160.
    """
    lane = lax.iota(jnp.int32, 32)
    sums = sums + [jnp.zeros_like(sums[0])] * (32 - len(sums))
    for bit in (16, 8, 4, 2, 1):
        upper = (lane & bit) != 0
        pairs = zip(sums[:bit], sums[bit:], strict=True)
        sums = [jnp.where(upper, b, a) + gpu.partner(jnp.where(upper, a, b), bit) for a, b in pairs]
    return sums[0]


def distances(xs: Blocks) -> tuple[Array, Array]:
    """Squared distances, and the mean of the squared norms."""
    num = len(xs[0])
    pairs = num * (num - 1) // 2
    lanes = _lanes(pairs + 2 * num, 8)
    programs = min(WARPS, _tiles(xs, lanes))
    kernel = functools.partial(_distance_body, num=num, lanes=lanes, programs=programs)
    shape = jax.ShapeDtypeStruct((1 + pairs, programs), jnp.float32)
    sums = jnp.sum(gpu.launch(kernel, shape, (programs,), *xs, warps=1), 1)
    return from_pairs(sums[1:], num), sums[0] / num


def from_pairs(sums: Array, num: int) -> Array:
    """The matrix of what belongs to the pairs (0, 1), (0, 2), ..., with zeros on its diagonal."""
    place = np.zeros((num, num), int)
    place[np.triu_indices(num, 1)] = np.arange(len(sums))
    place += place.T
    return jnp.where(np.eye(num, dtype=bool), 0, sums[place])


# ------------------------------------------------------------------------------------------------------------ mix


class _Refs(NamedTuple):
    """The matrices of one leaf, what its results are written to, and its scalars' places."""

    arrays: Any
    outs: Any
    scalars: Any


def _refs(todo: Sequence[Todo], sizes: Sequence[tuple[int, int]], refs: Any) -> list[_Refs]:
    """References by leaf; those to all scalars are first, then come all matrices, then all results."""
    scalars, *refs = refs
    found, place, made, count = [], 0, sum(arrays for arrays, _ in sizes), 0
    for one, (arrays, numbers) in zip(todo, sizes, strict=True):
        results = len(one.over) if one.rule else 1
        own = [(scalars, count + k) for k in range(numbers)]
        found.append(_Refs(refs[place : place + arrays], refs[made : made + results], own))
        place, made, count = place + arrays, made + results, count + numbers
    return found


def _mix_body(
    weights_ref: Any, *refs: Any, todo: Any, sizes: Any, num: int, lanes: int, both: bool
) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    blocks = _refs(todo, sizes, refs)
    leaves = _leaves([block.arrays[0] for block in blocks], pl.program_id(0), lanes)
    for one, block, leaf in zip(todo, blocks, leaves, strict=True):

        @pl.when(leaf.here)
        def _(one: Todo = one, block: _Refs = block, leaf: _Leaf = leaf):
            read = lambda ref: [_load(ref, i, leaf, lanes) for i in range(num)]
            x, v = read(block.arrays[0]), read(block.arrays[1]) if both else []
            scalars = [ref[place] for ref, place in block.scalars]
            ask = lambda i: [_load(block.arrays[k], i, leaf, lanes) for k in one.reads]

            def store(i: Any, drift: Array, fields: list[Array]) -> None:
                made = one.rule(drift, fields, scalars) if one.rule else [drift]
                for ref, row in zip(block.outs, made, strict=True):
                    triton.store(ref.at[_row(i, leaf.start, lanes)], row, mask=leaf.inside)

            _mix_tile(weights_ref, x, v, ask, store)


def _mix_tile(weights_ref: Any, x: list[Array], v: list[Array], ask: Any, store: Any) -> None:
    """One tile, all of whose numbers are read by now: results are written particle by particle."""
    num = len(x)
    zero, pull = jnp.zeros_like(x[0]), weights_ref[num, 0]
    mean = sum(x, zero) / num
    away = [one - mean for one in x]
    v = [gpu.fma(one, -pull, value) for one, value in zip(x, v, strict=False)]
    weights = lambda i, start: [weights_ref[i, start + j] for j in range(num)]
    row = lambda i: jnp.minimum(i, num - 1)

    def write(i: Any, carry: Any) -> Any:
        left, (fields, *later) = carry
        right = weights(i, num) if v else []
        later = [*later, ask(row(i + AHEAD))]  # asked for before they are needed
        one, other = zero, zero
        for weight, number in zip(left, away, strict=True):
            one = gpu.fma(number, weight, one)
        left = weights(row(i + 1), 0)
        for weight, number in zip(right, v, strict=True):
            other = gpu.fma(number, weight, other)
        store(i, one + other, fields)
        return left, later

    first = [ask(row(jnp.int32(i))) for i in range(AHEAD)]
    lax.fori_loop(jnp.int32(0), jnp.int32(num), write, (weights(jnp.int32(0), 0), first))


def mix(
    left: Array,
    xs: Blocks,
    right: Array | None = None,
    vs: Blocks = (),
    pull: Array | None = None,
) -> list[Array]:
    """left @ (x - m) + right @ (v - pull * x)."""
    blocks = [[x] for x in xs] if right is None else [list(some) for some in zip(xs, vs, strict=True)]  # fmt: skip
    given = [(arrays, []) for arrays in blocks]
    return [one for (one,) in move([Todo([])] * len(xs), left, given, right, pull)]


def move(
    todo: Sequence[Todo], left: Array, given: Any, right: Array | None, pull: Array | None
) -> list[list[Array]]:
    """For every leaf the results of its rule, of its arrays and scalars in `given`, or else the mixture."""
    num, both = len(left), right is not None
    single = [one.astype(jnp.float32) for one in (left, right) if one is not None]
    rows = jnp.concatenate(single, 1)
    pulls = jnp.full((1, rows.shape[1]), 0.0 if pull is None else pull, jnp.float32)
    weights = jnp.concatenate([rows, pulls])
    xs = [arrays[0] for arrays, _ in given]
    lanes = _lanes(2 * num, 4)
    sizes = tuple((len(arrays), len(scalars)) for arrays, scalars in given)
    body = functools.partial(_mix_body, todo=todo, sizes=sizes, num=num, lanes=lanes, both=both)
    shapes, aliases, place = [], {}, 2
    for one, (arrays, _) in zip(todo, given, strict=True):
        for over in one.over if one.rule else [None]:
            if over is not None and place + over not in aliases:
                aliases[place + over] = len(shapes)
            shapes.append(jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32))
        place += len(arrays)
    scalars = jnp.stack([*[s for _, own in given for s in own], jnp.float32(0)])
    args = [weights, scalars, *[a for arrays, _ in given for a in arrays]]
    made = iter(gpu.launch(body, shapes, (_tiles(xs, lanes),), *args, warps=1, aliases=aliases))
    return [[next(made) for _ in (one.over if one.rule else [None])] for one in todo]
