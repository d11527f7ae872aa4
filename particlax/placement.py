"""Who holds what: particles divided along the mesh axis `particles`, everything else copied; and what several processes need."""

import dataclasses
import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from particlax.errors import OptionError, ParticleError
from particlax.processes import Team, team_of

__all__ = [
    "Layout",
    "beside",
    "here",
    "layout_of",
    "loosened",
    "on_host",
    "placed",
    "put",
    "refuse_different",
    "replicated",
    "rows",
]

AXIS = "particles"
"""The mesh axis along which particles are divided."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh, the number of particles, and where each leaf of a flow's state lies."""

    mesh: Mesh
    num: int
    specs: tuple[PartitionSpec, ...]

    @property
    def parts(self) -> int:
        """The number P of devices among which the particles are divided."""
        return self.mesh.shape[AXIS]

    @property
    def team(self) -> Team:
        """The processes that have these devices."""
        return team_of(self.mesh)


def layout_of(mesh: Any, state: PyTree, num: int) -> Layout:
    """Where the leaves of `state` go: those with `num` rows are divided, unless they say more themselves; the others are copied."""
    mesh = _checked(mesh, num)
    team_of(mesh)  # refuses some of the processes
    return Layout(mesh, num, tuple(_spec(leaf, mesh, num) for leaf in jax.tree.leaves(state)))


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
    return _automatic(mesh)


def _automatic(mesh: Mesh) -> Mesh:
    """The mesh on which the compiler places what is not said, whichever kind of axes came."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def loosened(tree: PyTree) -> PyTree:
    """Arrays where they are, but without the strictness of meshes with explicit axes."""

    def loose(leaf: Any) -> Any:
        here = getattr(leaf, "sharding", None)
        if not isinstance(here, NamedSharding) or not isinstance(here.mesh, Mesh):
            return leaf
        return jax.device_put(leaf, NamedSharding(_automatic(here.mesh), here.spec))

    return jax.tree.map(loose, tree)


def _spec(leaf: Any, mesh: Mesh, num: int) -> PartitionSpec:
    if np.shape(leaf)[:1] != (num,):
        return PartitionSpec()
    here = getattr(leaf, "sharding", None)
    own: tuple[Any, ...] = ()
    if isinstance(here, NamedSharding) and here.mesh.shape_tuple == mesh.shape_tuple:
        own = tuple(None if part == AXIS else part for part in here.spec[1:])
    return PartitionSpec(AXIS, *own)


def placed(layout: Layout, shapes: PyTree) -> PyTree:
    """The state by shape and dtype, with where each leaf lies."""
    leaves, structure = jax.tree.flatten(shapes)
    pairs = zip(leaves, _places(layout), strict=True)
    found = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at) for leaf, at in pairs]
    return jax.tree.unflatten(structure, found)


def _places(layout: Layout) -> list[NamedSharding]:
    return [NamedSharding(layout.mesh, spec) for spec in layout.specs]


def put(layout: Layout | None, state: PyTree) -> PyTree:
    """The state, placed; inside a compiled program, told where to be."""
    if layout is None:
        return state
    leaves, structure = jax.tree.flatten(state)
    move = lax.with_sharding_constraint if _traced(leaves) else _device_put
    moved = [move(leaf, place) for leaf, place in zip(leaves, _places(layout), strict=True)]
    return jax.tree.unflatten(structure, moved)


def beside(own: Any, home: Any) -> Any:
    """Where an array lies that must be on the devices of the particles, whose sharding is `home`; its `own`, if they are the same."""
    if own is not None and own.device_set == home.device_set:
        return own
    return NamedSharding(home.mesh, PartitionSpec()) if isinstance(home, NamedSharding) else home


def replicated(layout: Layout | None, tree: PyTree) -> PyTree:
    """Every array whole on every device."""
    if layout is None:
        return tree
    place = NamedSharding(layout.mesh, PartitionSpec())
    is_array = lambda leaf: isinstance(leaf, (jax.Array, np.ndarray))
    return jax.tree.map(lambda leaf: _device_put(leaf, place) if is_array(leaf) else leaf, tree)


def rows(layout: Layout | None, tree: PyTree) -> PyTree:
    """Arrays with a row for each particle, divided as the particles are."""
    if layout is None:
        return tree
    place = NamedSharding(layout.mesh, PartitionSpec(AXIS))
    return jax.tree.map(lambda leaf: _device_put(leaf, place), tree)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _traced(leaves: list[Any]) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in leaves)


def _device_put(leaf: Any, place: NamedSharding) -> Array:
    if place.is_fully_addressable or not getattr(leaf, "is_fully_addressable", True):
        return jax.device_put(leaf, place)
    if _is_key(leaf):
        data = _device_put(jax.random.key_data(leaf), place)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # Every process has the same values and takes its parts. (device_put would first bring all of them to all, to compare.)
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, place, lambda index: whole[index])


def refuse_different(layout: Layout | None, given: dict[str, PyTree]) -> None:
    """Refuse particles, keys or data that are not the same in all processes."""
    if layout is None or not layout.team.several:
        return
    notes = layout.team.each(lambda: {name: _digest(tree) for name, tree in given.items()})
    for name in given:
        other = next((rank for rank, note in enumerate(notes) if note[name] != notes[0][name]), 0)
        if other:
            raise OptionError(
                f"the {name} of process {other} are not those of process 0; expected the same in every process. Make them from "
                "the same key and the same files, whatever jax.process_index() is"
            )


def _digest(tree: PyTree) -> str:
    """A hash of the arrays that this process has as a whole."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        plain = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        if isinstance(plain, np.ndarray) or getattr(plain, "is_fully_addressable", False):
            found.update(f"{plain.dtype}{plain.shape}".encode())
            found.update(np.ascontiguousarray(plain).tobytes())
    return found.hexdigest()[:16]


def on_host(array: Array) -> np.ndarray:
    """The values of an array, wherever its parts are."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def here(array: Array) -> np.ndarray:
    """The values that this process has: all of them, unless there are other processes."""
    if array.is_fully_addressable:
        return np.asarray(array)
    return np.concatenate([np.asarray(part.data) for part in array.addressable_shards])
