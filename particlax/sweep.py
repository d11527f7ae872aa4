"""Networks shown rows of inputs, a batch at a time: the engine of `predictive`.

One compiled function sees one batch; the networks take turns inside it, so that the activations of one are in memory.
"""

import functools
from collections.abc import Hashable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from particlax.blocks import wide
from particlax.checkpoints import Checkpoint
from particlax.checks import refuse_not_finite, refuse_traced, whole
from particlax.data import refuse_words, refuse_wrapped
from particlax.errors import OptionError, ParticleError, TargetError, told
from particlax.flow import Flow, State
from particlax.history import EMPTY, History
from particlax.networks import as_network
from particlax.outputs import NETWORK, called, numbers
from particlax.particles import join, num_particles
from particlax.run import Result, Snapshot
from particlax.target import num_rows

__all__ = ["Member", "Sweep", "merged"]

FLOOR = -1e30  # for log 0, where it is multiplied by 0


class Member(eqx.Module):
    """How one particle of a run predicts: with what it carries, and with the leaves that all share."""

    apply: Any
    shared: PyTree
    carries: bool = eqx.field(static=True)

    def params(self, pair: tuple[PyTree, PyTree]) -> PyTree:
        """All parameters of the network."""
        return pair[0] if self.shared is None else join(pair[0], self.shared)

    def __call__(self, pair: tuple[PyTree, PyTree], x: PyTree) -> Any:
        return self.apply(self.params(pair), x, *((pair[1],) if self.carries else ()))


class Both(eqx.Module):
    """The pair (means, sds) that a network returns, side by side on a last axis."""

    apply: Any

    def __call__(self, *args: Any) -> Array:
        return jnp.stack(numbers("apply", self.apply(*args), True), -1)


def merged(tree: PyTree, last: int | None = None) -> PyTree:
    """All clouds of a trajectory as one, leaves [T, M, ...] as [T M, ...]; or its `last` clouds alone."""
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(tree)]
    whole("last", 1 if last is None else last, 1)
    heads = {shape[:2] for shape in shapes}
    if len(heads) != 1 or len(head := heads.pop()) < 2 or head[0] < (last or 1):
        raise ParticleError(
            f"the history has leaves of shape {shapes}; expected [T, M, ...] with one T >= {last or 1} and one M, "
            "for instance px.run(..., thin=100).history"
        )
    return jax.tree.map(lambda a: np.asarray(a)[-(last or 0) :].reshape(-1, *a.shape[2:]), tree)


def _member(apply: Any, particles: Any, pair: bool) -> tuple[Any, PyTree]:
    """A function of one member of a cloud and of rows, and the cloud."""
    found = _gathered(particles)
    network = as_network(apply, "apply")
    plain = Both(_hashable(network.apply)) if pair else _hashable(network.apply)
    if found is None and network.stateful:
        raise OptionError(
            "the network is stateful but plain particles came; give the run's result or its history, which also hold what they "
            "carry: px.predictive.categorical(net, result, x)"
        )
    if found is None:
        return plain, particles
    cloud, carried, shared = found
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(carried)]
    # An apply alone may take what is carried.
    if shapes and network is apply and not network.stateful:
        raise OptionError(
            f"the networks of this run carry arrays of shapes {shapes}, and the network that came carries nothing; expected the one that was trained"
        )
    return Member(plain, shared, network.stateful or bool(shapes)), (cloud, carried)


def _hashable(apply: Any) -> Any:
    """Programs are kept by what they compute: a method counts by its object, if that has no hash."""
    return apply if isinstance(apply, Hashable) else apply.__call__


def _gathered(particles: Any) -> tuple[PyTree, PyTree, PyTree] | None:
    """The cloud, what it carries and what it shares, of a run's result, history or checkpoint; None for a cloud alone."""
    if particles is None:
        raise ParticleError(
            "no particles came; expected a cloud, a run's result, or the history of px.run(..., thin=100)"
        )
    if isinstance(particles, Flow):
        raise ParticleError("a flow came in place of particles; expected a run's result")
    if isinstance(particles, History):
        if not len(particles):
            raise ParticleError(EMPTY)
        return *merged((particles.particles, particles.carried)), None
    if isinstance(particles, Checkpoint) and particles.state is None:
        if particles.shared is not None:
            raise ParticleError(
                "a partly Bayesian network's checkpoint came; expected px.checkpoints.load(folder, flow=flow, particles=start), where start is "
                "what the run began from: flow.init(head, shared=trunk)"
            )
        return particles.particles, particles.carried, None
    state = particles.state if isinstance(particles, Result | Snapshot | Checkpoint) else particles
    if not isinstance(state, State):
        return None
    return state.particles, state.carried, None if state.shared is None else state.shared.values


