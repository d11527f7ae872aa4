"""Many devices: the ways in which they exchange particles.

A mesh has an axis `particles`, perhaps an axis `data`, and any others. Every device of the first holds M / P particles. While a
step is traced with a mesh, the functions below run their argument on each device's particles (`jax.shard_map`); without one they
just call it, so that a program for one device is the same as if they were not there:

- `by_rows`: each device its own rows, nothing exchanged but what is asked for as a whole;
- `over_columns`: sums over all particles for each of one's own: all of them gathered where they are few, else passed around a ring,
  each part on its way while the one before it is worked on;
- `by_coordinates`: few particles of many coordinates are turned, so that each device has all particles in some coordinates;
- `factored`: a QR factorisation of the cloud from those of its parts.

Axes other than `particles` are left to the compiler, in here and elsewhere.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, PyTree

from particlax.errors import DataError
from particlax.placement import AXIS, Layout

__all__ = [
    "Shares",
    "by_coordinates",
    "by_rows",
    "factored",
    "here",
    "over_columns",
    "picked",
    "spread",
    "together",
    "using",
]

DATA = "data"
"""The mesh axis along which batches are divided."""
GATHER_BYTES = 1 << 26
"""What all particles may take up on one device, in bytes; clouds above go around the ring."""
FACTOR_BYTES = 1 << 20
"""Largest cloud that every device factors as a whole."""


_active: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("layout", default=None)


@contextlib.contextmanager
def using(layout: Layout | None) -> Iterator[None]:
    """What is traced inside is for these devices."""
    token = _active.set(layout)
    try:
        yield
    finally:
        _active.reset(token)


def here() -> bool:
    """Whether what is traced now is for one device."""
    return _active.get() is None


def spread(batch: PyTree) -> PyTree:
    """A batch divided along the axis `data`, where the mesh has one."""
    layout = _active.get()
    if layout is None or layout.mesh.shape.get(DATA, 1) == 1:
        return batch
    place = NamedSharding(layout.mesh, PartitionSpec(DATA))
    for leaf in jax.tree.leaves(batch):
        refuse_uneven(layout, leaf.shape[0])
    return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, place), batch)


def refuse_uneven(layout: Layout, size: int) -> None:
    """Refuse a batch that the devices along the axis `data` cannot divide."""
    parts = layout.mesh.shape.get(DATA, 1)
    if size % parts:
        raise DataError(
            f"a batch of {size} came for {parts} devices along the mesh axis 'data'; expected a multiple of {parts}. "
            "Take another batch size, or a mesh without that axis"
        )


class Shares:
    """Which rows of a batch of `size` this process needs, and how they become a part of what all devices have."""

    def __init__(self, layout: Layout, size: int):
        refuse_uneven(layout, size)
        axis = DATA if layout.mesh.shape.get(DATA, 1) > 1 else None
        self.place, self.size = NamedSharding(layout.mesh, PartitionSpec(None, axis)), size
        parts = self.place.addressable_devices_indices_map((1, size)).values()
        wanted = [np.arange(size)[part[1]] for part in parts if part is not None]
        self.rows = np.unique(np.concatenate(wanted))

    def spread(self, blocks: np.ndarray) -> Array:
        """Batches of several steps, this process's rows of each, as an array of all devices."""
        shape = (len(blocks), self.size, *blocks.shape[2:])

        def part(index: Any) -> np.ndarray:
            rows = np.arange(self.size)[index[1]]
            begin = int(np.searchsorted(self.rows, rows[0]))
            return blocks[:, begin : begin + len(rows)]

        return jax.make_array_from_callback(shape, self.place, part)


# Exchange


def _on_each(
    layout: Layout,
    function: Callable[..., Any],
    args: Any,
    into: Any,
    given: Any = PartitionSpec(AXIS),
) -> Any:
    """function(*args) on each device, with its rows of every array; `into` says of each result whether rows or the same."""

    def body(*args: Any) -> Any:
        with using(None):
            return function(*args)

    return jax.shard_map(
        body,
        mesh=layout.mesh,
        in_specs=given,
        out_specs=into,
        axis_names={AXIS},
        check_vma=False,
    )(*args)


