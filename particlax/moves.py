"""Metropolis-adjusted moves of a whole ensemble: what `px.sample` is made of.

A trajectory is Hamiltonian dynamics in the ensemble's metric, the drift and the noise of the recipe at
second order: momentum p ~ N(0, I), then leapfrog steps in z = L^-1 (x - m), where L L^T is the covariance
of the cloud, then Metropolis' test, which removes the discretisation error. A hop proposes a draw
of a mixture fitted to the cloud, so that particles change modes with the right odds.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key, PyTree

from particlax.pairwise import matmul
from particlax.target import Target

__all__ = ["Density", "Mixture", "Trace", "Tuning", "Walkers", "hop", "window"]

Numbers: TypeAlias = Any
"""An array on the device or on the host."""
SNAPSHOTS = 16
"""Clouds kept in one window."""
ACCEPTANCE = 0.8
"""The acceptance rate that step sizes are tuned to."""
JITTER = 0.5
"""Steps are drawn uniformly between this share of the tuned one and the whole: no resonances."""
CAREFUL = 0.2
"""Share of the trajectories, and the factor of their steps, that are for narrow places such as funnels' necks."""
HOPELESS = -50.0
"""Log acceptance, at the very best, below which nobody asks what was wrong with a proposal."""


@dataclasses.dataclass(frozen=True)
class Density:
    """A log density on flat vectors; hashable, so that one compilation serves every call."""

    target: Target
    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]

    @classmethod
    def of(cls, target: Target, point: PyTree) -> "Density":
        """The density of points with the structure of `point`."""
        leaves, structure = jax.tree.flatten(point)
        shapes = tuple(tuple(np.shape(leaf)) for leaf in leaves)
        return cls(target, structure, shapes, tuple(np.dtype(leaf.dtype) for leaf in leaves))

    def flatten(self, cloud: PyTree) -> np.ndarray:
        """A cloud of points as an M x D matrix, on the host."""
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(cloud)]
        dtype = jnp.result_type(*self.dtypes)
        return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], 1).astype(dtype)

    def unflatten(self, flat: Any) -> PyTree:
        """Arrays [..., D] as a pytree; leading axes stay."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes])
        module = jnp if isinstance(flat, jax.Array) else np
        pieces = module.split(flat, ends[:-1], axis=-1)
        shaped = [
            piece.reshape(*flat.shape[:-1], *shape).astype(dtype)
            for piece, shape, dtype in zip(pieces, self.shapes, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(self.structure, shaped)

    def score(self, x: Float[Array, "M D"]) -> tuple[Float[Array, " M"], Float[Array, "M D"]]:
        """Log densities and scores of the particles.

        Products inside the log density are in full float32: a GPU's default (TF32, three digits) would drown
        the differences that Metropolis' test is about.
        """
        one = lambda v: self.target(self.unflatten(v))
        with jax.default_matmul_precision("highest"):
            value, score = jax.vmap(jax.value_and_grad(one))(x)
        return value.astype(x.dtype), score


class Walkers(NamedTuple):
    """The particles, what is known of the density there, and each one's step size."""

    x: Float[Numbers, "M D"]
    log_density: Float[Numbers, " M"]
    score: Float[Numbers, "M D"]
    log_step: Float[Numbers, " M"]


class Tuning(NamedTuple):
    """How a window moves: the factor L, and trajectories of `length` in z, of at most `most` steps."""

    factor: Float[Numbers, "D D"]
    length: Float[Numbers, ""]
    most: Int[Numbers, ""]
    gain: Float[Numbers, ""]
    """How fast step sizes are tuned; 0 freezes them, and the window is then exact."""
    shared: Bool[Numbers, ""]
    """Tune one step size for all by the mean acceptance, or each particle's by its own."""


class Trace(NamedTuple):
    """What a window leaves behind."""

    x: Float[Array, "S M D"]
    log_density: Float[Array, "S M"]
    score: Float[Array, "S M D"]
    acceptance: Float[Array, " M"]
    moved: Bool[Array, " M"]
    evaluations: Int[Array, ""]
    """Score evaluations of each particle."""
    lost: Int[Array, ""]
    """Proposals refused because the score was not finite though the log density was."""


