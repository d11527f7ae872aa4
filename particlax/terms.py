"""Terms: each maps a cloud of particles to a velocity, and velocities add (the recipe, paper eq. 23).

Here are the two terms that use the score, `Drift` and `Stein`; realisations of the diffusion are in
`diffusions`.
"""

import abc
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PyTree

from particlax import noise, pairwise
from particlax.blocks import few, wide
from particlax.checks import Part, Scheduled, at, number, positive
from particlax.errors import ParticleError, expect
from particlax.kernels import RBF, Kernel, LayerWise, whole_cloud
from particlax.particles import all_equal, leaf_names, num_particles, random_like

__all__ = ["Cloud", "Drift", "Frame", "Stein", "Term", "Velocity"]


class Frame(eqx.Module):
    """Coordinates in which terms work: z = L^-1 (x - m) with D = L L^T; here D = I, z = x."""

    def points(self, x: PyTree) -> PyTree:
        """z of points given as x."""
        return x

    def scores(self, score: PyTree) -> PyTree:
        """The score in z: L^T s."""
        return score

    def back(self, velocity: PyTree) -> PyTree:
        """A velocity in x: L v."""
        return velocity

    def tamed(self, drift: PyTree) -> PyTree:
        """The drift in z, slowed down where it is faster than the metric allows."""
        return drift

    def normal(self, key: Key[Array, ""], z: PyTree) -> PyTree:
        """A standard normal for every particle, in z."""
        return random_like(key, z, noise.normal)

    def correction(self, z: PyTree) -> PyTree | None:
        """The divergence of D at each particle, in z: what noise needs when D moves with the cloud."""
        return None


class Cloud(eqx.Module):
    """What a term sees: positions and scores in the metric's coordinates, and the step number."""

    x: PyTree[Float[Array, "M ..."]]
    score: PyTree[Float[Array, "M ..."]]
    step: Int[Array, ""]
    frame: Frame
    raw: PyTree[Float[Array, "M ..."]]
    """Positions in the user's coordinates."""
    carried: PyTree = ()
    """What each particle carries beside its position (`State.carried`)."""
    shared: PyTree = None
    """Leaves that all particles share (`State.shared`)."""
    pulled: pairwise.Pulled | None = None
    """The score in two parts, if the target knows them (`Evaluated.pulled`)."""
    log_density: Float[Array, " M"] | None = None
    """Log densities at the particles, of the same batch as the scores: for terms that weigh or replace particles."""


class Velocity(NamedTuple):
    """Drift per unit of time and, for noisy terms, noise per square root of it."""

    drift: PyTree
    noise: PyTree = None


def scale(factor: Any, tree: PyTree) -> PyTree:
    """factor * tree, in the tree's dtype."""
    return jax.tree.map(lambda leaf: jnp.asarray(factor, leaf.dtype) * leaf, tree)


def add(*trees: PyTree) -> PyTree:
    """The sum of trees; `None` counts as zero, and the sum of nothing is `None`."""
    present = [tree for tree in trees if tree is not None]
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *present) if present else None


class Term(Part):
    """One summand of the recipe. `weight` is a number or an optax schedule."""

    weight: eqx.AbstractVar[Scheduled]
    noisy: ClassVar[bool] = False
    """Whether it adds noise: it gets a key, and integrators that would distort the noise are refused."""
    random: ClassVar[bool] = False
    """Whether its drift takes random numbers, as of a random batch of pairs: it gets a key, and its drift is a drift."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Matrices are for the class that offers them: one that moves particles in its own way is called."""
        super().__init_subclass__(**options)
        first = lambda *names: min(
            i for i, base in enumerate(cls.__mro__) if vars(base).keys() & set(names)
        )
        if first("__call__", "force") < first("mixing", "matrices"):
            cls.mixing = Term.mixing

    def init(self, particles: PyTree) -> PyTree:
        """The term's memory between steps; most terms have none."""
        return ()

    def check(self, particles: PyTree) -> None:
        """Refuse clouds that the term cannot move."""

    @abc.abstractmethod
    def __call__(
        self, cloud: Cloud, key: Key[Array, ""] | None, memory: PyTree
    ) -> tuple[Velocity, PyTree]:
        """The velocity in the cloud's coordinates and the new memory. `key` is for terms that are `noisy` or `random`."""

    def mixing(self, cloud: Cloud, memory: PyTree) -> tuple[pairwise.Mixing, PyTree] | None:
        """For few particles in many dimensions: the drift as matrices that mix positions and scores, and the new memory.

        Matrices of several terms are added before one pass over the cloud. Terms that do not offer them are called.
        """
        return None