class Sweep:
    """Networks and the rows to show them, checked before anything is compiled."""

    def __init__(
        self,
        apply: Any,
        particles: Any,
        x: PyTree,
        batch_size: int,
        *,
        logits: bool,
        pair: bool = False,
    ):
        whole("batch_size", batch_size, 1)
        instead = (
            "inside, call the networks yourself, as jax.vmap(net.apply, (0, None))(particles, x)"
        )
        refuse_traced("px.predictive", (particles, x), instead)
        refuse_words(x)
        refuse_wrapped(x)
        arrays = (np.ndarray, jax.Array)
        x = jax.tree.map(lambda leaf: leaf if isinstance(leaf, arrays) else np.asarray(leaf), x)
        apply, particles = _member(apply, particles, pair)
        num_particles(particles[0] if isinstance(apply, Member) else particles)
        num = num_rows(x if jax.tree.leaves(x) else np.zeros(0))  # no array has no rows
        refuse_not_finite("particles", particles, ParticleError)
        refuse_not_finite("x", x)
        size = -(-num // -(-num // batch_size))  # as many batches, of almost equal size
        cloud = jax.tree.map(jnp.asarray, particles)
        first, rows = jax.tree.map(lambda a: a[0], cloud), jax.tree.map(lambda a: a[:size], x)
        out: Any = called(functools.partial(jax.eval_shape, apply), first, rows)
        shape: Any = getattr(out, "shape", ())
        fits = len(shape) > 1 and shape[-1] > 1 if logits else len(shape) > 0
        if not fits or shape[0] != size or not jnp.issubdtype(out.dtype, jnp.floating):
            wanted = f"means [n] or [n, ..., K], or with noise={NETWORK!r} a pair of such arrays, (means, sds)"
            if logits:
                wanted = "logits [n, C] or [n, L, C] with C > 1. One logit z of two classes becomes jnp.stack([0 * z, z], -1)"
            came = f"{out.dtype} of shape {shape}" if hasattr(out, "dtype") else told(out)
            sizes = [np.shape(leaf) for leaf in jax.tree.leaves(x)]
            raise TargetError(
                f"apply returned {came} for one particle and n = {size} rows, x of shape {sizes[0] if len(sizes) == 1 else sizes}; expected real {wanted}. Of one datum x give x[None]"
            )
        self.apply = _hashable(apply)
        self.params = jax.vmap(apply.params)(cloud) if isinstance(apply, Member) else cloud
        self.cloud, self.x, self.size, self.logits = cloud, x, size, logits
        self.shape = (num, *shape[1:])

    def run(self, y: Any = None, results: int = 1) -> list[np.ndarray]:
        """The first results of `_batch`, for all rows, on the host."""
        num, stores = self.shape[0], []
        take = lambda index: jax.tree.map(lambda leaf: jnp.asarray(leaf[index]), (self.x, y))
        empty = lambda part: np.empty((len(part), num, *part.shape[2:]), part.dtype)
        for start in range(0, num, self.size):
            index = np.minimum(np.arange(start, start + self.size), num - 1)  # the last row again
            *parts, bad = _batch(self.apply, self.cloud, *take(index), logits=self.logits)
            if bad.any():
                particle, row = np.argwhere(np.asarray(bad))[0].tolist()
                raise TargetError(
                    f"apply returned NaN or infinity for particle {particle} and row {index[row]}, which are finite; "
                    "expected finite outputs: leave this particle out, or mend apply"
                )
            stores = stores or [empty(part) for part in parts[:results]]
            for store, part in zip(stores, parts, strict=False):
                store[:, index] = np.asarray(part)
        return stores


@eqx.filter_jit
def _batch(apply: Any, cloud: PyTree, rows: PyTree, y: Any, *, logits: bool) -> list[Array]:
    """[means]; or, of logits, [mixture at labels] or [mixture, data, model, log-probs]; and where they are NaN."""

    def one(params: PyTree) -> Array:
        out = wide(apply(params, rows))
        out = jax.nn.log_softmax(out) if logits else out
        return out if y is None else jnp.take_along_axis(out, y[..., None], -1)[..., 0]

    each = jax.lax.map(one, cloud)  # in turns: the activations of one network are in memory
    bad = jnp.isnan(each) if logits else ~jnp.isfinite(each)
    bad = jnp.any(bad.reshape(*each.shape[:2], -1), -1)
    if not logits:
        return [each, bad]
    mixture = jax.nn.logsumexp(each, 0, keepdims=True) - jnp.log(len(each))
    if y is not None:
        return [mixture, bad]
    log_p = jnp.maximum(each, FLOOR)
    data = -jnp.sum(jnp.exp(log_p) * log_p, -1)
    # KL(p || q) = sum_c q (r log r - r + 1) with r = p / q: no term is negative, nothing cancels
    log_r = log_p - jnp.maximum(mixture, FLOOR)
    terms = jnp.maximum(log_r * jnp.exp(log_r) - jnp.expm1(log_r), 0)
    model = jnp.sum(jnp.exp(mixture) * terms, -1)
    return [mixture, *(jnp.mean(part, 0, keepdims=True) for part in (data, model)), each, bad]