class Mixture(NamedTuple):
    """K Gaussians: log weights, centres, Cholesky factors of the covariances."""

    log_weight: Float[Numbers, " K"]
    centre: Float[Numbers, "K D"]
    factor: Float[Numbers, "K D D"]


@functools.partial(jax.jit, static_argnames=("density",))
def window(
    density: Density,
    key: Key[Array, ""],
    walkers: Walkers,
    tuning: Tuning,
    thin: Int[Array, ""] | np.integer,
    *,
    until: Int[Array, ""] | np.integer | int = SNAPSHOTS,
) -> tuple[Walkers, Trace]:
    """`SNAPSHOTS` times `thin` trajectories, keeping every `thin`-th cloud; none after the first `until`."""

    def one(i: Array, carry: Any) -> Any:
        walkers, key, accepted, moved, count, lost = carry
        for_share, now = jax.random.split(jax.random.fold_in(key, i))
        share = jax.random.uniform(for_share, (), walkers.x.dtype, 0.5, 1.5)
        wanted = share * tuning.length / jnp.exp(jnp.mean(walkers.log_step))
        most = jnp.asarray(tuning.most, wanted.dtype)
        steps = jnp.clip(jnp.ceil(wanted), 1, most).astype(jnp.int32)
        walkers, rate, took, broken = _trajectory(density, now, walkers, tuning, steps)
        return (
            walkers,
            key,
            accepted + rate,
            moved | took,
            count + steps,
            lost + jnp.sum(broken, dtype=jnp.int32),
        )

    thin, until = jnp.asarray(thin, jnp.int32), jnp.asarray(until, jnp.int32)

    def snapshot(carry: Any, place: Any) -> tuple[Any, Any]:
        (walkers, accepted, moved, count, lost), (key, number) = carry, place
        start = (walkers, key, accepted, moved, count, lost)
        num = jnp.where(number < until, thin, 0)
        zero = jnp.zeros_like(num)
        walkers, _, accepted, moved, count, lost = lax.fori_loop(zero, num, one, start)
        kept = walkers.x, walkers.log_density, walkers.score
        return (walkers, accepted, moved, count, lost), kept

    num = len(walkers.x)
    zeros = jnp.zeros(num, walkers.x.dtype), jnp.zeros(num, bool), jnp.int32(0), jnp.int32(0)
    places = jax.random.split(key, SNAPSHOTS), jnp.arange(SNAPSHOTS, dtype=jnp.int32)
    (walkers, accepted, moved, count, lost), kept = lax.scan(snapshot, (walkers, *zeros), places)
    x, log_density, score = kept
    rate = accepted / jnp.asarray(until * thin, accepted.dtype)
    return walkers, Trace(x, log_density, score, rate, moved, count, lost)


