"""Clouds of few particles in many dimensions, such as networks: two passes over memory for a whole interaction.

An interaction needs the M x M squared distances, and then sums over particles of whole rows, both bound by memory. In plain XLA
rows are padded, copied and joined on the way; on a GPU fused kernels take leaves as they are and read memory once: those of `direct`
up to 20 particles, all leaves in one launch, and those of `tensor` above. Clouds in float64 take the plain path.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from particlax import calls, direct, gpu, tensor
from particlax.tensor import Blocks, from_gram
from particlax.updates import Todo

__all__ = ["distances", "mix", "move", "ready", "suits"]

PAIRED, SMALL, LARGE = 512, 4096, 16384
"""Coordinates at a time on a CPU: of all pairs, of up to 8 particles, and of more."""
TOGETHER = 8
"""How many pieces of coordinates all pairs take in one go."""
LANES, RUNS, ROOM = (16, 8), range(40, 19, -1), 1 << 25
"""On a CPU: lanes of a run and runs of a piece, the first that fill a leaf without remainder; and most bytes for the sums that pieces leave."""
WHOLE = 1 << 27
"""Bytes up to which a leaf is mixed at once on a CPU: faster than in pieces, for two arrays of its size on the way."""
COPIED = 1 << 20
"""Most bytes of a leaf that is copied to have runs without remainder; larger ones are written over."""
LEAST = 1 << 13
"""Fewest coordinates for which a fused kernel pays."""

Shapes = Sequence[tuple[int, ...]]


def suits(num: int) -> bool:
    """Whether so few particles are for this module."""
    return num <= tensor.MOST


def matmul(a: Array, b: Array) -> Array:
    """a @ b in full precision on every backend."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def distances(xs: Blocks) -> tuple[Float[Array, "M M"], Float[Array, ""]]:
    """|x_i - x_j|^2 and the mean of |x_i|^2, for particles whose coordinates are spread over several matrices.

    On a CPU the second is |x_1|^2 and the mean of |x_i - x_1|^2, without a pass of its own: at least half the mean, and the same
    where the cloud has collapsed.

    >>> r2, square = distances([jnp.array([[0.0, 3.0], [2.0, 3.0]]), jnp.array([[1.0], [1.0]])])
    >>> r2.tolist(), float(square)
    ([[0.0, 4.0], [4.0, 0.0]], 12.0)
    """
    return _choose(xs, "distances", _plain_distances, [x for x in xs if x.shape[1]])


def mix(
    left: Float[Array, "M M"],
    xs: Blocks,
    right: Float[Array, "M M"] | None = None,
    vs: Blocks | None = None,
    *,
    pull: Any = None,
    ratio: Any = None,
    shapes: Shapes = (),
) -> list[Float[Array, "M _"]]:
    """left @ (x - m) + right @ (v - pull * x) for every matrix, with m the mean over particles; what is not given is 0.

    `ratio` says that left is -ratio * right but for its diagonal, and that its rows add up to 0: one product may do for both.
    `shapes` are those of the leaves that the matrices were made of, for whoever writes over these.

    >>> mix(jnp.eye(2), [jnp.array([[0.0], [2.0]])])[0].tolist()
    [[-1.0], [1.0]]
    """
    full = [i for i, x in enumerate(xs) if x.shape[1]]
    args: list[Any] = [left, [xs[i] for i in full]]
    if right is not None and vs is not None:
        pull = None if pull is None else jnp.asarray(pull, xs[0].dtype)
        args += [right, [vs[i] for i in full], (pull, ratio)]
    plain = functools.partial(_plain_mix, shapes=[shapes[i] for i in full] if shapes else None)
    found = dict(zip(full, _choose(xs, "mix", plain, *args), strict=True))
    return [found.get(i, x) for i, x in enumerate(xs)]


def ready(x: PyTree, values: PyTree = None) -> bool:
    """Whether `move` is for this cloud: on a GPU. Elsewhere XLA would copy what is written over."""
    leaves = jax.tree.leaves(x)
    size = sum(leaf.size // len(leaf) for leaf in leaves)
    fits = len(leaves[0]) <= direct.MOST and size >= LEAST
    single = all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((x, values)))
    return gpu.possible() and fits and single


def move(
    left: Float[Array, "M M"],
    todo: Sequence[Todo],
    right: Float[Array, "M M"] | None = None,
    pull: Any = None,
) -> list[list[Array]]:
    """What `mix` gives, and what is to be done with it: the results of every rule, or else the mixture.

    The first of a rule's arrays is x and, if there is `right`, the second v.
    """
    bare = [one._replace(arrays=[], scalars=()) for one in todo]
    fused = functools.partial(direct.move, bare)
    plain = functools.partial(_plain_move, bare)
    given = [(one.arrays, list(one.scalars)) for one in todo]
    pull = None if pull is None else jnp.asarray(pull, jnp.float32)
    return gpu.choose(True, gpu.differentiable(fused, plain), plain, left, given, right, pull)


