"""Targets: unnormalised log densities and their scores, on full data or minibatches."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from particlax import sharding
from particlax.blocks import wide
from particlax.errors import DataError, OptionError, TargetError, known_options
from particlax.noise import fold_in
from particlax.pairwise import Pulled
from particlax.particles import join, num_particles
from particlax.priors import GaussianPrior

__all__ = ["Evaluated", "Target"]

WIDE, FEW = 256, 256
"""Columns of a matrix from which on, and rows of a batch up to which, particles have copies of the rows on a CPU."""


class Evaluated(NamedTuple):
    """Log densities and scores of the particles, what they carry on, and the mean score of the leaves they share."""

    log_density: Float[Array, " M"]
    score: PyTree[Float[Array, "M ..."]]
    carried: PyTree = ()
    shared: PyTree = None
    pulled: Pulled | None = None
    """The score as the likelihood's part and a Gaussian prior's, for whoever adds them up on the way: unused, it costs nothing."""


class Target(eqx.Module):
    """The density to sample, as `Target(log_density)` or from a prior and a likelihood.

    `log_density(params)` returns a scalar for one particle. With data, `log_likelihood(params, batch)`
    returns one value per datum of the batch, shape [n]; the log density is then
    log_prior(params) + N / n * sum(log_likelihood), unbiased for a uniform minibatch (paper, section
    2.1). This factor N / n is applied here and nowhere else.

    A `stateful` likelihood is `log_likelihood(params, batch, carried, key)` and returns (values, carried): for networks
    whose layers keep statistics (batch norm) or draw random numbers (dropout). `carried` belongs to one particle
    and travels in `State.carried`; `key` is fresh for every particle and step.

    The part of the scores that comes from a `px.networks.GaussianPrior` with one variance needs no pass of its own over networks.

    `validate(params, carried, batch, data)`, if given, is called once by `px.run` before anything is compiled, with the shapes of
    one particle and of a batch, and all data: a place to refuse data that would fail silently.

    >>> target = Target(lambda x: -0.5 * jnp.sum(x**2))
    >>> values, scores = target.score(jnp.ones((4, 2)))
    >>> values.tolist(), scores[0].tolist()
    ([-1.0, -1.0, -1.0, -1.0], [-1.0, -1.0])
    """

    log_density: Callable[..., Any] | None
    log_prior: Callable[..., Any] | None
    log_likelihood: Callable[..., Any] | None
    num_data: int | None
    stateful: bool
    validate: Callable[..., None] | None

    @known_options
    def __init__(
        self,
        log_density: Callable[..., Any] | None = None,
        *,
        log_prior: Callable[..., Any] | None = None,
        log_likelihood: Callable[..., Any] | None = None,
        num_data: int | None = None,
        stateful: bool = False,
        validate: Callable[..., None] | None = None,
    ):
        if log_density is not None and (log_prior or log_likelihood or num_data):
            raise OptionError(
                "Target got log_density together with log_prior, log_likelihood or num_data; "
                "expected either log_density alone or all of log_prior, log_likelihood, num_data"
            )
        if log_density is None and (log_prior is None or log_likelihood is None):
            given = [
                n for n, f in (("log_prior", log_prior), ("log_likelihood", log_likelihood)) if f
            ]
            raise OptionError(
                f"Target got {' and '.join(given) or 'no log density'}; expected either log_density "
                "or all of log_prior, log_likelihood and num_data"
            )
        for name, function in (
            ("log_density", log_density),
            ("log_prior", log_prior),
            ("log_likelihood", log_likelihood),
        ):
            if function is not None and not callable(function):
                raise OptionError(f"{name} is {function!r}; expected a function of the parameters")
        if log_likelihood is not None and (
            isinstance(num_data, bool)
            or not isinstance(num_data, (int, np.integer))
            or num_data < 1
        ):
            raise OptionError(
                f"num_data is {num_data!r}; expected the number N of data as a positive int, for the "
                "factor N / n that scales a minibatch of n"
            )
        self.log_density = _opaque(log_density)
        self.log_prior = _opaque(log_prior)
        self.log_likelihood = _opaque(log_likelihood)
        self.num_data = None if num_data is None else int(num_data)
        if stateful and log_likelihood is None:
            raise OptionError("Target got stateful=True without log_likelihood; expected both")
        self.stateful = bool(stateful)
        self.validate = validate

    @property
    def precision(self) -> Any:
        """That of a Gaussian prior with one variance, whose part of the scores is added apart; else None."""
        prior: Any = self.log_prior
        if isinstance(prior, functools.partial) and not prior.args and not prior.keywords:
            prior = prior.func  # as `_opaque` made it
        plain = type(prior) is GaussianPrior  # a subclass may mean anything
        return prior.precision if plain else None

    def __call__(self, params: PyTree, batch: PyTree = None) -> Float[Array, ""]:
        """The log density of one particle (an unbiased estimate of it, given a minibatch)."""
        return self._value(params, batch, None, None)[0]

    def _value(
        self, params: PyTree, batch: PyTree, carried: PyTree, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], PyTree]:
        """The log density and what is carried on."""
        prior, likelihood, carried = self._parts(params, batch, carried, key)
        return prior + likelihood, carried

    def _parts(
        self, params: PyTree, batch: PyTree, carried: PyTree, key: Key[Array, ""] | None
    ) -> tuple[Any, Float[Array, ""], PyTree]:
        if self.log_density is not None:
            return 0.0, _scalar("log_density", self.log_density(params)), carried
        assert self.log_prior and self.log_likelihood and self.num_data
        num = num_rows(batch)
        if self.stateful:
            terms, carried = _pair(self.log_likelihood(params, batch, carried, key))
        else:
            terms = self.log_likelihood(params, batch)
            if terms is None:
                raise TargetError(
                    "log_likelihood returned None; expected one value per datum: its last line needs `return`"
                )
            terms = jnp.asarray(terms)
        if terms.shape != (num,):
            raise TargetError(
                f"log_likelihood returned shape {terms.shape} for a batch of {num}; expected one value "
                f"per datum, shape ({num},). Do not sum over the batch and do not scale by N / n: "
                "Target does both"
            )
        prior = self.log_prior(params)
        prior = _scalar("log_prior", prior if prior is None else prior + 0.0)  # flat may return 0
        return prior, (self.num_data / num) * jnp.sum(terms), carried

    def score(
        self, particles: PyTree, batch: PyTree = None
    ) -> tuple[Float[Array, " M"], PyTree[Float[Array, "M ..."]]]:
        """Log densities and their gradients at every particle: one vmapped gradient, M evaluations."""
        return self.evaluate(particles, batch)[:2]

    def evaluate(
        self,
        particles: PyTree,
        batch: PyTree = None,
        carried: PyTree = (),
        key: Key[Array, ""] | None = None,
        shared: PyTree = None,
    ) -> Evaluated:
        """As `score`, with what the particles carry and the leaves that they share.

        `key` makes one for each particle. With `shared`, all have the same one, so that what no particle changes is computed
        once for all of them.
        """
        if self.stateful and key is None:
            raise OptionError(
                "the target is stateful and this is a plain evaluation; give what the particles carry and a "
                "key: target.evaluate(particles, batch, carried, key)"
            )
        if self.log_density is not None and batch is not None:
            raise DataError(
                "a batch came, but the target is a plain log_density(params) that takes no data; leave "
                "the batch out or build Target(log_prior=..., log_likelihood=..., num_data=...)"
            )
        if shared is not None:
            return self._evaluate_shared(particles, shared, batch, carried, key)
        if not self.stateful:

            def each(particles: PyTree) -> Any:
                rows, axes = _handed_out(batch, particles)
                one = lambda own, rows: self._sloped(own, rows, None, None)
                return jax.vmap(one, (0, axes))(particles, rows)

            values, _, slopes = sharding.by_rows(each, particles)
            return self._finished(particles, Evaluated(values, slopes, carried))
        assert key is not None
        place = jnp.arange(num_particles(particles))

        def some(particles: PyTree, carried: PyTree, place: Array) -> Any:
            rows, axes = _handed_out(batch, particles)
            keys = jax.vmap(fold_in, (None, 0))(key, place)
            return jax.vmap(self._sloped, (0, axes, 0, 0))(particles, rows, carried, keys)

        values, carried, slopes = sharding.by_rows(some, particles, carried, place)
        return self._finished(particles, Evaluated(values, slopes, carried))

    def _sloped(
        self, params: PyTree, batch: PyTree, carried: PyTree, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, ""], PyTree, PyTree]:
        """The log density, what is carried on, and the slope, but for a prior's that `_finished` adds."""
        apart = self.precision is not None

        def inner(params: PyTree) -> Any:
            prior, likelihood, new = self._parts(params, batch, carried, key)
            return (likelihood, (prior, new)) if apart else (prior + likelihood, (0.0, new))

        (value, (prior, new)), slope = jax.value_and_grad(inner, has_aux=True)(params)
        return prior + value, new, slope

    def _finished(self, particles: PyTree, seen: Evaluated, shared: PyTree = None) -> Evaluated:
        """With the slope of the prior, if it was left out."""
        pull = self.precision
        if pull is None:
            return seen
        add = lambda slope, x: (wide(slope) - pull * wide(x)).astype(slope.dtype)
        score, common = jax.tree.map(add, (seen.score, seen.shared), (particles, shared))
        return seen._replace(score=score, shared=common, pulled=Pulled(seen.score, pull))

    def _evaluate_shared(
        self, particles: PyTree, shared: PyTree, batch: PyTree, carried: PyTree, key: Any
    ) -> Evaluated:
        """One gradient of the sum: by a particle it is that particle's score, by a shared leaf M times the mean."""

        apart = self.precision is not None

        def total(particles: PyTree, shared: PyTree, carried: PyTree) -> Any:
            one = lambda own, old: self._parts(join(own, shared), batch, old, key)
            priors, likelihoods, new = jax.vmap(one)(particles, carried)
            values = priors + likelihoods
            return jnp.sum(likelihoods if apart else values), (values, new)

        def some(particles: PyTree, carried: PyTree) -> Any:
            grads, found = jax.grad(total, (0, 1), has_aux=True)(particles, shared, carried)
            return (grads[0], found), grads[1]

        (score, (values, carried)), grad = sharding.by_rows(some, particles, carried, sums=True)
        num = num_particles(particles)
        seen = Evaluated(values, score, carried, jax.tree.map(lambda g: g / num, grad))
        return self._finished(particles, seen, shared)


