"""Radial kernels K_ij = k(r2_ij / h).

A kernel is one method, `profile(a)` with a = r2 / h; its slope comes from automatic differentiation. The rules for h are in `bandwidths`.
"""

import abc
from collections.abc import Callable
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from particlax.bandwidths import (
    Bandwidth,
    Fixed,
    HeatEquation,
    Median,
    ReferenceMedian,
    as_bandwidth,
)
from particlax.checks import Part, number, positive
from particlax.errors import OptionError, ParticleError, expect
from particlax.particles import all_equal, by_prefix, leaf_names, num_particles

__all__ = [
    "IMQ",
    "RBF",
    "Bandwidth",
    "Fixed",
    "HeatEquation",
    "Kernel",
    "Laplace",
    "LayerWise",
    "Median",
    "Mixture",
    "ReferenceMedian",
]


def check_distinct(x: PyTree) -> None:
    """Refuse several particles that sit at one point: equal forces keep them together for ever."""
    if all_equal(x):
        raise ParticleError(
            f"all {num_particles(x)} particles are equal, so no interaction can separate them; expected "
            "distinct particles. Start from a spread cloud, for instance px.particles.normal(key, M, "
            "like=point)"
        )


class Kernel(Part):
    """A radial kernel k(r2 / h). Subclasses write `profile`; `bandwidth` is a rule or a number."""

    bandwidth: eqx.AbstractVar[Bandwidth]

    @abc.abstractmethod
    def profile(self, a: Float[Array, "..."]) -> Float[Array, "..."]:
        """k(a) for a >= 0, smooth, with k(0) = 1."""

    def check(self, x: PyTree) -> None:
        """Refuse clouds that a force with this kernel cannot move apart."""
        self.bandwidth.check(x)
        check_distinct(x)

    def apart(self, force: Callable[..., PyTree], *clouds: PyTree) -> PyTree:
        """force(kernel, *clouds): of the whole cloud, or by `LayerWise` of each group of leaves."""
        return force(self, *clouds)

    def pair(self, r2: Array, h: Array) -> tuple[Array, Array]:
        """K = k(r2 / h) and W = -(2 / h) k'(r2 / h), so that grad_{x_j} K_ij = W_ij (x_i - x_j)."""
        a = r2 / h
        value, slope = jax.jvp(self.profile, (a,), (jnp.ones_like(a),))
        return value, (-2 / h) * slope

    def ratio(self, h: Array) -> Array | None:
        """W / K where it is one number for all pairs, which saves a sum over them; else None."""
        return None


def whole_cloud(kernel: Any) -> TypeGuard[Kernel]:
    """Whether a force with this kernel is that of the whole cloud as it is: `apart` may cut it up or stretch it."""
    return type(kernel).apart is Kernel.apart


