"""Flow: target, terms, metric and integrator as one step of a sampler."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key, PyTree

from particlax import calls, pairwise, placement
from particlax.answers import answered, stepped
from particlax.blocks import few, wide
from particlax.checks import refuse_not_finite
from particlax.errors import OptionError, ParticleError, expect, known_options
from particlax.integrators import Integrator
from particlax.kernels import LayerWise
from particlax.metrics import Identity, Metric
from particlax.noise import fold_in
from particlax.particles import as_cloud, check_parts, join, num_particles
from particlax.target import Evaluated, Target
from particlax.terms import Cloud, Drift, Frame, Term, Velocity, add, check_parted

__all__ = ["Flow", "Info", "Shared", "State"]

SMALL = 1 << 20
"""Most bytes of a leaf whose scores may be written out for the sake of their order."""


class State(eqx.Module):
    """Everything that a flow carries from one step to the next."""

    particles: PyTree[Float[Array, "M ..."]]
    step: Int[Array, ""]
    integrator: PyTree
    terms: tuple[PyTree, ...]
    carried: PyTree = ()
    """What each particle carries beside its position, such as batch-norm statistics; leading axis M."""
    shared: "Shared | None" = None
    """In partly Bayesian networks, the leaves that all particles share."""


class Shared(eqx.Module):
    """Single values that are trained with the mean gradient over the particles, by the flow's integrator."""

    values: PyTree[Float[Array, "..."]]
    integrator: PyTree


class Info(eqx.Module):
    """What a step saw, at the particles it started from. Unused parts cost nothing under `jax.jit`."""

    log_density: Float[Array, " M"]
    score: PyTree[Float[Array, "M ..."]]
    forces: dict[str, Float[Array, ""]]
    """Root mean squared norm of each term's drift over the cloud, in the metric's coordinates: the balance of
    attraction and repulsion."""


