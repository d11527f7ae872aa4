"""The only file that knows M^2: sums over all pairs of particles in O(M) memory.

Every interaction is a function of squared distances r2_ij = |x_i - y_j|^2, so a caller passes
`weights(r2, *rows, *cols)`, written elementwise, and never sees how the M x N matrix is cut. Here it
is cut into horizontal strips that stay in cache; a cloud whose whole matrix is that small is one strip.
On a GPU, large clouds in float32 and up to 64 dimensions go through the kernels of `fused` and `radix`, which never write a
part of the matrix to memory, and few particles in many dimensions through `skinny`, which reads the cloud twice and copies nothing.

Accuracy. Up to `DIRECT_DIM` coordinates, r2 is summed from differences and exact to rounding.
Above, it is |x|^2 + |y|^2 - 2 x.y of the *centred* cloud in full precision, whose error is about
machine epsilon times the squared radius of the cloud (relative error 6e-6 in float32 for a cloud of
spread 0.01 around 1, where the uncentred form loses 7e-3). The GPU's exponential adds a relative error of 2e-7 to a kernel.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from particlax import formula, fused, gpu, sharding, skinny, updates
from particlax.blocks import alone, as_matrices, few, wide
from particlax.errors import OptionError
from particlax.fused import Pairs
from particlax.skinny import matmul

__all__ = [
    "Mixing",
    "Pulled",
    "interact",
    "logsumexp",
    "mixed",
    "mixing",
    "moved",
    "reduce_rows",
    "sqdist",
    "total",
    "typical_square",
]

DIRECT_DIM = 8
"""Largest D for which distances are summed from differences (exact) and not from a Gram matrix."""
STRIP_ELEMENTS = {"cpu": 1 << 20}
"""Elements of one strip by backend: a strip and its temporaries should stay in cache."""
STRIP_ELEMENTS_ELSEWHERE = 1 << 26


Weights = Callable[..., Any]
Blocks = list[Array]
Vectors = Sequence[Array]


def _few(x: PyTree, y: PyTree) -> bool:
    return y is x and few(x)


def _few_sqdist(add: Callable[[Any], Any], xs: Blocks) -> Array:
    """Squared distances within a cloud, added up over the devices' coordinates."""
    return add(skinny.distances(xs)[0])


def _sqdist(xs: Blocks, ys: Blocks) -> Array:
    if len(xs) == 1 and 0 < xs[0].shape[1] <= DIRECT_DIM:
        x, y = xs[0], ys[0]
        terms = [(x[:, None, d] - y[None, :, d]) ** 2 for d in range(x.shape[1])]
        return sum(terms[1:], terms[0])
    gram = sum(matmul(x, y.T) for x, y in zip(xs, ys, strict=True))
    xx = sum(jnp.sum(x * x, 1) for x in xs)
    yy = sum(jnp.sum(y * y, 1) for y in ys)
    return jnp.maximum(xx[:, None] + yy[None, :] - 2 * gram, 0)  # pyright: ignore


def _centres(blocks: Blocks) -> Blocks:
    """A point amid each cloud: in every coordinate the median of three medians of three particles.

    Unlike the mean it is not moved by a particle far away. Nor does XLA round it anew in every place that uses it, as it does a mean.
    """

    # No sum of differences depends on it.
    return [lax.stop_gradient(_amid(block[_nine(len(block))])) for block in blocks]


def _nine(num: int) -> np.ndarray:
    """The numbers of nine particles, spread over all."""
    return np.arange(9) * (num - 1) // 8


def _amid(rows: Array) -> Array:
    """Of nine rows the median of the medians of three, [1, ...]."""
    some = rows.reshape(3, 3, *rows.shape[1:])
    low, high = jnp.minimum(some[0], some[1]), jnp.maximum(some[0], some[1])
    three = jnp.maximum(low, jnp.minimum(high, some[2]))
    return jnp.max(jnp.minimum(three, jnp.roll(three, 1, 0)), 0, keepdims=True)


def _around(centres: Blocks, xs: Blocks, ys: Blocks) -> tuple[Blocks, Blocks]:
    """Both clouds around the centres (differences do not change, rounding gets better)."""
    moved = [x - c for x, c in zip(xs, centres, strict=True)]
    return moved, moved if ys is xs else [y - c for y, c in zip(ys, centres, strict=True)]