class RBF(Kernel):
    """k(a) = exp(-a): the paper's kernel.

    >>> float(RBF().profile(jnp.array(0.0)))
    1.0
    """

    bandwidth: Bandwidth = eqx.field(converter=as_bandwidth, default=Median())

    def profile(self, a: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.exp(-a)

    def ratio(self, h: Array) -> Array | None:
        own = type(self).profile is RBF.profile and type(self).pair is Kernel.pair
        return 2 / h if own else None


class IMQ(Kernel):
    """k(a) = (1 + a)^(-power): heavy tails keep distant particles in touch.

    >>> float(IMQ(power=1.0).profile(jnp.array(1.0)))
    0.5
    """

    bandwidth: Bandwidth = eqx.field(converter=as_bandwidth, default=Median())
    power: float = eqx.field(converter=number, default=0.5)

    def __check_init__(self) -> None:
        positive("power", self.power, zero=False, schedule=False)

    def profile(self, a: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.exp(-self.power * jnp.log1p(a))


class Laplace(Kernel):
    """k(a) = exp(1 - sqrt(1 + a)): exponential tails like Laplace's kernel, smooth at zero.

    >>> float(Laplace().profile(jnp.array(0.0)))
    1.0
    """

    bandwidth: Bandwidth = eqx.field(converter=as_bandwidth, default=Median())

    def profile(self, a: Float[Array, "..."]) -> Float[Array, "..."]:
        return jnp.exp(1 - jnp.sqrt(1 + a))


class Mixture(Kernel):
    """k(a) = mean over `scales` c of base.profile(a / c): several bandwidths at once, by default multiples of the base's.

    >>> float(Mixture(scales=(0.1, 1.0, 10.0)).profile(jnp.array(0.0)))
    1.0
    """

    bandwidth: Bandwidth
    scales: tuple[float, ...]
    base: Kernel

    def __init__(self, bandwidth: Any = None, scales: Any = (0.1, 1.0, 10.0), base: Any = RBF()):
        self.base = expect("base", base, Kernel, "px.kernels.RBF()")
        self.bandwidth = self.base.bandwidth if bandwidth is None else as_bandwidth(bandwidth)
        self.scales = scales

    def __check_init__(self) -> None:
        if not self.scales:
            raise OptionError("Mixture got no scales; expected at least one positive number")
        for scale in self.scales:
            positive("scale", scale, zero=False)

    def profile(self, a: Float[Array, "..."]) -> Float[Array, "..."]:
        profiles = [self.base.profile(a / scale) for scale in self.scales]
        return sum(profiles[1:], profiles[0]) / len(profiles)

    def pair(self, r2: Array, h: Array) -> tuple[Array, Array]:
        if type(self.base).pair is Kernel.pair:
            return super().pair(r2, h)
        values, slopes = zip(*[self.base.pair(r2, h * scale) for scale in self.scales], strict=True)
        mean: Any = lambda parts: sum(parts[1:], parts[0]) / len(parts)
        return mean(values), mean(slopes)


class LayerWise(Part):
    """A kernel for each leaf, or for each of `groups`, in place of one for all coordinates: for networks.

    Every group sees its own distances and bandwidth, so that layers of very different sizes all repel. A group is a leaf's or
    layer's name, or a tuple of them; "" stands for all that is left.

    >>> kernel = LayerWise(groups=("conv", ("dense", "out"))); plain = LayerWise(RBF(bandwidth=2.0))
    """

    kernel: Kernel = RBF()
    groups: tuple[tuple[str, ...], ...] | None = None

    def __init__(self, kernel: Any = RBF(), groups: Any = None):
        self.kernel = expect("kernel", kernel, Kernel, "px.kernels.RBF()")
        if isinstance(groups, str):
            raise OptionError(f"groups is {groups!r}; expected a tuple of names: ({groups!r},)")
        self.groups = None if groups is None else tuple(map(_group, groups))
        named = [name for group in self.groups or () for name in group]
        if twice := [name for name in named if named.count(name) > 1]:
            raise OptionError(f"groups name {twice[0]!r} twice; expected every name in one group")

    def check(self, x: PyTree) -> None:
        """Refuse clouds that a force with this kernel cannot move apart."""
        leaves = jax.tree.leaves(x)
        for places in self.places(x):
            self.kernel.bandwidth.check([leaves[i] for i in places])
        check_distinct(x)

    def places(self, x: PyTree) -> list[list[int]]:
        """The leaves of each group, by number."""
        names = leaf_names(x)
        if self.groups is None:
            return [[i] for i in range(len(names))]
        owner = {name: number for number, group in enumerate(self.groups) for name in group}
        found = by_prefix(names, list(owner), "LayerWise")
        for name, prefix in zip(names, found, strict=True):
            if prefix is None:
                raise OptionError(
                    f"LayerWise has no group for {name!r}; its groups are {self.groups}. Add it to one, or '' for all "
                    "that is left"
                )
        groups: dict[int, list[int]] = {}
        for place, prefix in enumerate(found):
            groups.setdefault(owner[str(prefix)], []).append(place)
        return list(groups.values())

    def apart(self, force: Callable[..., PyTree], *clouds: PyTree) -> PyTree:
        """force(kernel, *clouds) of each group of leaves, put together."""
        trees, structure = (
            [jax.tree.leaves(cloud) for cloud in clouds],
            jax.tree.structure(clouds[0]),
        )
        moved: list[Any] = list(trees[0])
        for places in self.places(clouds[0]):
            if not sum(trees[0][i].size for i in places):
                continue  # leaves without numbers have no distances
            parts = force(self.kernel, *[[leaves[i] for i in places] for leaves in trees])
            for i, part in zip(places, parts, strict=True):
                moved[i] = part
        return jax.tree.unflatten(structure, moved)


def _group(group: Any) -> tuple[str, ...]:
    names = (group,) if isinstance(group, str) else group
    fits = isinstance(names, tuple | list) and names and all(isinstance(n, str) for n in names)
    if not fits:
        raise OptionError(f"a group is {group!r}; expected a name, or a tuple of names")
    return tuple(names)
