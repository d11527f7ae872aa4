"""Radial kernels K_ij = k(r2_ij / h) and the rules that choose the bandwidth h.

A kernel is one method, `profile(a)` with a = r2 / h; its slope comes from automatic differentiation.
"""

import abc
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from particlax import medians, pairwise, sharding
from particlax.blocks import wide_type
from particlax.checks import Part, number, positive, whole
from particlax.errors import OptionError, ParticleError, expect
from particlax.particles import by_prefix, check_distinct, flatten, leaf_names, num_particles

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

SUBSAMPLE = 512
"""Above this many particles the rules look at a fixed random subsample of this size."""


class Bandwidth(Part):
    """Rule for the bandwidth h of a cloud, in units of squared distance."""

    @abc.abstractmethod
    def choose(self, x: PyTree) -> Float[Array, ""]:
        """h for the cloud `x`; may be zero for a collapsed cloud, the caller floors it."""

    def check(self, x: PyTree) -> None:
        """Refuse clouds from which the rule cannot give a positive h."""
        num = num_particles(x)
        if num < 2:
            raise ParticleError(
                f"{type(self).__name__} bandwidth needs distances between particles but there is "
                f"{num} particle; give more particles or a fixed bandwidth, such as RBF(bandwidth=1.0)"
            )

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        """h, floored where distances are mere rounding: at (64 machine epsilons times |x|)^2.

        A cloud that collapses during a run therefore keeps a finite force instead of a NaN.
        """
        h = jnp.asarray(self.choose(x))
        eps, tiny = float(jnp.finfo(h.dtype).eps), 1e-30
        return jnp.maximum(h, (64 * eps) ** 2 * pairwise.typical_square(x).astype(h.dtype) + tiny)


class Fixed(Bandwidth):
    """h given once and for all.

    >>> float(Fixed(0.5)(jnp.zeros((3, 2))))
    0.5
    """

    h: float = eqx.field(converter=number)

    def __check_init__(self) -> None:
        positive("bandwidth", self.h, zero=False, schedule=False)

    def choose(self, x: PyTree) -> Float[Array, ""]:
        dtype = wide_type(*jax.tree.leaves(x))
        return jnp.asarray(self.h, dtype)

    def __call__(self, x: PyTree) -> Float[Array, ""]:
        return self.choose(x)

    def check(self, x: PyTree) -> None:
        """A fixed bandwidth suits every cloud."""


def _subsample(x: PyTree, size: int | None) -> PyTree:
    num = num_particles(x)
    if size is None or num <= size:
        return x
    rows = np.sort(np.random.default_rng(0).permutation(num)[:size])
    return sharding.picked(x, rows)


def _check_subsample(size: int | None) -> None:
    if size is not None:
        whole("subsample", size, 2)


class Median(Bandwidth):
    """The paper's rule: h = scale * med^2 / log M, med the median distance over distinct pairs.

    Exact up to `subsample` particles; above, the median is taken over a fixed random subsample of that size
    (M stays the full number). `subsample=None` is exact for every M.

    >>> x = jnp.array([[0.0], [1.0], [3.0]])
    >>> bool(jnp.allclose(Median()(x), 4.0 / jnp.log(3.0)))
    True
    """

    scale: float = eqx.field(converter=number, default=1.0)
    subsample: int | None = SUBSAMPLE

    def __check_init__(self) -> None:
        positive("scale", self.scale, zero=False, schedule=False)
        _check_subsample(self.subsample)

    def choose(self, x: PyTree) -> Float[Array, ""]:
        med2 = medians.median_sqdist(_subsample(x, self.subsample))
        return self.scale * med2 / math.log(num_particles(x))


class ReferenceMedian(Bandwidth):
    """The rule of Liu and Wang's SVGD code: h = scale * med(r2) / log(M + 1), zero diagonal included.

    Their code writes it h'^2 = 0.5 med(r2) / log(M + 1) for the kernel exp(-r2 / (2 h'^2)).

    >>> x = jnp.array([[0.0], [1.0], [3.0]])
    >>> bool(jnp.allclose(ReferenceMedian()(x), 1.0 / jnp.log(4.0)))
    True
    """

    scale: float = eqx.field(converter=number, default=1.0)
    subsample: int | None = SUBSAMPLE

    def __check_init__(self) -> None:
        positive("scale", self.scale, zero=False, schedule=False)
        _check_subsample(self.subsample)

    def choose(self, x: PyTree) -> Float[Array, ""]:
        sample = _subsample(x, self.subsample)
        med = medians.median_sqdist(sample, itself=True, of_squares=True)
        return self.scale * med / math.log(num_particles(x) + 1)