def _trajectory(
    density: Density, key: Array, walkers: Walkers, tuning: Tuning, steps: Array
) -> tuple[Walkers, Array, Array, Array]:
    """One leapfrog trajectory of every particle and its Metropolis test; its rate, whether taken, whether broken."""
    x, before, score, log_step = walkers
    for_step, for_momentum, for_test = jax.random.split(key, 3)
    jitter = jax.random.uniform(for_step, (len(x) + 1, 1), x.dtype, JITTER, 1.0)
    careful = jitter[-1] < JITTER + (1 - JITTER) * CAREFUL
    step = jnp.exp(log_step)[:, None] * jitter[:-1] * jnp.where(careful, CAREFUL, 1.0)[:, None]
    momentum = jax.random.normal(for_momentum, x.shape, x.dtype)

    def leap(_: Any, carry: Any) -> Any:
        # The velocity L p needs one product with L L^T where p itself would need two with L.
        y, _, score, velocity, pushed = carry
        velocity = velocity + 0.5 * step * matmul(score, covariance)
        y = y + step * velocity
        value, after = density.score(y)
        velocity = velocity + 0.5 * step * matmul(after, covariance)
        return y, value, after, velocity, pushed + 0.5 * step * (score + after)

    covariance = matmul(tuning.factor, tuning.factor.T)
    start = (x, before, score, matmul(momentum, tuning.factor.T), jnp.zeros_like(x))
    y, after, slope, _, pushed = lax.fori_loop(0, steps, leap, start)
    p = momentum + matmul(pushed, tuning.factor)
    gain = after - before - 0.5 * jnp.sum(p**2 - momentum**2, 1)
    # From nowhere (the very first evaluation) any point will do; nowhere is never gone to.
    gain = jnp.where(before == -jnp.inf, 0.0, gain)
    there = jnp.isfinite(after) & jnp.all(jnp.isfinite(y), 1)
    fine = there & jnp.all(jnp.isfinite(slope), 1)
    rate = jnp.where(fine & ~jnp.isnan(gain), jnp.exp(jnp.minimum(gain, 0.0)), 0.0)
    took = jax.random.uniform(for_test, rate.shape, rate.dtype) < rate
    signal = jnp.where(tuning.shared, jnp.mean(rate), rate)
    # Careful steps say nothing about what a whole one may be.
    log_step = log_step + jnp.where(careful, 0.0, tuning.gain) * (signal - ACCEPTANCE)
    walkers = _choose(took, Walkers(y, after, slope, log_step), walkers, log_step)
    # Where so little is left to accept, a slope that overflows refuses nothing.
    hopeless = after - before + 0.5 * jnp.sum(momentum**2, 1) < HOPELESS
    return walkers, rate, took, there & ~fine & ~hopeless


def _choose(took: Array, new: Walkers, old: Walkers, log_step: Array) -> Walkers:
    column = took[:, None]
    return Walkers(
        jnp.where(column, new.x, old.x),
        jnp.where(took, new.log_density, old.log_density),
        jnp.where(column, new.score, old.score),
        log_step,
    )


@functools.partial(jax.jit, static_argnames=("density", "times"))
def hop(
    density: Density, key: Key[Array, ""], walkers: Walkers, mixture: Mixture, times: int
) -> tuple[Walkers, Float[Array, ""]]:
    """`times` independent proposals from the mixture for every particle; the mean acceptance rate."""

    eye = jnp.eye(walkers.x.shape[1], dtype=walkers.x.dtype)
    invert = lambda factor: jax.scipy.linalg.solve_triangular(factor, eye, lower=True)
    inverse = jax.vmap(invert)(mixture.factor)
    volume = jnp.sum(jnp.log(jnp.diagonal(mixture.factor, axis1=1, axis2=2)), 1)
    log_height = mixture.log_weight - volume

    def log_q(x: Array) -> Array:
        component = lambda height, centre, inverse: (
            height - 0.5 * jnp.sum(matmul(x - centre, inverse.T) ** 2, 1)
        )
        parts = jax.vmap(component)(log_height, mixture.centre, inverse)
        return jax.nn.logsumexp(parts, axis=0)

    def one(i: Array, carry: Any) -> Any:
        walkers, total = carry
        for_part, for_noise, for_test = jax.random.split(jax.random.fold_in(key, i), 3)
        x = walkers.x
        part = jax.random.categorical(for_part, mixture.log_weight, shape=(len(x),))
        noise = jax.random.normal(for_noise, x.shape, x.dtype)
        y = mixture.centre[part] + jnp.einsum("mij,mj->mi", mixture.factor[part], noise)
        value, score = density.score(y)
        gain = value - walkers.log_density + log_q(x) - log_q(y)
        fine = jnp.isfinite(value) & jnp.all(jnp.isfinite(score), 1) & ~jnp.isnan(gain)
        rate = jnp.where(fine, jnp.exp(jnp.minimum(gain, 0.0)), 0.0)
        took = jax.random.uniform(for_test, rate.shape, rate.dtype) < rate
        moved = _choose(took, Walkers(y, value, score, walkers.log_step), walkers, walkers.log_step)
        return moved, total + jnp.mean(rate)

    walkers, total = lax.fori_loop(0, times, one, (walkers, jnp.zeros((), walkers.x.dtype)))
    return walkers, total / times