def _choose(xs: Blocks, name: str, plain: Any, *args: Any) -> Any:
    """The fused kernel of that name where the program is for a GPU and the cloud is large enough."""
    size = sum(x.shape[1] for x in xs)
    fits = all(x.dtype == jnp.float32 for x in xs) and size >= LEAST and suits(len(xs[0]))
    fused = (_DIRECT if len(xs[0]) <= direct.MOST else _TENSOR)[name]
    return gpu.choose(fits, fused, plain, *args)


def _plain_distances(xs: Blocks) -> tuple[Array, Array]:
    if _in_pieces() and 1 < len(xs[0]) <= direct.MOST:
        return _paired(xs)
    return _by_products(xs)


def _by_products(xs: Blocks) -> tuple[Array, Array]:
    parts = [_plain_gram(x) for x in xs]
    products = sum(parts[1:], parts[0])
    return from_gram(products[:-1, :-1], products[-1, -1])


def _by_pairs(xs: Blocks) -> tuple[Array, Array]:
    """Squares of differences, added up over pieces side by side: on a CPU faster than products of so few rows."""
    sums = functools.reduce(jnp.add, [_summed(x) for x in xs])
    r2 = direct.from_pairs(sums, len(xs[0]))
    first = functools.reduce(jnp.add, [jnp.sum(jnp.square(x[0])) for x in xs])
    return r2, first + jnp.mean(r2[0])


def _summed(x: Array) -> Array:
    """By pair; a leaf that is cheap to copy gets zeros at its end, which add nothing, until runs fill it."""
    cut = _runs(x.shape, x.dtype.itemsize)
    if cut is None and x.nbytes <= COPIED:
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % (RUNS[0] * LANES[0]))))
        cut = RUNS[0], LANES[0]
    return _in_runs(x, *cut) if cut else _in_turns(x)


