"""How good is a cloud? Discrepancies to the target, to reference samples, and a collapse alarm."""

import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from particlax import pairwise
from particlax.blocks import wide
from particlax.checks import as_key, positive, refuse_not_finite, whole
from particlax.data import Minibatches
from particlax.errors import OptionError, ParticleError, expect
from particlax.flow import State
from particlax.kernels import RBF, Kernel
from particlax.noise import fold_in
from particlax.pairwise import matmul
from particlax.particles import as_cloud, flatten, num_particles
from particlax.target import Target
from particlax.zoo import Density

__all__ = [
    "Collapse",
    "SteinResiduals",
    "collapse",
    "ksd",
    "mmd2",
    "mode_shares",
    "noise_ratio",
    "sliced_wasserstein2",
    "stein_residuals",
    "variance_ratio",
    "wasserstein2",
]

EXACT_SIZE = 2048
"""Largest set for which `wasserstein2` solves the assignment exactly."""


@jax.jit
def ksd(particles: PyTree, score: PyTree) -> Float[Array, ""]:
    """Kernel Stein discrepancy with the IMQ kernel (1 + r2)^(-1/2) (Gorham & Mackey 2017), V-statistic.

    Zero only for the target; needs the score at the particles and no reference sample. O(M) memory.

    >>> x = jax.random.normal(jax.random.key(0), (500, 2))
    >>> bool(ksd(x, -x) < 0.1 < ksd(x, -4 * x))
    True
    """
    _check_score(particles, score)
    x, s = wide(flatten(particles)[0]), wide(flatten(score)[0])

    def pair(r2: Array) -> tuple[Array, Array]:
        root = jax.lax.rsqrt(1 + r2)
        return root, 2 * root**3

    def trace(r2: Array) -> Array:
        root = jax.lax.rsqrt(1 + r2)
        return x.shape[1] * root**3 - 3 * r2 * root**5

    # The two terms with one score each are equal by symmetry, so that both scores go with s_i.
    force = pairwise.interact(x, x, pair, values=s)
    total = jnp.sum(s * force) + jnp.sum(pairwise.total(x, x, trace))
    return jnp.sqrt(jnp.maximum(total, 0)) / len(x)


def _check_score(particles: PyTree, score: PyTree) -> None:
    """Refuse scores that are not those of these particles."""
    if isinstance(score, tuple) and jax.tree.structure(score) != jax.tree.structure(particles):
        raise ParticleError(
            "score is a tuple; expected the scores alone: target.score(particles) gives (log densities, scores), of which take [1]"
        )
    shapes = [[np.shape(leaf) for leaf in jax.tree.leaves(tree)] for tree in (particles, score)]
    if jax.tree.structure(score) != jax.tree.structure(particles) or shapes[0] != shapes[1]:
        raise ParticleError(
            f"the particles have shapes {shapes[0]} and the scores {shapes[1]}; expected one score for each particle, as "
            "target.score(particles)[1] gives them"
        )


def mmd2(x: PyTree, y: PyTree, kernel: Kernel = RBF()) -> float:
    """Squared maximum mean discrepancy between two sets of points, V-statistic; h is chosen on `y`.

    >>> x = jnp.array([[0.0], [1.0]])
    >>> mmd2(x, x) < 1e-6
    True
    """
    expect("kernel", kernel, Kernel, "px.kernels.RBF()")
    x, y = _matrices(x, y)
    kernel.bandwidth.check(y)
    h = kernel.bandwidth(y)
    means = []
    for a, b in ((x, x), (y, y), (x, y)):
        rows = pairwise.total(a, b, lambda r2: kernel.pair(r2, h)[0])
        means.append(np.asarray(rows, np.float64).mean() / num_particles(b))
    return float(means[0] + means[1] - 2 * means[2])