class Flow(eqx.Module):
    """A sum of terms on a target, stepped by an integrator (the recipe, paper eq. 23).

    `step` evaluates M scores, once, whatever the number of terms. Keys are folded from the step number and
    the place among the noisy terms (for random ones, among those), so resuming, or adding a deterministic term, changes no noise: passing
    the same key at every step is right, and so is passing fresh ones.

    >>> import particlax as px
    >>> target = px.Target(lambda x: -0.5 * jnp.sum(x**2))
    >>> terms = (px.Drift(), px.diffusions.Blob())
    >>> flow = px.Flow(target, terms, integrator=px.integrators.Euler(0.1))
    >>> state = flow.init(jax.random.normal(jax.random.key(0), (20, 2)))
    >>> state, info = flow.step(jax.random.key(1), state)
    >>> int(state.step)
    1
    """

    target: Target
    terms: tuple[Term, ...]
    integrator: Integrator
    metric: Metric

    @known_options
    def __init__(
        self,
        target: Target,
        terms: Sequence[Term] | Term,
        integrator: Integrator,
        metric: Metric = Identity(),
    ):
        self.target = expect("target", target, Target, "px.Target(log_density)")
        self.integrator = expect("integrator", integrator, Integrator, "px.integrators.Euler(1e-2)")
        self.metric = expect("metric", metric, Metric, "px.metrics.Ensemble()")
        self.terms = tuple(terms) if isinstance(terms, Sequence) else (terms,)
        if not self.terms:
            raise OptionError("Flow got no terms; expected at least one, such as px.Stein()")
        for term in self.terms:
            expect("each of terms", term, Term, "px.Drift()")
        layered = any(isinstance(getattr(term, "kernel", None), LayerWise) for term in self.terms)
        if layered and not metric.diagonal:
            raise OptionError(
                f"the {type(metric).__name__} metric mixes coordinates of all layers, so that a LayerWise kernel has no "
                "layers to tell apart; use the Identity or Diagonal metric, or a kernel of the whole cloud"
            )
        noisy = [type(term).__name__ for term in self.terms if term.noisy]
        if noisy and not integrator.takes_noise:
            raise OptionError(
                f"{type(integrator).__name__} got the noisy term {noisy[0]}: an optimizer would rescale the "
                "noise and sample a wrong law. Use px.integrators.RMS (RMSprop that scales noise by its "
                "square root), Euler or Momentum, or a deterministic diffusion such as px.diffusions.Blob()"
            )
        if noisy and integrator.elementwise and not metric.diagonal:
            raise OptionError(
                f"{type(integrator).__name__} scales coordinates one by one, which does not commute with the "
                f"{type(metric).__name__} metric, and {noisy[0]} is noisy: the law would be wrong. Use Euler or "
                "Momentum with it, or the Diagonal metric"
            )

    def init(self, particles: PyTree, carried: PyTree = (), shared: PyTree = None) -> State:
        """The state before the first step. Checks the particles; the caller's arrays are copied.

        `carried` is for stateful targets: what each particle carries, with leading axis M. `shared` is for partly Bayesian
        networks, as `px.networks.split` makes it: single values that no term moves, only their mean score.
        """
        try:
            cloud = as_cloud(placement.loosened(particles))
        except ParticleError as error:
            if not (self.target.stateful and type(particles) is tuple and len(particles) == 2):
                raise
            hint = "If it is the pair that a stateful network's init returns, use flow.init(*net.init(key, M))"
            raise ParticleError(f"{error}. {hint}") from None
        _finite(cloud)
        carried = _companions(self.target, cloud, carried)
        common = None if shared is None else self._share(cloud, shared)
        self.metric.check(cloud)
        for term in self.terms:
            term.check(cloud)
        check_parted(self.terms, cloud)
        memories = tuple(term.init(cloud) for term in self.terms)
        start = jnp.zeros((), jnp.int32)
        state = State(cloud, start, self.integrator.init(cloud), memories, carried, common)
        return _unshared(state)

    def _share(self, cloud: PyTree, shared: PyTree) -> Shared:
        check_parts(cloud, shared)
        values = jax.tree.map(lambda leaf: jnp.array(leaf, jnp.result_type(leaf)), shared)
        refuse_not_finite("shared", values, ParticleError)
        return Shared(values, self.integrator.init(values))

    def step(self, key: Key[Array, ""], state: State, batch: PyTree = None) -> tuple[State, Info]:
        """One step: pure, and fit for `jax.jit`, `lax.scan` and `vmap` over keys and states."""
        particles = state.particles
        now = fold_in(key, state.step)
        # Noisy terms fold their place into this key; the target has the stream of a place never reached.
        own = fold_in(now, 2**31 - 1)
        common = None if state.shared is None else state.shared.values
        seen = self.target.evaluate(particles, batch, state.carried, own, common)
        frame = self.metric.frame(particles)
        z, score = frame.points(particles), frame.scores(seen.score)
        pulled = seen.pulled if type(frame) is Frame else None
        cloud = Cloud(
            z, score, state.step, frame, particles, state.carried, common, pulled, seen.log_density
        )
        total, how, memories, forces = self._sum(cloud, now, state)
        move = lambda mixed: self._move(particles, total(mixed), state.integrator, state.step)
        if how is None:
            moved, memory = move(None)
        else:
            old = (particles, state.integrator)
            # Particles are written over: whatever else looks at them comes before.
            seen, how = _before(seen, how)
            moved, memory = pairwise.moved(z, _scores(cloud), how, move, old)
        shared = None
        if state.shared is not None:
            old, trained = state.shared, Velocity(seen.shared)
            shared = Shared(*self._move(old.values, trained, old.integrator, state.step))
        return (
            State(moved, state.step + 1, memory, memories, seen.carried, shared),
            Info(seen.log_density, seen.score, forces),
        )

    def check_data(self, state: State, batch: PyTree, data: PyTree) -> None:
        """Let the target refuse data: `batch` holds the shapes of what it sees at a step, `data` all there are."""
        if self.target.validate is None:
            return
        one, carried = jax.eval_shape(
            lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), (state.particles, state.carried)
        )
        if state.shared is not None:
            one = join(one, jax.eval_shape(lambda tree: tree, state.shared.values))
        self.target.validate(one, carried, batch, data)

    def _move(
        self, values: PyTree, velocity: Velocity, memory: PyTree, step: Int[Array, ""]
    ) -> tuple[PyTree, PyTree]:
        found = self.integrator.step(values, velocity, memory, step)
        moved, memory = stepped(self.integrator, found, values, memory)
        return jax.tree.map(lambda new, old: new.astype(old.dtype), moved, values), memory

    def _sum(
        self, cloud: Cloud, key: Key[Array, ""], state: State
    ) -> tuple[Callable[[PyTree], Velocity], pairwise.Mixing | None, tuple[PyTree, ...], dict]:
        """The velocity, given what the matrices of some terms make of the cloud; these, memories and forces."""
        called, drifts, noises, memories, forces = [], [], [], [], {}
        keys = _keys(self.terms, key)
        mixings = self._mixings(cloud, state)
        todo = zip(self.terms, keys, state.terms, mixings, strict=True)
        for place, (term, own, old, mixing) in enumerate(todo):
            if mixing:
                matrices, memory = mixing
                part = Velocity(pairwise.mixed(cloud.x, _scores(cloud), matrices))
            else:
                part, memory = answered(term, term(cloud, own, old), cloud.x, old)
                if type(term) is Drift:
                    called.append(term)
                else:
                    drifts.append(part.drift)
            memories.append(memory)
            if part.noise is not None:
                noises.append(part.noise)
            name = type(term).__name__
            forces[f"{name}{place}" if name in forces else name] = _rms(part.drift)

        def total(mixed: PyTree) -> Velocity:
            # A drift is computed where it is used, from a score in two parts if it came so.
            whole = cloud
            if how is not None and cloud.pulled is not None:
                whole = dataclasses.replace(cloud, score=cloud.pulled.whole(cloud.x))
            own = [term(whole, None, ())[0].drift for term in called]
            drift, noise = cloud.frame.tamed(add(*drifts, *own, mixed)), add(*noises)
            noise = None if noise is None else cloud.frame.back(noise)
            return Velocity(cloud.frame.back(drift), noise)

        found = [mixing[0] for mixing in mixings if mixing]
        how = functools.reduce(pairwise.Mixing.plus, found) if found else None
        return total, how, tuple(memories), forces

    def _mixings(self, cloud: Cloud, state: State) -> list[tuple[pairwise.Mixing, PyTree] | None]:
        """What the terms offer as matrices; a drift only if others use the score too, so that it costs nothing."""
        if not few(cloud.x):
            return [None] * len(self.terms)
        found = [term.mixing(cloud, old) for term, old in zip(self.terms, state.terms, strict=True)]
        plain = [isinstance(term, Drift) for term in self.terms]
        others = [m for m, drift in zip(found, plain, strict=True) if m and not drift]
        if not any(how.right is not None for how, _ in others):
            found = [None if drift else m for m, drift in zip(found, plain, strict=True)]
        return found


