"""Realisations of the diffusion -weight * grad log mu, mu the law of the particles.

`Langevin` is noise. `Blob`, `GFSD` and `Transport` are deterministic forces between particles; each
of these takes `calibrate=True`, which makes it exact on Gaussians, or `calibrate="matched"`, which also
keeps its shape on skewed targets (`px.calibration`).
"""

import abc
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from particlax import calibration, pairwise
from particlax.blocks import wide_type
from particlax.calibration import as_calibration
from particlax.checks import Part, Scheduled, at, number, positive, whole
from particlax.errors import expect, one_of
from particlax.kernels import (
    RBF,
    Bandwidth,
    Kernel,
    LayerWise,
    Median,
    as_bandwidth,
    whole_cloud,
)
from particlax.particles import check_distinct, num_particles
from particlax.terms import Cloud, Term, Velocity, scale

__all__ = [
    "GFSD",
    "Blob",
    "Coupling",
    "FixedScale",
    "Force",
    "Langevin",
    "Sinkhorn",
    "Transport",
]


class Langevin(Term):
    """sqrt(2 weight) dW: the diffusion as noise, which makes SGLD of a drift.

    In a metric D that moves with the cloud, the noise is D^1/2 dW and the drift gains weight * div D
    (Garbuno-Inigo, Nüsken & Reich 2020), without which the law would be wrong at finite M.
    """

    weight: Scheduled = eqx.field(converter=number, default=1.0)
    noisy: ClassVar[bool] = True

    def __check_init__(self) -> None:
        positive("Langevin weight", self.weight)

    def __call__(self, cloud: Cloud, key: Any, memory: PyTree) -> tuple[Velocity, PyTree]:
        weight = at(self.weight, cloud.step)
        noise = scale(jnp.sqrt(2 * weight), cloud.frame.normal(key, cloud.x))
        correction = cloud.frame.correction(cloud.x)
        drift = jax.tree.map(jnp.zeros_like, noise) if correction is None else correction
        return Velocity(scale(weight, drift), noise), memory


class Force(Term):
    """A deterministic realisation: `force` approximates -grad log mu at every particle."""

    calibrate: eqx.AbstractVar[bool | str]

    @abc.abstractmethod
    def force(self, cloud: Cloud, memory: PyTree) -> tuple[PyTree, PyTree]:
        """-grad log mu at the particles, and the new memory."""

    def matrices(self, cloud: Cloud, memory: PyTree) -> tuple[pairwise.Mixing, PyTree] | None:
        """For few particles in many dimensions: the force as matrices; None where it is more than that."""
        return None

    def mixing(self, cloud: Cloud, memory: PyTree) -> tuple[pairwise.Mixing, PyTree] | None:
        found = None if self.calibrate else self.matrices(cloud, memory)
        return found and (found[0].times(at(self.weight, cloud.step)), found[1])

    def check(self, particles: PyTree) -> None:
        calibration.check(self.calibrate, particles)

    def __call__(self, cloud: Cloud, key: Any, memory: PyTree) -> tuple[Velocity, PyTree]:
        force, memory = self.force(cloud, memory)
        force = calibration.apply(self.calibrate, force, cloud.x)
        return Velocity(scale(at(self.weight, cloud.step), force)), memory


def _inverse_mass(kernel: Kernel, x: PyTree) -> tuple[Float[Array, ""], Float[Array, " M"]]:
    """The bandwidth h and 1 / S_i, S_i = sum_k K_ik."""
    h = kernel.bandwidth(x)
    return h, 1 / pairwise.total(x, x, lambda r2: kernel.pair(r2, h)[0])


class Blob(Force):
    """b_i = sum_j (1/S_i + 1/S_j) W_ij (x_i - x_j), S_i = sum_k K_ik (paper eq. 22; RBF: W = 2 K / h).

    Minus the gradient of sum_i log(sum_j K_ij): the entropy of the smoothed density, smoothed only
    inside the logarithm (Carrillo, Craig & Patacchini 2019).
    """

    weight: Scheduled = eqx.field(converter=number, default=1.0)
    kernel: Kernel | LayerWise = RBF()
    calibrate: bool | str = eqx.field(converter=as_calibration, default=False)

    def __check_init__(self) -> None:
        positive("Blob weight", self.weight)
        expect("kernel", self.kernel, (Kernel, LayerWise), "px.kernels.RBF()")

    def check(self, particles: PyTree) -> None:
        Force.check(self, particles)
        self.kernel.check(particles)

    def force(self, cloud: Cloud, memory: PyTree) -> tuple[PyTree, PyTree]:
        return self.kernel.apart(_blob, cloud.x), memory

    def matrices(self, cloud: Cloud, memory: PyTree) -> tuple[pairwise.Mixing, PyTree] | None:
        if not whole_cloud(self.kernel):
            return None
        return _blob(self.kernel, cloud.x, pairwise.mixing), memory