class HeatEquation(Bandwidth):
    """The smoothed density should evolve by the heat equation (Liu et al., ICML 2019).

    With q(x) = sum_j exp(-|x - x_j|^2 / h), particles that move along -grad log q spread like heat
    exactly when lambda(x) = Lap q(x) + sum_j grad_{x_j} q(x) . grad log q(x_j) vanishes. h minimises the L2
    norm of this residual, made dimensionless and estimated at the particles: h^2 sum_k lambda(x_k)^2 / q(x_k).
    (The paper leaves out the division by q; its objective then also falls for h -> 0, where particles no
    longer see each other.) Tried are `candidates` multiples of med^2 / log M, evenly spaced in log between
    1 / `spread` and `spread`, on at most `subsample` particles.

    >>> x = jax.random.normal(jax.random.key(0), (100, 2))
    >>> bool(0.05 < HeatEquation()(x) < 5.0)
    True
    """

    candidates: int = 13
    spread: float = 64.0
    subsample: int | None = SUBSAMPLE

    def __check_init__(self) -> None:
        positive("spread", self.spread, zero=False)
        _check_subsample(self.subsample)
        if self.candidates < 2 or self.spread <= 1:
            raise OptionError(
                f"HeatEquation got candidates={self.candidates}, spread={self.spread}; expected at "
                "least 2 candidates and a spread above 1"
            )

    def choose(self, x: PyTree) -> Float[Array, ""]:
        return sharding.together(self._best, _subsample(x, self.subsample))

    def _best(self, sample: PyTree) -> Float[Array, ""]:
        middle = Median(subsample=None)(sample)
        factors = np.geomspace(1 / self.spread, self.spread, self.candidates)
        widths = middle * jnp.asarray(factors, middle.dtype)
        points = flatten(sample)[0].astype(middle.dtype)
        points, r2 = points - jnp.mean(points, 0, keepdims=True), pairwise.sqdist(sample, sample)
        costs = jax.lax.map(lambda h: self.cost(points, r2, h), widths)
        return widths[jnp.argmin(costs)]

    def cost(
        self, x: Float[Array, "M D"], r2: Float[Array, "M M"], h: Float[Array, ""]
    ) -> Float[Array, ""]:
        """h^2 sum_k lambda(x_k)^2 / q(x_k), for a cloud and its squared distances."""
        kernel = jnp.exp(-r2 / h)
        q = jnp.sum(kernel, 1)
        # With K = kernel and c = 2 / h: grad log q(x_j) = g_j = c (sum_k K_jk x_k / q_j - x_j),
        # grad_{x_j} q(x_i) = c K_ij (x_i - x_j), Lap q(x_i) = sum_j (c^2 r2_ij - c D) K_ij.
        g = (2 / h) * (pairwise.matmul(kernel, x) / q[:, None] - x)
        moved = jnp.sum(x * pairwise.matmul(kernel, g), 1) - pairwise.matmul(
            kernel, jnp.sum(x * g, 1)
        )
        laplacian = (2 / h) ** 2 * jnp.sum(kernel * r2, 1) - (2 / h) * x.shape[1] * q
        return h**2 * jnp.sum((laplacian + (2 / h) * moved) ** 2 / q)


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


def as_bandwidth(bandwidth: Any) -> Bandwidth:
    """A bandwidth rule from a rule or a positive number, which may be traced."""
    if isinstance(bandwidth, Bandwidth):
        return bandwidth
    bandwidth = number(bandwidth)
    traced = isinstance(bandwidth, Tracer) and bandwidth.shape == ()
    if traced or (isinstance(bandwidth, (int, float)) and not isinstance(bandwidth, bool)):
        return Fixed(bandwidth if traced else float(bandwidth))
    raise OptionError(
        f"bandwidth is {bandwidth!r}; expected a positive number or a rule such as px.kernels.Median()"
    )


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
        pairs = [self.base.pair(r2, h * scale) for scale in self.scales]
        return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]) / len(parts), *pairs)


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
        structure = jax.tree.structure(clouds[0])
        trees = [jax.tree.leaves(cloud) for cloud in clouds]
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
