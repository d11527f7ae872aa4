"""Many devices: who holds which particles, and the four ways in which they exchange them.

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
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from particlax.errors import DataError, OptionError, ParticleError

__all__ = [
    "Layout",
    "by_coordinates",
    "by_rows",
    "factored",
    "layout_of",
    "on_host",
    "over_columns",
    "put",
    "replicated",
    "spread",
    "together",
    "using",
]

AXIS, DATA = "particles", "data"
GATHER_BYTES = 1 << 26
"""What all particles may take up on one device, in bytes; clouds above go around the ring."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, and where each leaf of a flow's state lies on it."""

    mesh: Mesh
    specs: tuple[PartitionSpec, ...]

    @property
    def parts(self) -> int:
        """The number P of devices among which the particles are divided."""
        return self.mesh.shape[AXIS]


_active: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("layout", default=None)


@contextlib.contextmanager
def using(layout: Layout | None) -> Iterator[None]:
    """What is traced inside is for these devices."""
    token = _active.set(layout)
    try:
        yield
    finally:
        _active.reset(token)


# Placement


def layout_of(mesh: Any, state: PyTree, num: int) -> Layout:
    """Where the leaves of `state` go: those with `num` rows are divided, unless they say more themselves; the others are copied."""
    mesh = _checked(mesh, num)
    return Layout(mesh, tuple(_spec(leaf, mesh, num) for leaf in jax.tree.leaves(state)))


def _checked(mesh: Any, num: int) -> Mesh:
    if not isinstance(mesh, Mesh):
        raise OptionError(
            f"mesh is {mesh!r}; expected a jax.sharding.Mesh with an axis 'particles', such as jax.make_mesh((8,), ('particles',))"
        )
    if AXIS not in mesh.axis_names:
        raise OptionError(
            f"the mesh has the axes {mesh.axis_names}; expected one called 'particles', and perhaps one called 'data', such as "
            "jax.make_mesh((4, 2), ('particles', 'data'))"
        )
    parts = mesh.shape[AXIS]
    if num % parts:
        near = sorted({max(num - num % parts, parts), num + parts - num % parts})
        fewer = max(n for n in range(1, parts + 1) if num % n == 0)
        raise ParticleError(
            f"{num} particles came for {parts} devices along the mesh axis 'particles'; expected a multiple of {parts}. Take "
            f"{' or '.join(map(str, near))} particles, or a mesh with {fewer} along that axis"
        )
    # By rule, the compiler places what is not said here, whichever kind of axes came.
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def _spec(leaf: Any, mesh: Mesh, num: int) -> PartitionSpec:
    if np.shape(leaf)[:1] != (num,):
        return PartitionSpec()
    here = getattr(leaf, "sharding", None)
    own: tuple[Any, ...] = ()
    if isinstance(here, NamedSharding) and here.mesh.shape_tuple == mesh.shape_tuple:
        own = tuple(None if part == AXIS else part for part in here.spec[1:])
    return PartitionSpec(AXIS, *own)


def put(layout: Layout | None, state: PyTree) -> PyTree:
    """The state, placed; inside a compiled program, told where to be."""
    if layout is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    places = [NamedSharding(layout.mesh, spec) for spec in layout.specs]
    move = lax.with_sharding_constraint if _traced(leaves) else _device_put
    moved = [move(leaf, place) for leaf, place in zip(leaves, places, strict=True)]
    return jax.tree.unflatten(structure, moved)


def replicated(layout: Layout | None, tree: PyTree) -> PyTree:
    """Every array whole on every device."""
    if layout is None:
        return tree
    place = NamedSharding(layout.mesh, PartitionSpec())
    is_array = lambda leaf: isinstance(leaf, (jax.Array, np.ndarray))
    return jax.tree.map(lambda leaf: _device_put(leaf, place) if is_array(leaf) else leaf, tree)


def _traced(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)