def _keys(terms: Sequence[Term], key: Key[Array, ""]) -> list[Key[Array, ""] | None]:
    """A key for each term that is noisy, by its place among them, or random, likewise."""
    noisy = random = 0
    keys: list[Any] = []
    for term in terms:
        keys.append(None)
        if term.noisy:
            keys[-1], noisy = fold_in(key, noisy), noisy + 1
        elif term.random:
            keys[-1], random = fold_in(fold_in(key, 2**31 - 2), random), random + 1
    return keys


def _unshared(state: State) -> State:
    """Every array once: a loop that writes over its state takes none twice."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        twice = id(leaf) in seen and isinstance(leaf, jax.Array)
        seen.add(id(leaf))
        return jnp.copy(leaf) if twice else leaf

    return jax.tree.map(own, state)


def _before(seen: Evaluated, how: pairwise.Mixing) -> tuple[Evaluated, pairwise.Mixing]:
    """Both as they are, the second only when the first's values are known."""
    log_density, how = lax.optimization_barrier((seen.log_density, how))
    leaves = jax.tree.leaves(seen.score)
    small = [leaf for leaf in leaves if leaf.nbytes <= SMALL]
    if 0 < len(small) < len(leaves):
        # XLA for CPUs drops the barrier before it decides what to copy. The scores of biases know all weights above them.
        how = calls.after(small, how)
    return seen._replace(log_density=log_density), how


def _scores(cloud: Cloud) -> PyTree | pairwise.Pulled:
    return cloud.score if cloud.pulled is None else cloud.pulled


def _rms(tree: PyTree) -> Array:
    leaves = jax.tree.leaves(tree)
    return jnp.sqrt(sum(jnp.sum(wide(leaf) ** 2) for leaf in leaves) / num_particles(tree))


def _companions(target: Target, cloud: PyTree, carried: PyTree) -> PyTree:
    """What the particles carry, as arrays; refused where its first axis is not M or nobody asks for it."""
    leaves = jax.tree.leaves(carried)
    if leaves and not target.stateful:
        raise OptionError(
            "carried came, but the target carries nothing; leave it out, or build the target with stateful=True. Leaves that all "
            "particles share are given by name: flow.init(particles, shared=...)"
        )
    num = num_particles(cloud)
    for path, leaf in jax.tree_util.tree_leaves_with_path(carried):
        if jnp.shape(leaf)[:1] != (num,):
            raise ParticleError(
                f"carried{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)} but there are {num} particles; "
                f"expected a leading axis of {num}"
            )
    refuse_not_finite("carried", carried, ParticleError)
    return jax.tree.map(jnp.array, carried)


def _finite(cloud: PyTree) -> None:
    """Refuse particles that are NaN or infinite from the start (skipped under tracing)."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(cloud):
        if isinstance(leaf, Tracer):
            return
        bad = jnp.any(~jnp.isfinite(leaf.reshape(len(leaf), -1)), axis=1)
        if bool(bad.any()):
            where = jnp.flatnonzero(bad)[:10].tolist()
            name = jax.tree_util.keystr(path) or "the array"
            raise ParticleError(
                f"{int(bad.sum())} of {len(leaf)} particles are not finite in {name} (first: {where}); "
                "expected finite starting points"
            )