def _blob(kernel: Kernel, x: PyTree, how: Any = pairwise.interact) -> Any:
    h, inverse = _inverse_mass(kernel, x)

    def weights(r2: Array, own: Array, other: Array) -> Array:
        return kernel.pair(r2, h)[1] * (own + other)

    return how(x, x, weights, rows=(inverse,), cols=(inverse,))


class GFSD(Force):
    """(1/S_i) sum_j W_ij (x_i - x_j) = -grad log of the smoothed density at x_i (Liu et al. 2019).

    RBF: (2 / h) (x_i - sum_j K_ij x_j / S_i).
    """

    weight: Scheduled = eqx.field(converter=number, default=1.0)
    kernel: Kernel | LayerWise = RBF()
    calibrate: bool | str = eqx.field(converter=as_calibration, default=False)

    def __check_init__(self) -> None:
        positive("GFSD weight", self.weight)
        expect("kernel", self.kernel, (Kernel, LayerWise), "px.kernels.RBF()")

    def check(self, particles: PyTree) -> None:
        Force.check(self, particles)
        self.kernel.check(particles)

    def force(self, cloud: Cloud, memory: PyTree) -> tuple[PyTree, PyTree]:
        return self.kernel.apart(_gfsd, cloud.x), memory

    def matrices(self, cloud: Cloud, memory: PyTree) -> tuple[pairwise.Mixing, PyTree] | None:
        if not whole_cloud(self.kernel):
            return None
        return _gfsd(self.kernel, cloud.x, pairwise.mixing), memory


def _gfsd(kernel: Kernel, x: PyTree, how: Any = pairwise.interact) -> Any:
    h, inverse = _inverse_mass(kernel, x)

    def weights(r2: Array, own: Array) -> Array:
        return kernel.pair(r2, h)[1] * own

    return how(x, x, weights, rows=(inverse,))


class Plan(NamedTuple):
    """B_ij = weights(r2_ij, *rows_i, *cols_j) of the force sum_j B_ij (x_i - y_j)."""

    weights: Callable[..., Array]
    rows: Sequence[Array] = ()
    cols: Sequence[Array] = ()


class Coupling(Part):
    """How `Transport` ties a particle to where the particles were: the p_ij of paper eq. 20."""

    def check(self, particles: PyTree) -> None:
        """Refuse clouds that the coupling cannot tie."""

    def init(self, num: int, dtype: Any) -> PyTree:
        """The coupling's memory between steps."""
        return ()

    @abc.abstractmethod
    def plan(self, x: PyTree, y: PyTree, memory: PyTree) -> tuple[Plan, PyTree]:
        """The weights of the force, and the new memory."""


class FixedScale(Coupling):
    """The paper's shortcut: u_i v_j is one constant gamma, so B = 2 gamma (1 - r2/lam) exp(-r2/lam).

    `lam` is a number or a bandwidth rule, by default med^2 / log M. Repels inside sqrt(lam), attracts
    outside; with the default a typical pair sits on the attractive side, so in high dimension a large
    gamma pulls the cloud together (a lam of a few med^2 repels instead).

    >>> FixedScale(gamma=0.5, lam=2.0).gamma
    0.5
    """

    gamma: float = eqx.field(converter=number, default=1.0)
    lam: Bandwidth = eqx.field(converter=as_bandwidth, default=Median())

    def __check_init__(self) -> None:
        positive("gamma", self.gamma, schedule=False)

    def check(self, particles: PyTree) -> None:
        self.lam.check(particles)

    def plan(self, x: PyTree, y: PyTree, memory: PyTree) -> tuple[Plan, PyTree]:
        lam = self.lam(x)

        def weights(r2: Array) -> Array:
            a = r2 / lam
            return 2 * self.gamma * (1 - a) * jnp.exp(-a)

        return Plan(weights), memory