def _runs(shape: tuple[int, ...], width: int) -> tuple[int, int] | None:
    """Runs of a piece and lanes of a run that fill a leaf of so many coordinates of so many bytes, if sums of the pieces have room."""
    num, size = shape
    fits = ((runs, lanes) for lanes in LANES for runs in RUNS if size % (runs * lanes) == 0)
    found = next(fits, None)
    left = size * width * (num * (num - 1) // 2)
    return found if found and left <= found[0] * ROOM else None


def _in_runs(x: Array, runs: int, lanes: int) -> Array:
    """One piece after the other: all its runs are in the nearest cache while all pairs add them up."""
    i, j = np.triu_indices(len(x), 1)
    pieces = x.reshape(len(x), -1, runs, lanes)
    cut = [jnp.swapaxes(pieces[:, :, run], 0, 1) for run in range(runs)]
    terms = [jnp.square(run[:, i] - run[:, j]) for run in cut]
    while len(terms) > 1:  # by halves: sums that do not wait for one another
        rest = terms[len(terms) // 2 * 2 :]
        terms = [*map(jnp.add, terms[::2], terms[1::2]), *rest]
    # The barrier keeps the sum over pieces out of the loop over them, which would no longer be one of vectors.
    return jnp.sum(jnp.sum(lax.optimization_barrier(terms[0]), 0), 1)


def _in_turns(x: Array) -> Array:
    """A loop over pieces of any size."""
    i, j = np.triu_indices(len(x), 1)
    width = max(1, min(PAIRED, x.shape[1] // TOGETHER))
    whole, rest = divmod(x.shape[1], TOGETHER * width)

    def add(k: Any, sums: Array) -> Array:
        for part in range(TOGETHER):  # each sum is read and written once for all
            piece = _piece(TOGETHER * k + part, x, width)
            sums = sums + jnp.square(piece[i] - piece[j])
        return sums

    pieces = lax.fori_loop(0, whole, add, jnp.zeros((len(i), width), x.dtype))
    sums = jnp.sum(pieces, 1)
    return sums + jnp.sum(jnp.square(x[i, -rest:] - x[j, -rest:]), 1) if rest else sums


_paired = gpu.differentiable(gpu.once(_by_pairs), _by_products)


def _plain_gram(x: Array) -> Array:
    """Products of the rows of x - m and, last, of m: one matrix, so that whoever needs a part of it makes the same loop."""

    def of(x: Array) -> Array:
        mean = jnp.mean(x, 0, keepdims=True)
        rows = jnp.concatenate([x - mean, mean])
        return matmul(rows, rows.T)

    width = _width(x)
    add = lambda i, sums: sums + of(_piece(i, x, width))
    whole, rest = divmod(x.shape[1], width)
    sums = lax.fori_loop(1, whole, add, of(_piece(0, x, width)))
    return sums + of(x[:, -rest:]) if rest else sums


def _plain_mix(
    left: Array,
    xs: Blocks,
    right: Array | None = None,
    vs: Blocks = (),
    factors: tuple[Array | None, Array | None] = (None, None),
    *,
    shapes: Shapes | None = None,
) -> list[Array]:
    """One product or two, of matrices that do the centring and the pull, so that next to nothing is made on the way.

    What that loses is the rounding of x itself.
    """
    if right is None:
        own = _turned(left - jnp.mean(left, 1, keepdims=True))
        return [_written(lambda x: _times(own, x), x) for x in xs]
    pull, ratio = factors
    pulled = 0.0 if pull is None else pull
    if ratio is None:
        near = _turned(left - jnp.mean(left, 1, keepdims=True) - pulled * right)
        far = _turned(right)
        of = lambda shape, x, v: _times(near, x) + _times(far, v)
    else:  # right @ (v - (ratio + pull) x), and what is left of the diagonal
        rest, far = jnp.diag(left) + ratio * jnp.diag(right), _turned(right)

        def of(shape: tuple[int, ...], x: Array, v: Array) -> Array:
            # In the leaf's own shape, or XLA for CPUs would write neither this nor new particles over the old ones.
            whole = math.prod(shape) == x.size
            shape = shape if whole else x.shape
            times = _kept_times if whole and x.nbytes > COPIED else _leaf_times
            own = rest.astype(x.dtype).reshape(-1, *[1] * (len(shape) - 1))
            x, v = x.reshape(shape), v.reshape(shape)
            out = times(far, v - jnp.asarray(ratio + pulled, x.dtype) * x)
            return (out + own * x).reshape(len(x), -1)

    todo = zip(shapes or [x.shape for x in xs], xs, vs, strict=True)
    return [_written(functools.partial(of, shape), x, v) for shape, x, v in todo]


def _turned(matrix: Array) -> Array:
    """The transpose, as an array of its own."""
    return lax.optimization_barrier(matrix.T)


def _times(turned: Array, x: Array) -> Array:
    """turned.T @ x: what XLA for CPUs does a fifth faster than with the matrix itself, which it hands to another library."""
    dims = (((0,), (0,)), ((), ()))
    return lax.dot_general(turned.astype(x.dtype), x, dims, precision=lax.Precision.HIGHEST)


def _leaf_times(turned: Array, leaf: Array) -> Array:
    return _times(turned, leaf.reshape(len(leaf), -1)).reshape(leaf.shape)


_kept_times = calls.kept(_leaf_times)


def _plain_move(
    todo: Sequence[Todo], left: Array, given: Any, right: Array | None, pull: Array | None
) -> list[list[Array]]:
    xs = [arrays[0] for arrays, _ in given]
    vs = () if right is None else [arrays[1] for arrays, _ in given]
    drifts = _plain_mix(left, xs, right, vs, (pull, None))
    found = []
    for one, drift, (arrays, scalars) in zip(todo, drifts, given, strict=True):
        fields = [arrays[i] for i in one.reads]
        found.append(one.rule(drift, fields, scalars) if one.rule else [drift])
    return found


def _in_pieces() -> bool:
    return jax.default_backend() == "cpu"


def _width(x: Array) -> int:
    """Coordinates at a time: on a CPU so many that a piece of the cloud stays in cache while it is worked on."""
    most = SMALL if len(x) <= 8 else LARGE
    return min(most, x.shape[1]) if _in_pieces() else x.shape[1]


def _piece(i: Any, x: Array, width: int) -> Array:
    return lax.dynamic_slice_in_dim(x, i * width, width, 1)


def _written(of: Callable[..., Array], *arrays: Array) -> Array:
    """of(*pieces of the arrays), side by side, each written over the piece of the last array that it was made of.

    If that array is needed no more, no other is made.
    """
    width = _width(arrays[0])
    whole, rest = divmod(arrays[0].shape[1], width)
    if (whole == 1 and not rest) or arrays[0].nbytes <= WHOLE:
        return of(*arrays)

    *others, last = arrays

    def write(i: Any, out: Array) -> Array:
        made = of(*[_piece(i, a, width) for a in (*others, out)])
        return lax.dynamic_update_slice_in_dim(out, made, i * width, 1)

    out = lax.fori_loop(0, whole, write, last)
    # The end is that of `out`, where nothing has been written yet: the last array need not be kept.
    end = [a[:, -rest:] for a in (*others, out)]
    return lax.dynamic_update_slice_in_dim(out, of(*end), whole * width, 1) if rest else out


def _fused(kernels: Any) -> dict[str, Any]:
    """The kernels of a module, traced once for all leaves of the same shapes, with the derivatives of the plain path."""
    # A kernel takes both products anyway, and has no use for a ratio.
    mixed = lambda *args: kernels.mix(*args[:4], *[pull for pull, _ in args[4:]])
    twins = {"distances": (kernels.distances, _plain_distances), "mix": (mixed, _plain_mix)}
    return {n: gpu.differentiable(gpu.once(f), plain) for n, (f, plain) in twins.items()}


_DIRECT, _TENSOR = _fused(direct), _fused(tensor)