class Drift(Term):
    """weight * s_i: ascent of the log density. It balances a diffusion of the same weight.

    The paper's F = U / 2 stands for grad U / 2; time is scaled here so that Langevin reads
    dx = s dt + sqrt(2) dW.
    """

    weight: Scheduled = eqx.field(converter=number, default=1.0)

    def __check_init__(self) -> None:
        positive("Drift weight", self.weight)

    def __call__(self, cloud: Cloud, key: Any, memory: PyTree) -> tuple[Velocity, PyTree]:
        return Velocity(scale(at(self.weight, cloud.step), cloud.score)), memory

    def mixing(self, cloud: Cloud, memory: PyTree) -> tuple[pairwise.Mixing, PyTree] | None:
        weight, one = at(self.weight, cloud.step), jnp.eye(num_particles(cloud.x))
        return pairwise.Mixing(jnp.zeros_like(one), weight * one), memory


class Stein(Term):
    """weight * phi_i, phi_i = 1/M sum_j [K_ij s_j + grad_{x_j} K_ij] (paper eq. 6).

    The paper's Vlasov equation and the lambda1 term of its eq. 23 carry the opposite sign, which would
    descend the density; the working form is +phi, as in its eq. 6.
    """

    weight: Scheduled = eqx.field(converter=number, default=1.0)
    kernel: Kernel | LayerWise = RBF()

    def __check_init__(self) -> None:
        positive("Stein weight", self.weight)
        expect("kernel", self.kernel, (Kernel, LayerWise), "px.kernels.RBF()")

    def check(self, particles: PyTree) -> None:
        self.kernel.check(particles)

    def __call__(self, cloud: Cloud, key: Any, memory: PyTree) -> tuple[Velocity, PyTree]:
        if few(cloud.x) and (found := self.mixing(cloud, memory)):
            return Velocity(pairwise.mixed(cloud.x, cloud.score, found[0])), memory
        # Before it is divided by M the sum may be too large for 16 bits.
        x, score = (jax.tree.map(wide, tree) for tree in (cloud.x, cloud.score))
        phi = scale(self._factor(cloud), self.kernel.apart(_stein, x, score))
        return Velocity(jax.tree.map(lambda a, b: a.astype(b.dtype), phi, cloud.x)), memory

    def mixing(self, cloud: Cloud, memory: PyTree) -> tuple[pairwise.Mixing, PyTree] | None:
        if not whole_cloud(self.kernel):
            return None
        phi = _stein(self.kernel, cloud.x, cloud.score, pairwise.mixing)
        return phi.times(self._factor(cloud)), memory

    def _factor(self, cloud: Cloud) -> Any:
        return at(self.weight, cloud.step) / num_particles(cloud.x)


def _stein(kernel: Kernel, x: PyTree, score: PyTree, how: Any = None) -> Any:
    """sum_j [K_ij s_j + grad_{x_j} K_ij]."""
    h = kernel.bandwidth(x)
    how = how or pairwise.interact
    return how(x, x, lambda r2: kernel.pair(r2, h), values=score, ratio=kernel.ratio(h))


def check_parted(terms: Sequence[Term], x: PyTree) -> None:
    """Refuse leaves that start the same in all particles and stay so, where Stein's force by layer is all that moves them."""
    kernels = [term.kernel for term in terms if type(term) is Stein]
    by_layer = [kernel for kernel in kernels if isinstance(kernel, LayerWise)]
    if not by_layer or len(by_layer) < len(terms):
        return
    stuck = _stuck(by_layer, x)
    if not stuck:
        return
    layers = tuple(dict.fromkeys(name.rpartition("/")[0] for name in leaf_names(x)))
    advice = "put each into a group with a leaf that differs, or start it spread"
    if not _stuck([LayerWise(by_layer[0].kernel, layers)], x):
        advice = f"group leaves by layer, LayerWise(groups={layers!r}), or start these spread"
    raise ParticleError(
        f"the leaves {stuck} are the same in all {num_particles(x)} particles, and so is every group of LayerWise that they are in: Stein's "
        "force on them is the same for every particle, and they never part; expected groups that differ. As for biases that start at "
        f"zero, {advice}"
    )


def _stuck(kernels: Sequence[LayerWise], x: PyTree) -> list[str]:
    """The leaves that are the same in all particles and in no group with one that differs, or that will."""
    leaves = jax.tree.leaves(x)
    full = {i for i, leaf in enumerate(leaves) if leaf.size}
    stuck = {i for i in full if all_equal([leaves[i]])}
    groups = [full.intersection(places) for kernel in kernels for places in kernel.places(x)]
    for _ in groups:  # what one kernel parts, another hands on to the rest of its group
        stuck.difference_update(*[group for group in groups if group - stuck])
    return [name for i, name in enumerate(leaf_names(x)) if i in stuck]