class Sinkhorn(Coupling):
    """The real entropic coupling P = diag(u) exp(-r2/lam) diag(v), rows and columns summing to 1/M.

    Solved in the log domain to `tolerance` (largest relative error of a row sum) or `iterations`, and
    warm-started from the previous step's log u, log v. `derivative` says what the force descends:
    "fixed" holds u, v (the paper's eq. 21 with M P in place of gamma exp): 2 M P (1 - r2/lam)(x_i - y_j);
    "envelope" is minus M times the true gradient of the regularised cost: -2 M P (x_i - y_j), a pure pull
    to the barycentric projection.

    >>> Sinkhorn(lam=1.0, derivative="envelope").derivative
    'envelope'
    """

    lam: Bandwidth = eqx.field(converter=as_bandwidth, default=Median())
    derivative: str = "fixed"
    iterations: int = 100
    tolerance: float = eqx.field(converter=number, default=1e-4)

    def __check_init__(self) -> None:
        one_of("Sinkhorn derivative", self.derivative, ("fixed", "envelope"))
        positive("tolerance", self.tolerance, schedule=False)
        whole("Sinkhorn iterations", self.iterations, 1)

    def check(self, particles: PyTree) -> None:
        self.lam.check(particles)

    def init(self, num: int, dtype: Any) -> PyTree:
        return jnp.zeros(num, dtype), jnp.zeros(num, dtype)

    def potentials(
        self, x: PyTree, y: PyTree, lam: Float[Array, ""], start: tuple[Array, Array]
    ) -> tuple[Float[Array, " M"], Float[Array, " M"]]:
        """log u and log v by alternate scaling of rows and columns."""
        log_share = -math.log(num_particles(x))

        def lift(r2: Array, other: Array) -> Array:
            return other - r2 / lam

        def sweep(carry: Any) -> Any:
            count, _, log_u, log_v, _ = carry
            log_u = log_share - pairwise.logsumexp(x, y, lift, cols=(log_v,))
            log_v = log_share - pairwise.logsumexp(y, x, lift, cols=(log_u,))
            excess = log_u + pairwise.logsumexp(x, y, lift, cols=(log_v,)) - log_share
            return count + 1, jnp.max(jnp.abs(jnp.expm1(excess))), log_u, log_v, ()

        def unfinished(carry: Any) -> Array:
            return (carry[0] < self.iterations) & (carry[1] > self.tolerance)

        log_u, log_v = start
        carry = (jnp.zeros((), jnp.int32), jnp.full((), jnp.inf, log_u.dtype), log_u, log_v, ())
        _, _, log_u, log_v, _ = jax.lax.while_loop(unfinished, sweep, carry)
        return log_u, log_v

    def plan(self, x: PyTree, y: PyTree, memory: PyTree) -> tuple[Plan, PyTree]:
        lam, num = self.lam(x), num_particles(x)
        log_u, log_v = self.potentials(x, y, lam, memory)

        def weights(r2: Array, own: Array, other: Array) -> Array:
            a = r2 / lam
            plan = 2 * num * jnp.exp(own + other - a)
            return plan * (1 - a) if self.derivative == "fixed" else -plan

        return Plan(weights, (log_u,), (log_v,)), (log_u, log_v)


class Transport(Force):
    """t_i = sum_j B_ij (x_i - y_j): the discrete gradient flow of w-SGLD (paper eq. 21).

    y are the particles at the start of the JKO step, which lasts `inner` steps. The paper prints eq. 21
    with a minus sign before the sum; descending it as its text says (repulsion when near, attraction
    when far) is t_i = sum_j 2 gamma (1 - r2/lam) exp(-r2/lam) (x_i - y_j).

    Without calibration it does not balance the drift: expect a cloud that is far too narrow (docs/theory.md).
    """

    weight: Scheduled = eqx.field(converter=number, default=1.0)
    coupling: Coupling = FixedScale()
    inner: int = 1
    calibrate: bool | str = eqx.field(converter=as_calibration, default=False)

    def __check_init__(self) -> None:
        positive("Transport weight", self.weight)
        expect("coupling", self.coupling, Coupling, "px.diffusions.FixedScale(gamma=0.1)")
        whole("Transport inner", self.inner, 1)

    def check(self, particles: PyTree) -> None:
        Force.check(self, particles)
        self.coupling.check(particles)
        check_distinct(particles)

    def init(self, particles: PyTree) -> PyTree:
        dtype = wide_type(*jax.tree.leaves(particles))
        anchor = jax.tree.map(jnp.copy, particles) if self.inner > 1 else ()
        return anchor, self.coupling.init(num_particles(particles), dtype)

    def force(self, cloud: Cloud, memory: PyTree) -> tuple[PyTree, PyTree]:
        return self._tied(cloud, memory, pairwise.interact)

    def matrices(self, cloud: Cloud, memory: PyTree) -> tuple[pairwise.Mixing, PyTree] | None:
        return self._tied(cloud, memory, pairwise.mixing) if self.inner == 1 else None

    def _tied(self, cloud: Cloud, memory: PyTree, how: Any) -> tuple[Any, PyTree]:
        anchor, coupled = memory
        x = y = cloud.x
        if self.inner > 1:
            fresh = cloud.step % self.inner == 0
            anchor = jax.tree.map(lambda new, old: jnp.where(fresh, new, old), cloud.raw, anchor)
            y = cloud.frame.points(anchor)
        plan, coupled = self.coupling.plan(x, y, coupled)
        return how(x, y, plan.weights, rows=plan.rows, cols=plan.cols), (anchor, coupled)