def _divided(*trees: PyTree) -> Layout | None:
    """The layout of what is being traced, if these arrays have a row for each particle."""
    layout = _active.get()
    if layout and all(leaf.shape[:1] == (layout.num,) for leaf in jax.tree.leaves(trees)):
        return layout
    return None


def _whole(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, AXIS, axis=0, tiled=True), tree)


def _own(tree: PyTree, parts: int) -> PyTree:
    def mine(leaf: Array) -> Array:
        size = leaf.shape[0] // parts
        return lax.dynamic_slice_in_dim(leaf, lax.axis_index(AXIS) * size, size)

    return jax.tree.map(mine, tree)


def by_rows(
    function: Callable[..., Any], *own: PyTree, whole: PyTree = None, sums: bool = False
) -> Any:
    """function(*own), whose results have a row for each row of `own`.

    With `whole`, it gets these arrays, complete, as a last argument. With `sums`, it returns rows and something to be added up
    over all of them.

    >>> by_rows(lambda x: 2 * x, jnp.ones(3)).tolist()
    [2.0, 2.0, 2.0]
    """
    layout = _divided(own, whole)
    if layout is None:
        return function(*own) if whole is None else function(*own, whole)

    def part(own: Any, others: Any) -> Any:
        found = function(*own) if whole is None else function(*own, _whole(others))
        return (found[0], lax.psum(found[1], AXIS)) if sums else found

    rows = PartitionSpec(AXIS)
    return _on_each(layout, part, (own, whole), (rows, PartitionSpec()) if sums else rows)


def together(function: Callable[..., Any], *trees: PyTree, rows: bool = False) -> Any:
    """function(*trees) of whole arrays, small enough for each device to do it; with `rows`, each keeps its own of the result."""
    layout, divided = _active.get(), _divided(trees)
    if layout is None:
        return function(*trees)

    def part(*trees: Any) -> Any:
        found = function(*(_whole(trees) if divided else trees))
        return _own(found, layout.parts) if rows else found

    into = PartitionSpec(AXIS) if rows else PartitionSpec()
    return _on_each(layout, part, trees, into, PartitionSpec(AXIS) if divided else PartitionSpec())


def picked(tree: PyTree, rows: Int[np.ndarray, " S"]) -> PyTree:
    """Some rows of every array, the same on every device.

    >>> picked(jnp.arange(5.0), np.array([1, 4])).tolist()
    [1.0, 4.0]
    """
    layout = _divided(tree)
    if layout is None:
        return jax.tree.map(lambda leaf: leaf[rows], tree)

    def part(tree: Any) -> Any:
        size = layout.num // layout.parts
        place = np.asarray(rows, np.int32) - lax.axis_index(AXIS) * size
        here = (place >= 0) & (place < size)

        def mine(leaf: Array) -> Array:
            flags = here.reshape(-1, *(1,) * (leaf.ndim - 1))
            return jnp.where(flags, leaf[jnp.clip(place, 0, size - 1)], 0)

        return lax.psum(jax.tree.map(mine, tree), AXIS)

    return _on_each(layout, part, (tree,), PartitionSpec())


def over_columns(
    part: Callable[[Any, Any, Any], Any],
    own: PyTree,
    others: PyTree,
    mean: Callable[[Any], Any],
    *,
    log: bool = False,
) -> Any:
    """part(mean(others), own, others), where the parts of some and of the rest of `others` add up to the part of all.

    With `log`, their exponentials do.

    >>> part = lambda mean, x, y: x + jnp.sum(y - mean)
    >>> over_columns(part, jnp.ones(2), jnp.arange(3.0), jnp.mean).tolist()
    [1.0, 1.0]
    """
    layout = _divided(own, others)
    if layout is None:
        return part(mean(others), own, others)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(others))
    combine, start = (jnp.logaddexp, -jnp.inf) if log else (jnp.add, 0)
    around = [(i, (i + 1) % layout.parts) for i in range(layout.parts)]

    def gathered(own: Any, others: Any) -> Any:
        whole = _whole(others)
        return part(mean(whole), own, whole)

    def ring(own: Any, here: Any) -> Any:
        add = functools.partial(part, lax.pmean(mean(here), AXIS), own)

        def turn(_: Any, carry: Any) -> Any:
            found, here = carry
            # Sent before the sums are taken, which do not wait for it.
            coming = jax.tree.map(lambda leaf: lax.ppermute(leaf, AXIS, around), here)
            return jax.tree.map(combine, found, add(here)), coming

        blank = lambda leaf: jnp.full(leaf.shape, start, leaf.dtype)
        found = jax.tree.map(blank, jax.eval_shape(add, here))
        found, here = lax.fori_loop(0, layout.parts - 1, turn, (found, here))
        return jax.tree.map(combine, found, add(here))

    function = gathered if size <= GATHER_BYTES else ring
    return _on_each(layout, function, (own, others), PartitionSpec(AXIS))