def _both(x: PyTree, y: PyTree) -> tuple[Blocks, Blocks, Callable[[Blocks], PyTree]]:
    xs, back = as_matrices(x)
    return xs, xs if y is x else as_matrices(y)[0], back


def _strip_elements() -> int:
    return STRIP_ELEMENTS.get(jax.default_backend(), STRIP_ELEMENTS_ELSEWHERE)


def reduce_rows(strip: Callable[..., PyTree], rows: PyTree, columns: int) -> PyTree:
    """`strip(rows)` for arrays with leading axis M, some rows at a time.

    `strip` may build arrays of shape [rows, columns]; the number of rows is chosen so that these
    stay in cache. Its result has the rows as leading axis.
    """
    num = jax.tree.leaves(rows)[0].shape[0]
    height = min(num, max(1, _strip_elements() // columns))
    if height == num:
        return strip(rows)
    strips = -(-num // height)
    height = -(-num // strips)  # even strips, so that little of the last one is padding

    def cut(a: Array) -> Array:
        padding = [(0, strips * height - num)] + [(0, 0)] * (a.ndim - 1)
        return jnp.pad(a, padding, mode="edge").reshape(strips, height, *a.shape[1:])

    result = lax.map(strip, jax.tree.map(cut, rows))
    return jax.tree.map(lambda a: a.reshape(strips * height, *a.shape[2:])[:num], result)


def _weigh(weights: Weights, r2: Array, rows: Vectors, cols: Vectors) -> Any:
    return weights(r2, *[r[:, None] for r in rows], *[c[None, :] for c in cols])


def sqdist(x: PyTree, y: PyTree) -> Float[Array, "M N"]:
    """The whole matrix of squared distances; only for clouds known to be small."""
    if _few(x, y):
        return sharding.by_coordinates(_few_sqdist, (as_matrices(x)[0],), result="same")
    xs, ys, _ = _both(x, y)
    return _sqdist(*_around(_centres(ys), xs, ys))


def typical_square(x: PyTree) -> Float[Array, ""]:
    """|x_i|^2 as most particles have it, by nine of them (see `_centres`); of few in many dimensions a number of that size (`skinny.distances`).

    >>> float(typical_square(jnp.array([[3.0, 4.0], [1e6, 0.0], [4.0, 3.0], [0.0, 0.0], [5.0, 0.0]])))
    25.0
    """
    if _few(x, x):  # the same kernels as for the distances, so at no cost beside them
        square = lambda add, xs: add(skinny.distances(xs)[1])
        return sharding.by_coordinates(square, (as_matrices(x)[0],), result="same")
    xs = lax.stop_gradient(as_matrices(x)[0])
    some = sharding.picked(xs, _nine(len(xs[0])))
    squares = [jnp.sum(wide(a) ** 2, 1) for a in some]
    return _amid(sum(squares[1:], squares[0]))[0]


def interact(
    x: PyTree,
    y: PyTree,
    weights: Weights,
    *,
    values: PyTree = None,
    rows: Vectors = (),
    cols: Vectors = (),
    ratio: Array | None = None,
) -> PyTree:
    """sum_j A_ij v_j + sum_j B_ij (x_i - y_j), with (A, B) = weights(r2_ij, *rows_i, *cols_j).

    `values` holds v; without it `weights` returns B alone. `ratio` is B / A where that is one number.

    >>> x = jnp.array([[0.0], [1.0]])
    >>> [[round(v, 3) for v in row] for row in interact(x, x, lambda r2: jnp.exp(-r2)).tolist()]
    [[-0.368], [0.368]]
    """
    if _few(x, y):
        how = mixing(x, y, weights, values=values, rows=rows, cols=cols, ratio=ratio)
        return mixed(x, values, how)
    vs = None if values is None else as_matrices(values)[0]
    xs, ys, back = _both(x, y)
    pairs, lean = Pairs(xs, ys, vs, rows, cols), functools.partial(_interact, ratio=ratio)
    return back(_all(fused.interact, _interact, weights, pairs, lean=lean))


def _interact(weights: Weights, pairs: Pairs, ratio: Array | None = None) -> Blocks:
    xs, ys, vs, rows, cols = pairs

    def strip(part: Any) -> Blocks:
        xb, rb = part
        pair = _weigh(weights, _sqdist(xb, ys), rb, cols)
        if ratio is not None and vs is not None:  # A @ (v - ratio y) + ratio (A @ 1) x
            mass = ratio * jnp.sum(pair[0], 1, keepdims=True)
            return [
                mass * x + matmul(pair[0], v - ratio * y)
                for x, y, v in zip(xb, ys, vs, strict=True)
            ]
        b = pair if vs is None else pair[1]
        mass = jnp.sum(b, 1, keepdims=True)
        out = [mass * x - matmul(b, y) for x, y in zip(xb, ys, strict=True)]
        if vs is not None:
            out = [o + matmul(pair[0], v) for o, v in zip(out, vs, strict=True)]
        return out

    return reduce_rows(strip, (xs, list(rows)), ys[0].shape[0])


def _all(
    kernel: Any, strips: Any, weights: Weights, pairs: Pairs, *, log: bool = False, lean: Any = None
) -> Any:
    """The sum over all columns, from whichever devices they are on.

    `lean` is a shorter way than `strips` where there is no kernel: its twin may close over nothing that is differentiated.
    """
    xs, ys, vs, rows, cols = pairs

    def part(centres: Blocks, own: Any, others: Any) -> Any:
        (xs, rows), (ys, vs, cols) = own, others
        near = _around(centres, xs, ys)
        pairs = Pairs(*near, vs, rows, cols)
        return _sum(kernel, strips, lean or strips, weights, pairs)

    amid = lambda others: _centres(others[0])
    return sharding.over_columns(part, (xs, rows), (ys, vs, cols), amid, log=log)


def _sum(kernel: Any, strips: Any, lean: Any, weights: Weights, pairs: Pairs) -> Any:
    """kernel(formula of weights, pairs) where a fused GPU kernel takes the sum, with `strips` as its twin, else lean(...)."""
    traced = None
    if gpu.possible() and fused.suits(pairs):
        traced = formula.trace(weights, 1 + len(pairs.rows) + len(pairs.cols))
    if traced is None:
        return lean(weights, pairs)

    def fast(consts: Vectors, pairs: Pairs) -> Any:
        (x,), (y,), values, *vectors = pairs
        one = Pairs(x, y, values and values[0], *vectors)
        found = kernel(traced._replace(consts=consts), one)
        return [found] if found.ndim > 1 else found

    def plain(consts: Vectors, pairs: Pairs) -> Any:
        return strips(formula.function(traced._replace(consts=consts)), pairs)

    return gpu.choose(True, gpu.differentiable(fast, plain), plain, traced.consts, pairs)


class Mixing(NamedTuple):
    """Matrices of left @ (x - mean of x) + right @ values; without `right`, of the first part alone."""

    left: Float[Array, "M M"]
    right: Float[Array, "M M"] | None = None
    ratio: Any = None
    """Where left is -ratio * right but for its diagonal, and its rows add up to 0."""

    def plus(self, other: "Mixing") -> "Mixing":
        """The sum of both."""
        present = [one for one in (self.right, other.right) if one is not None]
        return Mixing(self.left + other.left, sum(present[1:], present[0]) if present else None)

    def times(self, factor: Any) -> "Mixing":
        """`factor` of it."""
        right = None if self.right is None else factor * self.right
        return Mixing(factor * self.left, right, self.ratio)


def mixing(
    x: PyTree,
    y: PyTree,
    weights: Weights,
    *,
    values: PyTree = None,
    rows: Vectors = (),
    cols: Vectors = (),
    ratio: Array | None = None,
) -> Mixing:
    """What `interact` does to few particles: sums of such matrices cost nothing, `mixed` does them all in one pass."""
    if y is not x:
        raise OptionError("mixing is within one cloud; use interact for two")

    def matrices(add: Any, xs: Blocks, rows: Vectors, cols: Vectors) -> Mixing:
        pair = _weigh(weights, _few_sqdist(add, xs), rows, cols)
        b = pair if values is None else pair[1]
        return Mixing(jnp.diag(jnp.sum(b, 1)) - b, None if values is None else pair[0])

    found = sharding.by_coordinates(matrices, (as_matrices(x)[0],), (rows, cols), "same")
    return found._replace(ratio=None if values is None else ratio)


class Pulled(NamedTuple):
    """values - pull * x: such a score, of a Gaussian prior, is put together by `mixed` on its way."""

    values: PyTree
    pull: Any

    def whole(self, x: PyTree) -> PyTree:
        """The score."""
        pulled = lambda v, x: v - jnp.asarray(self.pull, x.dtype) * x
        return jax.tree.map(pulled, self.values, x)


def mixed(x: PyTree, values: PyTree | Pulled, how: Mixing) -> PyTree:
    """left @ (x - mean of x) + right @ values."""
    xs, back = as_matrices(x)
    values, pull = values if isinstance(values, Pulled) else (values, None)
    vs = None if how.right is None else as_matrices(values)[0]
    leaves = jax.tree.leaves(x)
    own = [leaves[i].shape for i in alone(x)]
    shapes = [*own, *[one.shape for one in xs[len(own) :]]]

    def moved(add: Any, xs: Blocks, vs: Blocks | None, how: Mixing) -> Blocks:
        return skinny.mix(how.left, xs, how.right, vs, pull=pull, ratio=how.ratio, shapes=shapes)

    return back(sharding.by_coordinates(moved, (xs, vs), same=(how,)))


def moved(
    x: PyTree, values: PyTree | Pulled, how: Mixing, step: Callable[[PyTree], PyTree], old: PyTree
) -> PyTree:
    """step(mixed(x, values, how)), in the same pass over memory if it treats every number alone.

    `old` has the structure of the result: what it replaces.
    """
    values, pull = values if isinstance(values, Pulled) else (values, None)
    used = (x,) if how.right is None else (x, values)
    ready = skinny.ready(*used) and sharding.here()
    plan = updates.apart(step, x, old) if ready else None
    if plan is None:
        scores = values if pull is None else Pulled(values, pull)
        return step(mixed(x, scores, how))
    xs, back = as_matrices(x)
    leaves, own = [jax.tree.leaves(tree) for tree in used], alone(x)
    todo = [plan.leaves[i].among([some[i] for some in leaves]) for i in own]
    if sum(x.shape[1] for x in xs[len(own) :]):
        todo.append(updates.Todo([as_matrices(tree)[0][-1] for tree in used]))
    found = skinny.move(how.left, todo, how.right, pull)
    joined = [one for (one,) in found[len(own) :]] or xs[len(own) :]
    drifts = jax.tree.leaves(back([*xs[: len(own)], *joined]))
    results = [leaf.rule(drift, leaf.fields, leaf.scalars) for leaf, drift in zip(plan.leaves, drifts, strict=True)]  # fmt: skip
    for i, made in zip(own, found, strict=False):
        results[i] = [one.reshape(drifts[i].shape) for one in made]
    return plan.finish(results)


def _few_reduce(how: Any, x: PyTree, weights: Weights, rows: Vectors, cols: Vectors) -> Array:
    def reduced(add: Any, xs: Blocks, rows: Vectors, cols: Vectors) -> Array:
        return how(_weigh(weights, _few_sqdist(add, xs), rows, cols), axis=1)

    return sharding.by_coordinates(reduced, (as_matrices(x)[0],), (rows, cols), "rows")


def total(
    x: PyTree, y: PyTree, weights: Weights, rows: Vectors = (), cols: Vectors = ()
) -> Float[Array, " M"]:
    """sum_j weights(r2_ij, *rows_i, *cols_j) for every i.

    >>> x = jnp.array([[0.0], [1.0]])
    >>> total(x, x, lambda r2: r2).tolist()
    [1.0, 1.0]
    """
    if _few(x, y):
        return _few_reduce(jnp.sum, x, weights, rows, cols)
    xs, ys, _ = _both(x, y)
    strips = functools.partial(_total, jnp.sum)
    return _all(fused.total, strips, weights, Pairs(xs, ys, None, rows, cols))


def _total(how: Any, weights: Weights, pairs: Pairs) -> Array:
    xs, ys, _, rows, cols = pairs

    def strip(part: Any) -> Array:
        xb, rb = part
        return how(_weigh(weights, _sqdist(xb, ys), rb, cols), axis=1)

    return reduce_rows(strip, (xs, list(rows)), ys[0].shape[0])


def logsumexp(x: PyTree, y: PyTree, weights: Weights, cols: Vectors = ()) -> Float[Array, " M"]:
    """log sum_j exp weights(r2_ij, *cols_j) for every i, without overflow."""
    if _few(x, y):
        return _few_reduce(jax.nn.logsumexp, x, weights, (), cols)
    xs, ys, _ = _both(x, y)
    strips = functools.partial(_total, jax.nn.logsumexp)
    pairs = Pairs(xs, ys, None, (), cols)
    return _all(fused.logsumexp, strips, weights, pairs, log=True)
