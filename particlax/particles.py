"""Particle clouds: pytrees whose every leaf has the same leading axis, the particle axis."""

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Key, PyTree

from particlax.errors import OptionError, ParticleError
from particlax.noise import fold_in

__all__ = [
    "all_equal",
    "as_cloud",
    "by_prefix",
    "check_distinct",
    "check_parts",
    "dimension",
    "flatten",
    "join",
    "leaf_names",
    "normal",
    "num_particles",
    "replicate",
    "uniform",
]


def _name(path: Any) -> str:
    return "the array" if not path else f"leaf {jax.tree_util.keystr(path)}"


def num_particles(particles: PyTree) -> int:
    """The number M of particles, after checking that `particles` is a cloud.

    >>> num_particles({"w": jnp.zeros((5, 3)), "b": jnp.zeros(5)})
    5
    """
    leaves = jax.tree_util.tree_leaves_with_path(particles)
    if hasattr(getattr(particles, "state", None), "particles"):
        raise ParticleError(
            f"the particles are a {type(particles).__name__}; expected a cloud, or a state to go on from: its .state"
        )
    if not leaves:
        raise ParticleError(
            "the particles are an empty pytree; expected at least one array with a leading "
            "particle axis"
        )
    first: tuple[str, int] | None = None
    for path, leaf in leaves:
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ParticleError(
                f"{_name(path)} of the particles has dtype {dtype}; expected a real floating type. "
                "Convert it with .astype(float), or keep what is not sampled out of the particles"
            )
        if not shape:
            raise ParticleError(
                f"{_name(path)} of the particles is a scalar; expected a leading particle axis. "
                "For a cloud around one point use px.particles.normal(key, M, like=point); a nested list "
                "counts as a pytree, so turn it into an array first"
            )
        if first is None:
            first = (_name(path), shape[0])
        elif shape[0] != first[1]:
            raise ParticleError(
                f"{_name(path)} has leading size {shape[0]} (shape {shape}) but {first[0]} has "
                f"{first[1]}; expected the same number of particles on axis 0 of every leaf"
            )
    assert first is not None
    if first[1] == 0:
        raise ParticleError(
            f"{first[0]} has leading size 0: there are no particles; expected at least one"
        )
    return first[1]


def all_equal(particles: PyTree) -> bool:
    """Whether there are several particles, all at one point; False where values are traced."""
    leaves = jax.tree.leaves(particles)
    if num_particles(particles) == 1 or any(isinstance(leaf, Tracer) for leaf in leaves):
        return False
    return all(bool(np.all(np.asarray(leaf) == np.asarray(leaf[:1]))) for leaf in leaves)


def as_cloud(particles: PyTree) -> PyTree[Float[Array, "M ..."]]:
    """The particles as strongly typed JAX arrays, copied, so that the caller's survive donation."""
    num_particles(particles)
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype=jnp.result_type(leaf)), particles)


def dimension(particles: PyTree) -> int:
    """The number D of coordinates of one particle.

    >>> dimension({"w": jnp.zeros((5, 3)), "b": jnp.zeros(5)})
    4
    """
    return sum(int(np.prod(jnp.shape(leaf)[1:])) for leaf in jax.tree.leaves(particles))


def flatten(
    particles: PyTree,
) -> tuple[Float[Array, "M D"], Callable[[Float[Array, "N D"]], PyTree]]:
    """The cloud as an M x D matrix, and the function that gives a matrix the cloud's structure.

    >>> matrix, unflatten = flatten({"w": jnp.zeros((5, 3)), "b": jnp.zeros(5)})
    >>> matrix.shape, unflatten(matrix)["w"].shape
    ((5, 4), (5, 3))
    """
    leaves, structure = jax.tree.flatten(particles)
    tails = [leaf.shape[1:] for leaf in leaves]
    dtypes = [leaf.dtype for leaf in leaves]
    ends = np.cumsum([int(np.prod(tail)) for tail in tails])

    def unflatten(matrix: Array) -> PyTree:
        pieces = jnp.split(matrix, ends[:-1], axis=1)
        shaped = [
            piece.reshape(piece.shape[0], *tail).astype(dtype)
            for piece, tail, dtype in zip(pieces, tails, dtypes, strict=True)
        ]
        return jax.tree.unflatten(structure, shaped)

    blocks = [leaf.reshape(leaf.shape[0], -1) for leaf in leaves]
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=1), unflatten


def leaf_names(params: PyTree) -> list[str]:
    """The name of every leaf: its path, joined by slashes, as priors and kernels by layer refer to it.

    >>> leaf_names({"dense": {"kernel": 0.0, "bias": 0.0}, "out": [0.0]})
    ['dense/bias', 'dense/kernel', 'out/0']
    """
    paths = jax.tree_util.tree_leaves_with_path(params)
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]


