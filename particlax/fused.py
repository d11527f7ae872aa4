"""Sums over all pairs of a large cloud on a GPU: one kernel that keeps every tile of the M x N matrix in registers.

A program owns some rows and runs over columns. Up to `DIRECT_DIM` coordinates distances come from differences, and every place of
a tile has a sum of its own: threads add up only at the end. Above, distances and sums are products of
matrices on tensor cores, of numbers in two halves so that nothing of float32 is lost (`gpu.halves`).

The caller's function of the distances is traced into the kernel (`formula`). Columns are padded with copies of the last point
that have no mass. Sums are cut at `RUN` columns, so that rounding does not grow with M.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from particlax import gpu
from particlax.formula import Formula, Instructions, Scaled, evaluate

__all__ = ["Pairs", "interact", "logsumexp", "squares", "suits", "total"]

LEAST = 1 << 20
"""Fewest pairs for which a kernel pays."""
DIRECT_DIM, MOST_DIM = 8, 64
"""Largest D with distances from differences, and largest D for these kernels."""
PROGRAMS, PAIRS = (1056, 4096), 1 << 16
"""Fewest and most programs to aim at (an H100 holds 500 at once; each has sums of its own), and pairs for one of them."""
RUN = 2048
"""Columns that are summed on their own before they are added to the rest."""
LOWEST = -3e38
"""Below every logarithm; minus infinity would make NaN of a difference."""


class Tile(NamedTuple):
    """Rows and columns that a program works on at a time, and its warps."""

    rows: int
    cols: int
    warps: int


TILES = {
    4: Tile(512, 4, 4),
    DIRECT_DIM: Tile(256, 4, 4),
    16: Tile(128, 64, 4),
    MOST_DIM: Tile(128, 64, 8),
}
"""Tiles by the largest D that they are for."""


class Sum(NamedTuple):
    """What to sum: T_ij u_j over j, with T the tile of one of the formula's results, and T_ij itself (its mass)."""

    result: int
    columns: Any = None
    mass: bool = True


class Pairs(NamedTuple):
    """What a sum is over: clouds x [M, D] and y [N, D], values [N, D] or None, and vectors for the rows and columns.

    Clouds are matrices here; `pairwise` has lists of them.
    """

    x: Any
    y: Any
    values: Any
    rows: Sequence[Array]
    cols: Sequence[Array]


def suits(pairs: Pairs) -> bool:
    """Whether these clouds, as lists of matrices, are for this module."""
    x, y = pairs.x[0], pairs.y[0]
    sized = 0 < x.shape[1] <= MOST_DIM and len(x) * len(y) >= LEAST
    return (
        len(pairs.x) == 1 and sized and all(a.dtype == jnp.float32 for a in jax.tree.leaves(pairs))
    )


def interact(formula: Formula, pairs: Pairs) -> Float[Array, "M D"]:
    """sum_j A_ij v_j + sum_j B_ij (x_i - y_j), with (A, B) the formula's results; B alone without values."""
    x, y, v = pairs.x, pairs.y, pairs.values
    outline = _outline(formula, pairs)
    a, b = outline[0], outline[-1]
    if v is None:
        ((product, mass),) = _launch(formula, pairs, [Sum(0, y)])
        return b.factor * (mass[:, None] * x - product)
    if a.tile is b.tile:
        ((product, mass),) = _launch(formula, pairs, [Sum(0, a.factor * v - b.factor * y)])
        return product + b.factor * mass[:, None] * x
    (values, _), (product, mass) = _launch(formula, pairs, [Sum(0, v, mass=False), Sum(1, y)])
    return a.factor * values + b.factor * (mass[:, None] * x - product)


def total(formula: Formula, pairs: Pairs) -> Float[Array, " M"]:
    """sum_j of the formula for every i."""
    ((_, mass),) = _launch(formula, pairs, [Sum(0)])
    return _outline(formula, pairs)[0].factor * mass


def logsumexp(formula: Formula, pairs: Pairs) -> Float[Array, " M"]:
    """log sum_j exp of the formula for every i."""
    high, mass = _launch(formula, pairs, [])
    top = jnp.max(high, 0)
    return top + jnp.log(jnp.sum(mass * jnp.exp(high - top), 0))