def wasserstein2(x: PyTree, y: PyTree) -> float:
    """2-Wasserstein distance between two sets of points.

    Exact (an assignment problem) when the least common multiple of the sizes is at most 2048, for instance for
    equal sizes up to 2048; else sliced with 256 directions, a lower bound not comparable with exact values.

    >>> wasserstein2(jnp.zeros((4, 2)), jnp.ones((4, 2)))
    1.4142135623730951
    """
    size = math.lcm(num_particles(x), num_particles(y))
    if size > EXACT_SIZE:
        return float(sliced_wasserstein2(x, y))
    from scipy.optimize import linear_sum_assignment
    from scipy.spatial.distance import cdist

    a, b = (np.asarray(c, np.float64) for c in _matrices(x, y))
    a, b = (np.repeat(c, size // len(c), axis=0) for c in (a, b))
    cost = cdist(a, b, "sqeuclidean")
    rows, columns = linear_sum_assignment(cost)
    return float(np.sqrt(cost[rows, columns].mean()))


def _matrices(x: PyTree, y: PyTree) -> tuple[Array, Array]:
    x, y = (jax.tree.map(jnp.asarray, c) for c in (x, y))
    structures, plain = [jax.tree.structure(c) for c in (x, y)], jax.tree.structure(0)
    if structures[0] != structures[1] and plain not in structures:
        raise ParticleError(
            f"the two sets are {structures[0]} and {structures[1]}; expected points of the same parameters, or matrices [N, D]"
        )
    a, b = (wide(flatten(c)[0]) for c in (x, y))
    for which, points in (("first", a), ("second", b)):
        refuse_not_finite(f"the {which} set", points, ParticleError)
    if a.shape[1] != b.shape[1]:
        raise ParticleError(
            f"the two sets have D = {a.shape[1]} and D = {b.shape[1]}; expected points of the same space"
        )
    return a, b


def sliced_wasserstein2(
    x: PyTree, y: PyTree, key: Key[Array, ""] | None = None, directions: int = 256
) -> Float[Array, ""]:
    """Root mean square over random directions of the 2-Wasserstein distance of the projections.

    >>> bool(abs(sliced_wasserstein2(jnp.zeros((4, 2)), jnp.ones((4, 2))) - 1.0) < 0.1)
    True
    """
    a, b = _matrices(x, y)
    normals = jax.random.normal(jax.random.key(0) if key is None else key, (directions, a.shape[1]))
    units = normals / jnp.linalg.norm(normals, axis=1, keepdims=True)
    left, right = (jnp.sort(matmul(units, c.T), 1) for c in (a, b))
    # Between two levels of either set both quantile functions are constant.
    levels = np.union1d(np.arange(len(a) + 1) / len(a), np.arange(len(b) + 1) / len(b))
    middle, width = (levels[1:] + levels[:-1]) / 2, np.diff(levels)
    gaps = left[:, (middle * len(a)).astype(int)] - right[:, (middle * len(b)).astype(int)]
    return jnp.sqrt(jnp.mean(jnp.sum(gaps**2 * jnp.asarray(width, gaps.dtype), 1)))


def mode_shares(particles: Float[Array, "M D"], density: Density) -> Float[np.ndarray, " R"]:
    """The share of particles in each region of a zoo density, beside its true `shares`.

    >>> from particlax import zoo
    >>> mode_shares(jnp.array([[-2.0, 0.0], [2.0, 0.0], [2.1, 0.0], [1.9, 0.0]]), zoo.U1()).tolist()
    [0.25, 0.75]
    """
    points = flatten(jax.tree.map(jnp.asarray, particles))[0]
    refuse_not_finite("the cloud", points, ParticleError)
    if points.shape[1] != density.dim:
        raise ParticleError(
            f"the cloud has D = {points.shape[1]} and the density D = {density.dim}; expected a cloud of its space"
        )
    region = np.asarray(density.region(points))
    return np.bincount(region, minlength=len(density.regions)) / len(region)


class SteinResiduals(NamedTuple):
    """What is left of Stein's identity for linear test functions; both vanish at the target."""

    mean: Float[Array, " D"]
    """1/M sum_i s_i, in units of one over the cloud's standard deviation."""
    matrix: Float[Array, "D D"]
    """1/M sum_i s_i (x_i - m)^T + I: the calibration identity."""


def stein_residuals(particles: PyTree, score: PyTree) -> SteinResiduals:
    """E[s] = 0 and E[s (x - m)^T] = -I, as seen by the cloud.

    >>> x = jnp.array([[-1.0], [1.0]])
    >>> float(stein_residuals(x, -x).matrix[0, 0])
    0.0
    """
    _check_score(particles, score)
    x, s = flatten(particles)[0], flatten(score)[0]
    centred = x - jnp.mean(x, 0)
    matrix = matmul(s.T, centred) / len(x) + jnp.eye(x.shape[1], dtype=x.dtype)
    return SteinResiduals(jnp.mean(s, 0) * jnp.std(x, 0), matrix)


def variance_ratio(particles: PyTree, score: PyTree) -> PyTree:
    """-1/M sum_i s_i (x_i - m) for every coordinate: the cloud's variance over the target's.

    Exact for a Gaussian target without correlations; by Stein's identity 1 for every target that the cloud
    fits. Needs no reference.

    >>> x = jnp.array([[-1.0], [1.0]])
    >>> variance_ratio(x, -x / 4).tolist()
    [0.25]
    """

    _check_score(particles, score)

    def ratio(x: Array, s: Array) -> Array:
        return -jnp.mean(s * (x - jnp.mean(x, 0)), 0)

    return jax.tree.map(ratio, particles, score)


def noise_ratio(
    target: Target,
    particles: PyTree | State,
    data: Minibatches,
    *,
    step_size: float,
    key: Key[Array, ""],
    batches: int = 64,
) -> PyTree:
    """Is SGLD sampling the posterior? Injected noise over gradient noise, for every coordinate.

    A step injects variance 2 eps; the minibatch adds eps^2 Var(g), with g the minibatch score, which no step
    accounts for. The ratio 2 / (eps Var(g)), here from `batches` batches and averaged over particles, should be well
    above 1: below, the cloud's spread tells of the minibatches and not of the posterior. Take a smaller step or larger batches
    (the ratio grows as their size).

    A run's `result.state` may stand for its particles, and must where particles carry or share something (networks with batch
    norm or dropout, partly Bayesian ones). Dropout's noise then counts too: it moves the particles as the minibatches' does.

    >>> target = Target(log_prior=lambda p: -0.5 * p**2, log_likelihood=lambda p, x: p * x, num_data=1000)
    >>> data = Minibatches(jnp.arange(1000) % 2 * 2.0 - 1.0, 10)
    >>> ratio = noise_ratio(target, jnp.zeros(3), data, step_size=1e-3, key=jax.random.key(0))
    >>> 0.01 < float(ratio) < 0.04  # Var(g) = 1000**2 / 10
    True
    """
    expect("target", target, Target, "px.Target(log_prior=..., log_likelihood=..., num_data=...)")
    expect("data", data, Minibatches, "px.Minibatches(arrays, 100)")
    positive("step_size", step_size, zero=False, schedule=False)
    whole("batches", batches, 2)
    state = particles if isinstance(particles, State) else None
    cloud = as_cloud(particles if state is None else state.particles)
    if target.stateful and state is None:
        raise OptionError(
            "particles came, but the target's particles carry something or draw random numbers; give the state that holds both: "
            "noise_ratio(target, flow.init(particles, carried), data, ...), or a run's result.state"
        )
    carried = () if state is None else state.carried
    shared = None if state is None or state.shared is None else state.shared.values
    some = _Some(target, carried, shared, data)
    variance = _score_variance(some, cloud, as_key(key), batches)
    return jax.tree.map(lambda v: 2 / (step_size * jnp.mean(v, 0)), variance)


class _Some(eqx.Module):
    """What a score depends on beside the particles."""

    target: Target
    carried: PyTree
    shared: PyTree
    data: Minibatches

    def score(self, particles: PyTree, key: Key[Array, ""], step: Array) -> PyTree:
        """On the minibatch of a step, and with random numbers of its own if the target takes any."""
        own = fold_in(fold_in(key, 2**31 - 2), step)
        batch = self.data.batch(key, step)
        return self.target.evaluate(particles, batch, self.carried, own, self.shared).score


@eqx.filter_jit
def _score_variance(some: _Some, particles: PyTree, key: Key[Array, ""], batches: int) -> PyTree:
    """The variance over minibatches of the score at every particle (Welford's recursion)."""

    def one(carry: tuple[PyTree, PyTree], step: Array) -> tuple[tuple[PyTree, PyTree], None]:
        mean, square = carry
        score = some.score(particles, key, step)
        off = jax.tree.map(jnp.subtract, score, mean)
        mean = jax.tree.map(lambda m, o: m + o / (step + 1), mean, off)
        square = jax.tree.map(lambda q, o, s, m: q + o * (s - m), square, off, score, mean)
        return (mean, square), None

    zero = jax.tree.map(jnp.zeros_like, particles)
    (_, square), _ = jax.lax.scan(one, (zero, zero), jnp.arange(batches))
    return jax.tree.map(lambda q: q / (batches - 1), square)


class Collapse(NamedTuple):
    """The verdict of the collapse alarm."""

    collapsed: bool
    ratio: float
    """Mean over coordinates of the cloud's variance over the target's, estimated from the scores."""
    message: str
    least: float = math.nan
    """The same in the direction where it is least; NaN where there are too few particles to tell."""


def collapse(particles: PyTree, score: PyTree, threshold: float = 0.5) -> Collapse:
    """Alarm when the cloud keeps less than `threshold` of the target's variance (SVGD in high dimension).

    With more than 4 D particles and up to 200 dimensions, also when it does in one direction alone: of correlated or differently
    scaled coordinates a mean says little. There draws themselves show down to (1 - sqrt(D / M))^2, which is allowed for.

    >>> x = jnp.array([[-1.0], [1.0]])
    >>> collapse(x, -x / 4).message
    'collapsed: the cloud keeps about 25% of the target variance; use more particles, a calibrated diffusion or noise'
    """
    if num_particles(particles) < 2:
        raise ParticleError("the collapse alarm needs a cloud of at least 2 particles; got 1")
    leaves = [
        np.asarray(leaf, np.float64).ravel()
        for leaf in jax.tree.leaves(variance_ratio(particles, score))
    ]
    ratio, least = float(np.concatenate(leaves).mean()), _narrowest(particles, score)
    if not math.isfinite(ratio):
        return Collapse(True, ratio, "lost: particles or scores are NaN or infinite", least)
    share = sum(leaf.size for leaf in leaves) / num_particles(particles)
    if ratio >= threshold and least < threshold * (1 - math.sqrt(share)) ** 2:
        message = (
            f"collapsed: in one direction the cloud keeps about {max(least, 0):.0%} of the target variance ({ratio:.0%} on average); use "
            "more particles, more steps, a calibrated diffusion or noise"
        )
        return Collapse(True, ratio, message, least)
    if ratio < threshold:
        message = (
            f"collapsed: the cloud keeps about {max(ratio, 0):.0%} of the target variance; use more "
            "particles, a calibrated diffusion or noise"
        )
        return Collapse(True, ratio, message, least)
    if ratio > 1 / threshold:
        message = (
            f"too wide: the cloud has about {ratio:.3g} times the target's variance; it is not at rest, or a "
            "calibrated force has run away (use more particles, or the same diffusion without calibration)"
        )
        return Collapse(False, ratio, message, least)
    return Collapse(False, ratio, f"fine: variance about {ratio:.0%} of the target's", least)


def _narrowest(particles: PyTree, score: PyTree) -> float:
    """The least of the variance ratios by direction, the eigenvalues of -1/M sum_i s_i (x_i - m)^T; NaN if there are too few particles."""
    num, size = num_particles(particles), sum(leaf.size for leaf in jax.tree.leaves(particles))
    if size > 200 * num or 4 * size >= num * num:
        return math.nan
    x, s = (
        np.asarray(flatten(jax.tree.map(jnp.asarray, c))[0], np.float64) for c in (particles, score)
    )
    ratios = -(s.T @ (x - x.mean(0))) / num
    if not np.all(np.isfinite(ratios)):
        return math.nan
    return float(np.linalg.eigvals(ratios).real.min())