def by_prefix(names: Sequence[str], prefixes: Sequence[str], what: str) -> list[str | None]:
    """For each leaf's name the longest of `prefixes` that begins its path ("" fits all), or None.

    A prefix that fits no leaf is refused; `what` says in the error whose it is.

    >>> by_prefix(["dense/bias", "dense/kernel", "out"], ["dense", "dense/bias"], "the prior")
    ['dense/bias', 'dense', None]
    """
    for prefix in prefixes:
        if not isinstance(prefix, str):
            raise OptionError(
                f"{what} names {prefix!r}; expected strings, the beginnings of paths: {str(prefix)!r}. The leaves are {list(names)}"
            )
    fits = lambda name, prefix: prefix in ("", name) or name.startswith(prefix + "/")
    found = [max((p for p in prefixes if fits(name, p)), key=len, default=None) for name in names]
    for prefix in prefixes:
        if prefix and not any(fits(name, prefix) for name in names):
            near = difflib.get_close_matches(prefix, names, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise OptionError(
                f"{what} names {prefix!r}, which no leaf's path begins with{hint}; the leaves are {list(names)}"
            )
    return found


def join(part: PyTree, rest: PyTree) -> PyTree:
    """One pytree of two of the same structure, each with None where the other has a leaf.

    >>> join({"a": 1.0, "b": None}, {"a": None, "b": 2.0})
    {'a': 1.0, 'b': 2.0}
    """
    gap = lambda leaf: leaf is None
    return jax.tree.map(lambda a, b: b if a is None else a, part, rest, is_leaf=gap)


def check_parts(particles: PyTree, shared: PyTree) -> None:
    """Refuse two pytrees that `join` cannot make one of."""
    gap = lambda leaf: leaf is None
    parts = [jax.tree_util.tree_flatten_with_path(tree, gap) for tree in (particles, shared)]
    remedy = "Make both with px.networks.split(particles, names)"
    if parts[0][1] != parts[1][1]:
        raise ParticleError(
            f"the particles have the leaves {leaf_names(particles)} and shared has {leaf_names(shared)}, in other "
            f"structures; expected the same structure, each with None where the other has a leaf. {remedy}"
        )
    for (path, own), (_, other) in zip(parts[0][0], parts[1][0], strict=True):
        if own is not None and other is not None:
            raise ParticleError(
                f"{_name(path)} is both a particle and shared; expected one of them to be None. {remedy}"
            )
        if other is not None and not jnp.issubdtype(jnp.result_type(other), jnp.floating):
            raise ParticleError(
                f"{_name(path)} of shared has dtype {jnp.result_type(other)}; expected a real floating type"
            )


def replicate(point: PyTree, num: int) -> PyTree[Float[Array, "M ..."]]:
    """`num` copies of one point; for chains of a noisy sampler, not for interacting particles.

    >>> replicate(jnp.zeros(3), 5).shape
    (5, 3)
    """

    def copies(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf, dtype=jnp.result_type(leaf, float))
        return jnp.broadcast_to(leaf, (num, *leaf.shape))

    return jax.tree.map(copies, point)


def normal(
    key: Key[Array, ""], num: int, like: PyTree, scale: float = 1.0
) -> PyTree[Float[Array, "M ..."]]:
    """`num` draws of N(like, scale^2 I): a cloud around one point.

    >>> normal(jax.random.key(0), 5, like=jnp.zeros(3)).shape
    (5, 3)
    """
    cloud = replicate(like, num)
    return jax.tree.map(jnp.add, cloud, random_like(key, cloud, jax.random.normal, scale))


def uniform(
    key: Key[Array, ""], num: int, like: PyTree, scale: float = 1.0
) -> PyTree[Float[Array, "M ..."]]:
    """`num` uniform draws from the box of half-width `scale` around one point.

    >>> bool(jnp.abs(uniform(jax.random.key(0), 5, like=jnp.zeros(3), scale=4.0)).max() <= 4.0)
    True
    """

    def draw(key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return jax.random.uniform(key, shape, dtype, minval=-1.0, maxval=1.0)

    cloud = replicate(like, num)
    return jax.tree.map(jnp.add, cloud, random_like(key, cloud, draw, scale))


def random_like(
    key: Key[Array, ""], tree: PyTree, draw: Callable[..., Array], scale: Any = 1.0
) -> PyTree:
    """Independent `draw(key, shape, dtype) * scale` for every leaf, each from its own key."""
    leaves, structure = jax.tree.flatten(tree)
    drawn = [scale * draw(fold_in(key, i), leaf.shape, leaf.dtype) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, drawn)


def check_distinct(x: PyTree) -> None:
    """Refuse several particles that sit at one point: equal forces keep them together for ever."""
    if all_equal(x):
        raise ParticleError(
            f"all {num_particles(x)} particles are equal, so no interaction can separate them; expected "
            "distinct particles. Start from a spread cloud, for instance px.particles.normal(key, M, "
            "like=point)"
        )