def _outline(formula: Formula, pairs: Pairs) -> list[Scaled]:
    """The formula at some pair: which results share a tile, and their factors. XLA drops the rest."""
    count = 1 + len(pairs.rows) + len(pairs.cols)
    return evaluate(formula, [jnp.ones((1, 1)) for _ in range(count)])


# -------------------------------------------------------------------------------------------------------- launching


class Plan(NamedTuple):
    """A grid over M x N: a program takes a tile of rows and `blocks` times `run` tiles of columns."""

    tile: Tile
    rows: int
    splits: int
    blocks: int
    run: int

    @property
    def cols(self) -> int:
        """Columns with padding."""
        return self.splits * self.blocks * self.run * self.tile.cols

    @property
    def grid(self) -> tuple[int, int]:
        """Tiles of rows, and into how many parts the columns are cut for them."""
        return self.rows // self.tile.rows, self.splits


def _plan(tile: Tile, num: int, columns: int, run: int) -> Plan:
    high, steps = math.ceil(num / tile.rows), math.ceil(columns / tile.cols)
    programs = min(max(num * columns // PAIRS, PROGRAMS[0]), PROGRAMS[1])
    splits = min(steps, max(1, programs // high))
    steps = math.ceil(steps / splits)
    blocks = math.ceil(steps * tile.cols / run)
    return Plan(tile, high * tile.rows, splits, blocks, math.ceil(steps / blocks))


def _launch(formula: Formula, pairs: Pairs, wanted: list[Sum]) -> Any:
    """(product, mass) for every sum that is wanted; if none is, maxima and masses of the exponentials by split."""
    direct = pairs.x.shape[1] <= DIRECT_DIM
    num = len(pairs.y)
    tile = next(tile for dim, tile in TILES.items() if pairs.x.shape[1] <= dim)
    plan = _plan(tile, len(pairs.x), num, RUN if wanted else num + RUN)
    # The last column: mass for sums, what is added to a logarithm else.
    inside, outside = (1.0, 0.0) if wanted else (0.0, -jnp.inf)
    mass = jnp.where(jnp.arange(plan.cols) < num, inside, outside)
    rows = [_longer(a, plan.rows) for a in pairs.rows]
    cols = [*[_longer(a, plan.cols) for a in pairs.cols], mass]
    return (_direct if direct else _matrix)(
        formula, pairs._replace(rows=rows, cols=cols), wanted, plan
    )


def _vector(consts: Sequence[Array]) -> Array:
    """What a formula closes over, with a zero that keeps it from being empty."""
    return jnp.stack([*consts, jnp.float32(0)])


def _longer(a: Array, size: int, mode: str = "edge") -> Array:
    return jnp.pad(a, [(0, size - len(a))] + [(0, 0)] * (a.ndim - 1), mode=mode)


def _loop(
    plan: Plan, step: Callable[[Any, Any], Any], zero: tuple[Array, ...], settle: Any = lambda a: a
) -> Any:
    """step(first column, sums) over a program's columns, block by block; a block's sums are settled, then added."""
    from jax.experimental import pallas as pl

    split = pl.program_id(1)

    def block(k: Any) -> Any:
        begin = (split * plan.blocks + k) * plan.run
        turn = lambda t, sums: step((begin + t) * plan.tile.cols, sums)
        return tuple(settle(a) for a in lax.fori_loop(0, plan.run, turn, zero))

    if plan.blocks == 1:
        return block(0)
    start = tuple(jnp.zeros_like(settle(a)) for a in zero)
    return lax.fori_loop(0, plan.blocks, lambda k, sums: _add(sums, block(k)), start)


def _results(jaxpr: Any, const_ref: Any, args: list[Array]) -> list[Scaled]:
    """The formula's results inside a kernel."""
    consts = [const_ref[k] for k in range(len(jaxpr.constvars))]
    return evaluate(Formula(jaxpr, consts), args, Instructions(gpu.exp2, gpu.fma))


def _tiles(results: list[Scaled], shape: tuple[int, ...]) -> list[Array]:
    """Their tiles, without factors."""
    return [jnp.broadcast_to(jnp.float32(1) if r.tile is None else r.tile, shape) for r in results]


def _lift(result: Scaled, gap: Array, sums: tuple[Array, Array], axis: int) -> tuple[Array, Array]:
    """One step of a logarithm of a sum of exponentials: the largest so far, and the sum relative to it."""
    rate = math.log2(math.e)
    tile = result.array() + gap
    high = jnp.maximum(sums[0], jnp.max(tile, axis))
    terms = gpu.exp2((tile - jnp.expand_dims(high, axis)) * rate)
    return high, sums[1] * gpu.exp2((sums[0] - high) * rate) + jnp.sum(terms, axis)


def _add(sums: Sequence[Array], more: Sequence[Array]) -> tuple[Array, ...]:
    return tuple(a + b for a, b in zip(sums, more, strict=True))


def _nothing(plan: Plan) -> tuple[Array, Array]:
    """The logarithm of no exponentials."""
    return jnp.full(plan.tile.rows, LOWEST), jnp.zeros(plan.tile.rows)


# --------------------------------------------------------------------------------------------------- few coordinates


def squares(x: Sequence[Array], y: Sequence[Array]) -> Array:
    """Squared distances from lists of coordinates."""
    gaps = [a - b for a, b in zip(x, y, strict=True)]
    r2 = gaps[0] * gaps[0]
    for gap in gaps[1:]:
        r2 = gpu.fma(gap, gap, r2)
    return r2


def _direct_body(
    const_ref: Any,
    row_ref: Any,
    col_ref: Any,
    out_ref: Any,
    *,
    jaxpr: Any,
    plan: Plan,
    dim: int,
    terms: Any,
) -> None:
    """Tiles with columns down and rows across; `terms` says which result is summed with which column."""
    from jax.experimental import pallas as pl

    own = pl.ds(pl.program_id(0) * plan.tile.rows, plan.tile.rows)
    rows = [row_ref[k, own][None, :] for k in range(row_ref.shape[0])]
    vectors = slice(dim, dim + len(jaxpr.invars) - 1 - len(rows[dim:]))

    def step(begin: Any, sums: Any) -> Any:
        part = pl.ds(begin, plan.tile.cols)
        cols = [col_ref[k, part][:, None] for k in range(col_ref.shape[0])]
        r2 = squares(rows[:dim], cols[:dim])
        results = _results(jaxpr, const_ref, [r2, *rows[dim:], *cols[vectors]])
        if not terms:
            return _lift(results[0], cols[-1], sums, 0)
        tiles = _tiles(results, r2.shape)
        return tuple(gpu.fma(tiles[k], cols[c], a) for a, (k, c) in zip(sums, terms, strict=True))

    zero = (jnp.zeros((plan.tile.cols, plan.tile.rows)),) * len(terms) or _nothing(plan)
    settle = (lambda a: jnp.sum(a, 0)) if terms else (lambda a: a)
    for k, found in enumerate(_loop(plan, step, zero, settle)):
        out_ref[pl.program_id(1), k, own] = found


def _direct(formula: Formula, pairs: Pairs, wanted: list[Sum], plan: Plan) -> Any:
    num, dim = pairs.x.shape
    columns = [*_longer(pairs.y, plan.cols).T, *pairs.cols[:-1]]
    terms: list[tuple[int, int]] = []
    multiplied = [one for one in wanted if one.columns is not None]
    for one in multiplied:
        terms += [(one.result, len(columns) + d) for d in range(dim)]
        columns += [*_longer(one.columns, plan.cols, "constant").T]
    terms += [(one.result, len(columns)) for one in wanted if one.mass]
    columns.append(pairs.cols[-1])
    kernel = functools.partial(_direct_body, jaxpr=formula.jaxpr, plan=plan, dim=dim, terms=terms)
    rows = jnp.stack([*_longer(pairs.x, plan.rows).T, *pairs.rows])
    args = (_vector(formula.consts), rows, jnp.stack(columns))
    shape = jax.ShapeDtypeStruct((plan.splits, len(terms) or 2, plan.rows), jnp.float32)
    out = gpu.launch(kernel, shape, plan.grid, *args, warps=plan.tile.warps)[:, :, :num]
    if not wanted:
        return out[:, 0], out[:, 1]
    found = jnp.sum(out, 0)
    products = [found[k * dim : (k + 1) * dim].T for k in range(len(multiplied))]
    return _together(wanted, products, list(found[len(multiplied) * dim :]))


def _together(wanted: list[Sum], products: list[Any], masses: list[Any]) -> list[Any]:
    """(product, mass) of each sum, None for what it does not have."""
    return [
        (None if one.columns is None else products.pop(0), masses.pop(0) if one.mass else None)
        for one in wanted
    ]


# -------------------------------------------------------------------------------------------------- more coordinates


def _matrix_body(
    const_ref: Any,
    x_ref: Any,
    row_ref: Any,
    y_ref: Any,
    col_ref: Any,
    *refs: Any,
    jaxpr: Any,
    plan: Plan,
    sums: Any,
) -> None:
    """Tiles with rows down and columns across; `sums` lists the results with a mass, and those that multiply a matrix."""
    from jax.experimental import pallas as pl

    mass_ref, count = refs[-1], len(sums[1])
    u_refs, product_refs = refs[:count], refs[count:-1]
    own, split = pl.ds(pl.program_id(0) * plan.tile.rows, plan.tile.rows), pl.program_id(1)
    x = gpu.halves(x_ref[own, :])
    rows = [row_ref[k, own][:, None] for k in range(row_ref.shape[0])]

    def step(begin: Any, carry: Any) -> Any:
        part = pl.ds(begin, plan.tile.cols)
        cols = [col_ref[k, part][None, :] for k in range(col_ref.shape[0])]
        product = gpu.exact(x, (y_ref[0, part, :].T, y_ref[1, part, :].T))
        r2 = jnp.maximum(gpu.fma(product, -2.0, rows[0] + cols[0]), 0)
        results = _results(jaxpr, const_ref, [r2, *rows[1:], *cols[1:-1]])
        if not sums[0]:
            return _lift(results[0], cols[-1], carry, 1)
        tiles = _tiles(results, r2.shape)
        masses = [jnp.sum(tiles[k] * cols[-1], 1) for k in sums[0]]
        # A tensor core cuts off what it adds, which tells in long sums: times 1, an ordinary addition is left outside.
        one = jnp.minimum(begin + 1, 1).astype(jnp.float32)
        products = []
        for k, ref, before in zip(sums[1], u_refs, carry[len(masses) :], strict=True):
            product = gpu.exact(gpu.halves(tiles[k]), (ref[0, part, :], ref[1, part, :]))
            products.append(gpu.fma(product, one, before))
        return *_add(carry[: len(masses)], masses), *products

    zero = (jnp.zeros(plan.tile.rows),) * len(sums[0]) or _nothing(plan)
    found = _loop(plan, step, zero + (jnp.zeros((plan.tile.rows, x_ref.shape[1])),) * count)
    for k in range(len(zero)):
        mass_ref[split, k, own] = found[k]
    for ref, product in zip(product_refs, found[len(zero) :], strict=True):
        ref[split, own, :] = product


def _matrix(formula: Formula, pairs: Pairs, wanted: list[Sum], plan: Plan) -> Any:
    num, dim = pairs.x.shape
    width = max(16, 1 << (dim - 1).bit_length())
    wider = lambda a, size, mode: jnp.pad(_longer(a, size, mode), ((0, 0), (0, width - dim)))
    split = lambda a: jnp.stack(gpu.halves(a))
    x, y = wider(pairs.x, plan.rows, "edge"), wider(pairs.y, plan.cols, "edge")
    rows = jnp.stack([jnp.sum(x * x, 1), *pairs.rows])
    cols = jnp.stack([jnp.sum(y * y, 1), *pairs.cols])
    multiplied = [one for one in wanted if one.columns is not None]
    us = [split(wider(one.columns, plan.cols, "constant")) for one in multiplied]
    sums = [one.result for one in wanted if one.mass], [one.result for one in multiplied]
    shapes = [jax.ShapeDtypeStruct((plan.splits, plan.rows, width), jnp.float32) for _ in us]
    shapes.append(jax.ShapeDtypeStruct((plan.splits, len(sums[0]) or 2, plan.rows), jnp.float32))
    kernel = functools.partial(_matrix_body, jaxpr=formula.jaxpr, plan=plan, sums=sums)
    args = (_vector(formula.consts), x, rows, split(y), cols, *us)
    *out, mass = gpu.launch(kernel, shapes, plan.grid, *args, warps=plan.tile.warps)
    if not wanted:
        return mass[:, 0, :num], mass[:, 1, :num]
    products = [jnp.sum(a, 0)[:num, :dim] for a in out]
    return _together(wanted, products, list(jnp.sum(mass, 0)[:, :num]))