def by_coordinates(
    function: Callable[..., Any],
    clouds: Any,
    vectors: Any = (),
    result: str = "cloud",
    same: Any = (),
) -> Any:
    """function(add, *clouds, *vectors, *same), with all particles in some coordinates on each device; add sums over coordinates.

    `clouds` are lists of matrices with a row for each particle, `vectors` are brought together, `same` are whole everywhere
    already. The result is such a list ("cloud"), has a row for each particle ("rows") or is the same everywhere ("same").
    """
    layout = _divided(clouds, vectors)
    if layout is None:
        return function(lambda found: found, *clouds, *vectors, *same)
    parts = layout.parts
    widths = [leaf.shape[1] for leaf in clouds[0]]

    def turned(leaf: Array) -> Array:
        padding = (0, -leaf.shape[1] % parts)
        leaf = jnp.pad(leaf, ((0, 0), padding))
        return lax.all_to_all(leaf, AXIS, split_axis=1, concat_axis=0, tiled=True)

    def back(leaf: Array, width: int) -> Array:
        return lax.all_to_all(leaf, AXIS, split_axis=0, concat_axis=1, tiled=True)[:, :width]

    def part(clouds: Any, vectors: Any, same: Any) -> Any:
        add = lambda found: lax.psum(found, AXIS)
        found = function(add, *jax.tree.map(turned, clouds), *_whole(vectors), *same)
        if result == "cloud":
            return [back(leaf, width) for leaf, width in zip(found, widths, strict=True)]
        return _own(found, parts) if result == "rows" else found

    into = PartitionSpec() if result == "same" else PartitionSpec(AXIS)
    given = (PartitionSpec(AXIS), PartitionSpec(AXIS), PartitionSpec())
    return _on_each(layout, part, (clouds, vectors, same), into, given)


def factored(matrix: Float[Array, "M D"]) -> tuple[tuple[Array, Array], Array, Array]:
    """The mean m in two parts, rounded and the rest, and Q and R of the matrix less its mean; large ones from the R of each part (signs of rows may then differ).

    >>> (mean, rest), q, r = factored(jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]))
    >>> bool(jnp.allclose(q @ r + mean, jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]), atol=1e-6))
    True
    """

    def plain(matrix: Array) -> tuple[Any, Array, Array]:
        mean, centred = _centred(matrix, lambda mean: mean)
        q, r = jnp.linalg.qr(centred)
        return mean, q, r

    layout = _divided(matrix)
    if layout is None:
        return plain(matrix)

    def gathered(rows: Array) -> tuple[Any, Array, Array]:
        mean, q, r = plain(_whole(rows))
        return mean, _own(q, layout.parts), r

    def in_parts(rows: Array) -> tuple[Any, Array, Array]:
        mean, centred = _centred(rows, lambda mean: lax.pmean(mean, AXIS))
        q, r = jnp.linalg.qr(centred)
        top, r_all = jnp.linalg.qr(_whole(r))
        own = jnp.matmul(q, _own(top, layout.parts), precision=lax.Precision.HIGHEST)
        return mean, own, r_all

    function = gathered if matrix.size * matrix.dtype.itemsize <= FACTOR_BYTES else in_parts
    into = (PartitionSpec(), PartitionSpec(AXIS), PartitionSpec())
    return _on_each(layout, function, (matrix,), into)


def _centred(rows: Array, every: Callable[[Array], Array]) -> tuple[tuple[Array, Array], Array]:
    """The mean, with what is left of it since far from the origin it is rounded; and the rows less both."""
    mean = every(jnp.mean(rows, 0, keepdims=True))
    rest = every(jnp.mean(rows - mean, 0, keepdims=True))
    return (mean, rest), rows - mean - rest