def _handed_out(batch: PyTree, particles: PyTree) -> tuple[PyTree, PyTree]:
    """The batch, and which of its leaves have a copy for each particle: axis 0, or None.

    A product of rows that all share with a matrix that every particle has of its own is one product of joined matrices, which XLA for
    CPUs copies together and apart again. With wide matrices and few rows that takes longer than to hand out the rows.
    """
    if jax.default_backend() != "cpu":
        return batch, None
    matrices = [leaf.shape[1:] for leaf in jax.tree.leaves(particles) if leaf.ndim == 3]
    wide = {shape[i] for shape in matrices for i in (0, 1) if shape[1 - i] >= WIDE}
    num = num_particles(particles)
    suits = lambda leaf: jnp.ndim(leaf) == 2 and len(leaf) <= FEW and leaf.shape[1] in wide
    copied = lambda leaf: jnp.broadcast_to(leaf, (num, *leaf.shape)) if suits(leaf) else leaf
    axes = jax.tree.map(lambda leaf: 0 if suits(leaf) else None, batch)
    return jax.tree.map(copied, batch), axes


def _opaque(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """Hide what has no hash, such as arrays inside a callable pytree: `jax.jit(flow.step)` needs one."""
    unhashable = isinstance(function, eqx.Module) or getattr(function, "__hash__", None) is None
    return functools.partial(function) if function is not None and unhashable else function  # pyright: ignore


def _pair(result: Any) -> tuple[Array, PyTree]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TargetError(
            f"a stateful log_likelihood returned {type(result).__name__}; expected the pair (values of shape "
            "[n], what the particle carries on)"
        )
    return jnp.asarray(result[0]), result[1]


def _scalar(name: str, value: Any) -> Array:
    if value is None:
        raise TargetError(f"{name} returned None; expected a scalar: its last line needs `return`")
    value = jnp.asarray(value)
    if value.shape != ():
        raise TargetError(
            f"{name} returned shape {value.shape} for one particle; expected a scalar. Sum it over "
            "coordinates, and write it for one particle: the particle axis is added by vmap"
        )
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TargetError(f"{name} returned dtype {value.dtype}; expected a real floating type")
    return value


def num_rows(batch: PyTree) -> int:
    """The number n of data in a batch, after checking that its leaves agree."""
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise DataError(
            "the target has a likelihood but no batch came; give flow.step(key, state, batch) a batch, "
            "or px.run(..., data=...) arrays or px.Minibatches(arrays, n)"
        )
    sizes = {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}
    scalar = next((name for name, shape in sizes.items() if not shape), None)
    if scalar is not None:
        raise DataError(
            f"the leaf {scalar or 'that is all'} of the batch is a scalar, shape (); expected a leading data axis (a list counts as a pytree of its "
            "elements: turn it into an array first)"
        )
    if len({shape[0] for shape in sizes.values()}) > 1:
        raise DataError(
            f"the leaves of the batch have different leading sizes ({sizes}); expected the same number "
            "of data on axis 0 of every leaf"
        )
    num = next(iter(sizes.values()))[0]
    if num == 0:
        raise DataError(f"the batch is empty ({sizes}); expected at least one datum")
    return num