def _device_put(leaf: Any, place: NamedSharding) -> Array:
    if place.is_fully_addressable or not getattr(leaf, "is_fully_addressable", True):
        return jax.device_put(leaf, place)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = np.asarray(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(jax.device_put(data, place), impl=jax.random.key_impl(leaf))
    return jax.device_put(np.asarray(leaf), place)  # every host has the same values


def on_host(array: Array) -> np.ndarray:
    """The values of an array, wherever its parts are."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def spread(batch: PyTree) -> PyTree:
    """A batch divided along the axis `data`, where the mesh has one."""
    layout = _active.get()
    if layout is None or layout.mesh.shape.get(DATA, 1) == 1:
        return batch
    parts, place = layout.mesh.shape[DATA], NamedSharding(layout.mesh, PartitionSpec(DATA))
    for leaf in jax.tree.leaves(batch):
        if leaf.shape[0] % parts:
            raise DataError(
                f"a batch of {leaf.shape[0]} came for {parts} devices along the mesh axis 'data'; expected a multiple of {parts}. "
                "Take another batch size, or a mesh without that axis"
            )
    return jax.tree.map(lambda leaf: lax.with_sharding_constraint(leaf, place), batch)


# Exchange


def _on_each(layout: Layout, function: Callable[..., Any], args: Any, into: Any) -> Any:
    """function(*args) on each device, with its rows of every array; `into` says of each result whether rows or the same."""

    def body(*args: Any) -> Any:
        with using(None):
            return function(*args)

    return jax.shard_map(
        body,
        mesh=layout.mesh,
        in_specs=PartitionSpec(AXIS),
        out_specs=into,
        axis_names={AXIS},
        check_vma=False,
    )(*args)


def _divides(layout: Layout | None, *trees: PyTree) -> bool:
    leaves = jax.tree.leaves(trees)
    return layout is not None and all(leaf.shape[0] % layout.parts == 0 for leaf in leaves)


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
    layout = _active.get()
    if layout is None or not _divides(layout, own, whole):
        return function(*own) if whole is None else function(*own, whole)

    def part(own: Any, others: Any) -> Any:
        found = function(*own) if whole is None else function(*own, _whole(others))
        return (found[0], lax.psum(found[1], AXIS)) if sums else found

    rows = PartitionSpec(AXIS)
    return _on_each(layout, part, (own, whole), (rows, PartitionSpec()) if sums else rows)


def together(function: Callable[..., Any], *trees: PyTree, rows: bool = False) -> Any:
    """function(*trees) of whole arrays, small enough for each device to do it; with `rows`, each keeps its own of the result."""
    layout = _active.get()
    if layout is None or not _divides(layout, trees):
        return function(*trees)

    def part(*trees: Any) -> Any:
        found = function(*_whole(trees))
        return _own(found, layout.parts) if rows else found

    return _on_each(layout, part, trees, PartitionSpec(AXIS) if rows else PartitionSpec())


def over_columns(
    part: Callable[[Any, Any], Any],
    own: PyTree,
    others: PyTree,
    combine: Callable[[Array, Array], Array] = jnp.add,
    start: float = 0.0,
) -> Any:
    """part(own, others), where part of some of `others` and part of the rest `combine` to the part of all.

    >>> over_columns(lambda x, y: x + y.sum(), jnp.zeros(2), jnp.ones(3)).tolist()
    [3.0, 3.0]
    """
    layout = _active.get()
    if layout is None or not _divides(layout, own, others):
        return part(own, others)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(others))
    around = [(i, (i + 1) % layout.parts) for i in range(layout.parts)]

    def gathered(own: Any, others: Any) -> Any:
        return part(own, _whole(others))

    def ring(own: Any, here: Any) -> Any:
        def turn(_: Any, carry: Any) -> Any:
            found, here = carry
            # Sent before the sums are taken, which do not wait for it.
            coming = jax.tree.map(lambda leaf: lax.ppermute(leaf, AXIS, around), here)
            return jax.tree.map(combine, found, part(own, here)), coming

        shapes = jax.eval_shape(part, own, here)
        found = jax.tree.map(lambda leaf: jnp.full(leaf.shape, start, leaf.dtype), shapes)
        found, here = lax.fori_loop(0, layout.parts - 1, turn, (found, here))
        return jax.tree.map(combine, found, part(own, here))

    function = gathered if size <= GATHER_BYTES else ring
    return _on_each(layout, function, (own, others), PartitionSpec(AXIS))


def by_coordinates(
    function: Callable[..., Any], clouds: Any, vectors: Any = (), result: str = "cloud"
) -> Any:
    """function(add, *clouds, *vectors), with all particles in some coordinates on each device; add sums over coordinates.

    `clouds` are lists of matrices with a row for each particle, `vectors` are whole everywhere. The result is such a list
    ("cloud"), has a row for each particle ("rows") or is the same everywhere ("same").
    """
    layout = _active.get()
    if layout is None or not _divides(layout, clouds, vectors):
        return function(lambda found: found, *clouds, *vectors)
    parts = layout.parts
    widths = [leaf.shape[1] for leaf in clouds[0]]

    def turned(leaf: Array) -> Array:
        padding = (0, -leaf.shape[1] % parts)
        leaf = jnp.pad(leaf, ((0, 0), padding))
        return lax.all_to_all(leaf, AXIS, split_axis=1, concat_axis=0, tiled=True)

    def back(leaf: Array, width: int) -> Array:
        return lax.all_to_all(leaf, AXIS, split_axis=0, concat_axis=1, tiled=True)[:, :width]

    def part(clouds: Any, vectors: Any) -> Any:
        add = lambda found: lax.psum(found, AXIS)
        found = function(add, *jax.tree.map(turned, clouds), *_whole(vectors))
        if result == "cloud":
            return [back(leaf, width) for leaf, width in zip(found, widths, strict=True)]
        return _own(found, parts) if result == "rows" else found

    into = PartitionSpec() if result == "same" else PartitionSpec(AXIS)
    return _on_each(layout, part, (clouds, vectors), into)


def factored(matrix: Float[Array, "M D"]) -> tuple[Float[Array, "M D"], Float[Array, "D D"]]:
    """Q and R of a tall matrix; on several devices from the R of each part (signs of R's rows may differ)."""
    layout = _active.get()
    if layout is None or not _divides(layout, matrix):
        found = jnp.linalg.qr(matrix)
        return found[0], found[1]

    def part(rows: Array) -> Any:
        q, r = jnp.linalg.qr(rows)
        top, r_all = jnp.linalg.qr(_whole(r))
        return jnp.matmul(q, _own(top, layout.parts), precision=lax.Precision.HIGHEST), r_all

    into = (PartitionSpec(AXIS), PartitionSpec())
    return _on_each(layout, part, (matrix,), into)
