"""Rules for the bandwidth h of a kernel."""

import abc
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, PyTree

from particlax import medians, pairwise, sharding
from particlax.blocks import wide_type
from particlax.checks import Part, number, positive, whole
from particlax.errors import OptionError, ParticleError
from particlax.particles import flatten, num_particles

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


def as_bandwidth(bandwidth: Any) -> Bandwidth:
    """A bandwidth rule from a rule or a positive number, which may be traced."""
    if isinstance(bandwidth, Bandwidth):
        return bandwidth
    bandwidth = number(bandwidth)
    if isinstance(bandwidth, Tracer) and bandwidth.shape == ():
        return Fixed(bandwidth)
    if isinstance(bandwidth, (int, float)) and not isinstance(bandwidth, bool):
        return Fixed(float(bandwidth))
    raise OptionError(
        f"bandwidth is {bandwidth!r}; expected a positive number or a rule such as px.kernels.Median()"
    )
