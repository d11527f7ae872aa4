"""Metrics: the matrix D = g g^T of the recipe, which may depend on the whole cloud.

A metric gives a frame: terms work in z = L^-1 (x - m) with D = L L^T, where the cloud looks round, and
their velocities are mapped back by L.
"""

import abc
import functools
import math
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Key, PyTree

from particlax import noise, sharding
from particlax.blocks import wide
from particlax.checks import Part, number, positive
from particlax.errors import ParticleError
from particlax.pairwise import matmul, reduce_rows
from particlax.particles import dimension, flatten, num_particles
from particlax.terms import Frame, scale

__all__ = ["Diagonal", "Ensemble", "Identity", "Metric"]


class Metric(Part):
    """Chooses the coordinates for a cloud."""

    diagonal: ClassVar[bool] = True
    """Whether D is diagonal, so that an elementwise preconditioner may stand beside it."""

    @abc.abstractmethod
    def frame(self, x: PyTree) -> Frame:
        """The coordinates for the cloud `x`."""

    def check(self, particles: PyTree) -> None:
        """Refuse clouds from which the metric cannot be made."""


class Identity(Metric):
    """D = I, as in the paper."""

    def frame(self, x: PyTree) -> Frame:
        return Frame()


class _Scaled(Frame):
    mean: PyTree
    rest: PyTree
    """The mean of what the rounded mean leaves."""
    sd: PyTree

    def points(self, x: PyTree) -> PyTree:
        return jax.tree.map(lambda a, m, n, s: (a - m - n) / s, x, self.mean, self.rest, self.sd)

    def scores(self, score: PyTree) -> PyTree:
        return jax.tree.map(jnp.multiply, score, self.sd)

    def back(self, velocity: PyTree) -> PyTree:
        return jax.tree.map(jnp.multiply, velocity, self.sd)

    def correction(self, z: PyTree) -> PyTree:
        return scale(2 / num_particles(z), z)


class Diagonal(Metric):
    """D = the variance of each coordinate over the cloud (1/M normalisation).

    The finite-M correction of noise is div D = 2/M (x_i - m).

    >>> x = jnp.array([[0.0, 10.0], [2.0, 30.0]])
    >>> Diagonal().frame(x).points(x).tolist()
    [[-1.0, -1.0], [1.0, 1.0]]
    """

    def frame(self, x: PyTree) -> Frame:
        mean = jax.tree.map(lambda a: jnp.mean(a, 0, keepdims=True), x)
        rest = jax.tree.map(lambda a, m: jnp.mean(a - m, 0, keepdims=True), x, mean)

        def spread(a: Array, m: Array, r: Array) -> Array:
            # jnp.std would be around the rounded mean. A coordinate without spread has no scale of its own; tiny keeps its z at zero, not NaN.
            return jnp.maximum(jnp.std(a - m - r, 0, keepdims=True), jnp.finfo(a.dtype).tiny)

        return _Scaled(mean, rest, jax.tree.map(spread, x, mean, rest))

    def check(self, particles: PyTree) -> None:
        _spread(particles, "Diagonal", 2)


class _Whitened(Frame):
    mean: tuple[Float[Array, "1 D"], Float[Array, "1 D"]]
    factor: Float[Array, "D D"]
    white: Float[Array, "M D"]
    like: PyTree
    limit: float | None = None

    def points(self, x: PyTree) -> Float[Array, "M D"]:
        if x is self.like:
            return self.white
        centred = wide(flatten(x)[0]) - self.mean[0] - self.mean[1]
        solve = lambda a: jax.scipy.linalg.solve_triangular(self.factor, a.T, lower=True).T
        return sharding.by_rows(solve, centred)

    def scores(self, score: PyTree) -> Float[Array, "M D"]:
        return matmul(wide(flatten(score)[0]), self.factor)

    def back(self, velocity: Float[Array, "M D"]) -> PyTree:
        return flatten(self.like)[1](matmul(velocity, self.factor.T))

    def tamed(self, drift: Float[Array, "M D"]) -> Float[Array, "M D"]:
        if self.limit is None:
            return drift
        most = self.limit * math.sqrt(drift.shape[1])
        size = jnp.linalg.norm(drift, axis=1, keepdims=True)
        return drift * (most / jnp.maximum(size, most))

    def normal(self, key: Key[Array, ""], z: Float[Array, "M D"]) -> Float[Array, "M D"]:
        """(1/sqrt M) sum_j z_j W_ij: standard normal in law and, unlike L W, moving with the cloud."""
        num = len(z)

        def strip(z: Array, rows: Array) -> Array:
            keys = jax.vmap(noise.fold_in, (None, 0))(key, rows)
            normals = jax.vmap(lambda k: noise.normal(k, (num,), z.dtype))(keys)
            return matmul(normals, z) / math.sqrt(num)

        def strips(rows: Array, z: Array) -> Array:
            return reduce_rows(functools.partial(strip, z), rows, num)

        return sharding.by_rows(strips, jnp.arange(num), whole=z)

    def correction(self, z: Float[Array, "M D"]) -> Float[Array, "M D"]:
        return (z.shape[1] + 1) / len(z) * z


class Ensemble(Metric):
    """D = the covariance of the cloud (1/M normalisation): the flow is affine invariant.

    Running on A x + b gives A times the result plus b, so once the cloud has the target's shape, one step size
    of order 0.1 suits every conditioning. A start much wider than the target needs smaller steps, or a `limit`:
    the largest speed of a particle, in units of sqrt(D) standard deviations of the cloud; at rest nothing is near
    a limit of 2. Noise is
    D^1/2 dW = (1/sqrt M) sum_j (x_j - m) dW_ij, and its finite-M correction is div D = (D + 1)/M (x_i - m)
    (Garbuno-Inigo, Nüsken & Reich 2020). Needs M > D + 1.

    >>> x = jax.random.normal(jax.random.key(0), (50, 3)) * jnp.array([1.0, 10.0, 100.0])
    >>> z = Ensemble().frame(x).points(x)
    >>> bool(jnp.allclose(z.T @ z / 50, jnp.eye(3), atol=1e-5))
    True
    """

    limit: float | None = eqx.field(converter=number, default=None)
    diagonal: ClassVar[bool] = False

    def __check_init__(self) -> None:
        if self.limit is not None:
            positive("Ensemble limit", self.limit, zero=False, schedule=False)

    def frame(self, x: PyTree) -> Frame:
        matrix = wide(flatten(x)[0])
        # The covariance's factor from the QR of the cloud itself: squaring would lose half the digits.
        mean, q, r = sharding.factored(matrix)
        root = math.sqrt(len(matrix))
        return _Whitened(mean, r.T / root, q * root, x, self.limit)

    def check(self, particles: PyTree) -> None:
        _spread(particles, "Ensemble", dimension(particles) + 2)


def _spread(particles: PyTree, name: str, needed: int) -> None:
    num = num_particles(particles)
    if num < needed:
        raise ParticleError(
            f"the {name} metric needs at least {needed} particles for D = {dimension(particles)} but "
            f"there are {num}; give more particles, or use the Diagonal or Identity metric"
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(particles):
        if not isinstance(leaf, Tracer) and bool(jnp.any(jnp.all(leaf == leaf[:1], axis=0))):
            where = f"leaf {jax.tree_util.keystr(path)}" if path else "the array"
            raise ParticleError(
                f"a coordinate of {where} is equal in all {num} particles, so the {name} metric is zero there "
                "and it would never move; expected a spread in every coordinate, for instance "
                "px.particles.normal(key, M, like=point)"
            )
