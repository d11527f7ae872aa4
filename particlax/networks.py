"""From a network to a target: likelihoods, Gaussian priors, M networks as one pytree.

A network is `apply(params, x) -> outputs` for a batch x and one set of parameters. Everything here adds to it what a
`Target` needs; `equinox`, `linen` and `nnx` make such functions of modules.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, PyTree

from particlax import outputs
from particlax.blocks import wide
from particlax.checks import Part, Scheduled, as_key, number, positive, refuse_not_finite, whole
from particlax.data import Minibatches
from particlax.diffusions import GFSD, Blob
from particlax.errors import DataError, OptionError, TargetError, expect, known_options
from particlax.particles import by_prefix, join, leaf_names, num_particles
from particlax.priors import GaussianPrior, Prior
from particlax.target import Target, num_rows
from particlax.terms import Cloud, Frame, Term, Velocity

__all__ = [
    "FunctionSpace",
    "Network",
    "classifier",
    "regressor",
    "split",
]


class Network(Part):
    """A network as two pure functions: `start(key)` makes parameters, `apply(params, x)` uses them on a batch.

    With `stateful=True`, `start(key)` returns (params, carried) and the network is trained through
    `forward(params, x, carried, key) -> (outputs, carried)`; `apply(params, x, carried)` is then how it predicts. `carried`
    holds batch-norm statistics and the like, and may be ().

    >>> net = Network(lambda key: jax.random.normal(key, (3, 2)), lambda w, x: x @ w)
    >>> net.init(jax.random.key(0), 5).shape
    (5, 3, 2)
    """

    start: Callable[..., Any]
    apply: Callable[..., Any]
    forward: Callable[..., Any] | None = None
    stateful: bool = False

    def __check_init__(self) -> None:
        if self.stateful != (self.forward is not None):
            raise OptionError(
                f"Network got stateful={self.stateful} and forward={self.forward!r}; expected forward exactly when "
                "the network is stateful"
            )

    def init(self, key: Key[Array, ""], num: int) -> PyTree:
        """`num` networks, independently initialised: particles, or (particles, carried) if stateful."""
        whole("num", num, 1)
        try:
            made = jax.vmap(self.start)(jax.random.split(as_key(key), num))
        except jax.errors.TracerArrayConversionError as error:
            raise OptionError(
                "start makes a NumPy array of what it draws from its key, and is mapped over the keys of all networks; expected jax.numpy for what is "
                "drawn from the key, and for numbers that stay as they are a NumPy generator"
            ) from error
        if self.stateful and not (type(made) is tuple and len(made) == 2):
            raise OptionError(
                f"start returned {type(made).__name__}; expected the pair (params, carried) of a stateful network, () if it carries nothing"
            )
        return made


def split(
    particles: PyTree, names: Iterable[str]
) -> tuple[PyTree[Float[Array, "M ..."]], PyTree[Float[Array, "..."]]]:
    """A partly Bayesian network: of a cloud of networks, the leaves that stay particles and those that are shared.

    `names` are leaves, or layers whose leaves are all meant, such as ["Dense_1"]. Of the others, the first network's values are
    kept, once. Each part has None where the other has its leaves.

    >>> head, trunk = split({"trunk": jnp.zeros((5, 3)), "head": jnp.zeros((5, 2))}, ["head"])
    >>> head["head"].shape, trunk["trunk"].shape
    ((5, 2), (3,))
    """
    if isinstance(names, str):
        raise OptionError(f"names is {names!r}; expected a list of names: [{names!r}]")
    names = list(names) if isinstance(names, Iterable) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise OptionError(f"names is {names!r}; expected a list of names of leaves or layers")
    if _is_pair(particles, names):
        raise OptionError(
            "split got the pair that a stateful network's init returns; expected particles: "
            "particles, carried = net.init(key, M)"
        )
    num_particles(particles)
    chosen = [found is not None for found in by_prefix(leaf_names(particles), names, "split")]
    if not any(chosen) or all(chosen):
        some = "every leaf" if any(chosen) else "no leaf"
        raise OptionError(
            f"split names {some} as particles; expected some of {leaf_names(particles)}, the others being shared"
        )
    leaves, structure = jax.tree.flatten(particles)
    own = [leaf if kept else None for leaf, kept in zip(leaves, chosen, strict=True)]
    shared = [None if kept else leaf[0] for leaf, kept in zip(leaves, chosen, strict=True)]
    return jax.tree.unflatten(structure, own), jax.tree.unflatten(structure, shared)


def _is_pair(particles: PyTree, names: Sequence[str]) -> bool:
    """Whether this is what a stateful network's init returns: nothing is carried, or the names are those of its first part."""
    if type(particles) is not tuple or len(particles) != 2:
        return False
    first, second = particles
    own, whole = leaf_names(first), leaf_names(particles)
    fits = lambda name, among: any(leaf == name or leaf.startswith(f"{name}/") for leaf in among)
    known = bool(names) and all(fits(name, own) and not fits(name, whole) for name in names)
    return known or (type(second) is tuple and not second)


@known_options
def classifier(
    network: Network | Callable[..., Any],
    *,
    num_data: int,
    prior: Prior = 1.0,
    temperature: float = 1.0,
) -> Target:
    """A classifier's posterior: categorical likelihood of `batch["y"]` given logits for `batch["x"]`, Gaussian prior.

    `network` is a `Network` or `apply(params, x) -> logits [n, C]`. Logits [n, L, C] with labels [n, L] are sequences: a datum is one
    of the n. Labels at which `batch["mask"]` is false do not count, such as what fills up shorter sequences. `temperature` T below 1
    gives the cold posterior, density^(1/T).

    >>> target = classifier(lambda w, x: x @ w, num_data=100)
    >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.array([0, 1, 1, 0])}
    >>> target.score(jnp.zeros((5, 3, 2)), batch)[0].shape
    (5,)
    """

    def likelihood(logits: Array, batch: Any) -> Array:
        labels = batch["y"]
        if labels.dtype.kind in "biu" and labels.dtype.itemsize < 4:
            # A byte does not hold the number of 256 classes.
            labels = labels.astype(jnp.int32)
        if logits.ndim != labels.ndim + 1 or logits.shape[:-1] != labels.shape:
            hint = ""
            if labels.shape == logits.shape and labels.ndim > 1:
                hint = ". Convert one-hot labels with y.argmax(-1)"
            elif labels.shape == (*logits.shape[:-1], 1):
                hint = ". Take the labels' last axis away: y[..., 0]"
            elif labels.shape == logits.shape:
                hint = f". {outputs.ONE_LOGIT}"
            raise TargetError(
                f"the network returned shape {logits.shape} for labels of shape {labels.shape}; expected logits of "
                f"shape {(*labels.shape, 'C')}, one for each class{hint}"
            )
        outputs.refuse_other_labels(labels, logits.shape[-1])
        log_probs = jax.nn.log_softmax(wide(logits))
        # Not looked up: the gradient of that is a sum into places, which a GPU takes in any order.
        kind, axes = jnp.result_type(labels), range(labels.ndim)
        here = labels[..., None] == jnp.expand_dims(jnp.arange(logits.shape[-1], dtype=kind), axes)
        classes = (labels >= 0) & (labels < logits.shape[-1])
        chosen = jnp.where(classes, jnp.sum(jnp.where(here, log_probs, 0), -1), jnp.nan)
        return _counted(chosen, batch)

    return _target(network, likelihood, num_data, prior, temperature, check=outputs.check_labels)


@known_options
def regressor(
    network: Network | Callable[..., Any],
    *,
    num_data: int,
    noise: float | Callable[[PyTree], Any] | Literal["network"] = 1.0,
    prior: Prior = 1.0,
    temperature: float = 1.0,
) -> Target:
    """A regression's posterior: `batch["y"]` normal around the network's outputs for `batch["x"]`, Gaussian prior.

    `noise` is the standard deviation: a number; a function of the parameters where it is learned (the
    network must then ignore the leaf that holds it, and the prior covers it); or "network" where it differs from datum to datum and the
    network returns the pair (means, sds). Targets at which `batch["mask"]` is false do not count (data must be finite all the same: put 0 there).

    >>> target = regressor(lambda w, x: x @ w, num_data=100, noise=0.1)
    >>> batch = {"x": jnp.ones((4, 3)), "y": jnp.zeros(4)}
    >>> target.score(jnp.zeros((5, 3)), batch)[0].shape
    (5,)
    """
    own = isinstance(noise, str) and noise == outputs.NETWORK
    if not callable(noise) and not own:
        positive("noise", noise, zero=False, also=outputs.NOISE)

    def likelihood(found: Any, batch: Any, params: PyTree) -> Array:
        truth, mean = batch["y"], found[0] if own else found
        if mean.shape != truth.shape:
            raise TargetError(
                f"the network returned shape {mean.shape} for targets of shape {truth.shape}; expected the same "
                "(squeeze a last axis of one; give every output a target)"
            )
        sd = wide(found[1]) if own else _sd(noise, params, truth)
        # What does not count must not get into the gradient, not even times 0.
        mask = _mask(batch, truth)
        sd = jnp.where(mask, jnp.broadcast_to(sd, truth.shape), 1)
        error = jnp.where(mask, truth - wide(mean), 0) / sd
        return _counted(-0.5 * error**2 - jnp.log(sd) - 0.5 * jnp.log(2 * jnp.pi), batch)

    return _target(network, likelihood, num_data, prior, temperature, with_params=True, pair=own)


def _sd(noise: Any, params: PyTree, truth: Any) -> Array:
    """The noise, a number or made of the parameters: one sd, or one for each output."""
    try:
        sd = jnp.asarray(noise(params) if callable(noise) else noise)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise TargetError(
            f"noise(params) failed, {error!r}; expected a function of the parameters {leaf_names(params)} that returns an sd"
        ) from error
    if sd.shape != truth.shape[max(1, truth.ndim - sd.ndim) :]:
        raise TargetError(
            f"noise returned shape {sd.shape} for targets of shape {truth.shape}; expected a number, or one for each output (the last axes). Where it differs "
            f"from datum to datum, the network returns it: (means, sds), with noise={outputs.NETWORK!r}"
        )
    return sd


def _counted(values: Array, batch: Any) -> Array:
    """The sum for each datum, of those at which the mask is true."""
    return jnp.sum(jnp.where(_mask(batch, values), values, 0).reshape(len(values), -1), 1)


def _mask(batch: Any, values: Any) -> Array:
    """Which of the values count: all, if nothing is said."""
    given = batch.get("mask")
    mask = jnp.asarray(True if given is None else given)
    if mask.shape != values.shape[: mask.ndim] or mask.dtype != bool:
        raise DataError(
            f"batch['mask'] is {mask.dtype}{list(mask.shape)} for labels or targets of shape {list(values.shape)}; expected true or "
            "false for each of them, or for each datum"
        )
    return mask.reshape(*mask.shape, *[1] * (values.ndim - mask.ndim))


class FunctionSpace(Term):
    """Repulsion of functions in place of parameters: J_i^T times the diffusion's force between f_i = apply(x_i, inputs).

    Networks that differ only in parameters that do not matter are no longer pushed apart, networks that predict alike are
    (D'Angelo & Fortuin 2021). With `Blob` it is the gradient, by the parameters, of the entropy of the smoothed law of
    the f_i. `inputs` are what the functions are compared on, all at every step, or `px.Minibatches(inputs, n)`: n of
    them, anew at every step, the same in every run. Inputs beyond the data spread the functions there. Use it where a diffusion stands:

    >>> import particlax as px
    >>> net = Network(lambda key: jax.random.normal(key, (3, 2)), lambda w, x: x @ w)
    >>> spread = FunctionSpace(net, jnp.ones((7, 3)))
    >>> flow = px.Flow(classifier(net, num_data=10), (px.Drift(), spread), px.integrators.Euler(1e-3))
    """

    network: Network
    inputs: Any
    diffusion: Blob | GFSD = Blob()
    weight: Scheduled = 1.0

    def __init__(self, network: Any, inputs: Any, diffusion: Any = Blob()):
        self.network = as_network(network)
        self.diffusion = expect("diffusion", diffusion, (Blob, GFSD), "px.diffusions.Blob()")
        if not isinstance(inputs, Minibatches):
            inputs = jax.tree.map(jnp.asarray, inputs)
            num_rows(inputs)
            refuse_not_finite("inputs", inputs)
        self.inputs, self.weight = inputs, diffusion.weight

    def check(self, particles: PyTree) -> None:
        self.diffusion.kernel.check(jnp.arange(float(num_particles(particles)))[:, None])

    def __call__(self, cloud: Cloud, key: Any, memory: PyTree) -> tuple[Velocity, PyTree]:
        found, pull = jax.vjp(lambda raw: self._outputs(raw, cloud), cloud.raw)
        inner = Cloud(found, jnp.zeros_like(found), cloud.step, Frame(), found)
        velocity, _ = self.diffusion(inner, None, ())
        return Velocity(cloud.frame.scores(pull(velocity.drift)[0])), memory

    def _outputs(self, raw: PyTree, cloud: Cloud) -> Float[Array, "M K"]:
        x, num = self.inputs, num_particles(raw)
        if isinstance(x, Minibatches):
            x = x.batch(jax.random.key(0), cloud.step)
        carries = self.network.stateful

        def one(own: PyTree, carried: PyTree) -> Any:
            params = own if cloud.shared is None else join(own, cloud.shared)
            return outputs.called(self.network.apply, params, x, *((carried,) if carries else ()))

        found = jax.vmap(one)(raw, cloud.carried)
        parts = list(found) if isinstance(found, (tuple, list)) else [found]  # (means, sds)
        if any(getattr(part, "shape", ())[1:2] != (num_rows(x),) for part in parts):
            raise TargetError(
                f"apply returned {jax.tree.map(jnp.shape, found)} for {num} particles and {num_rows(x)} inputs; expected "
                "one array with a row for each input, or a pair of such arrays"
            )
        return jnp.concatenate([wide(part).reshape(num, -1) for part in parts], 1)


def as_network(network: Any, what: str = "network") -> Network:
    """A `Network`, or what an apply alone makes one; `what` names it in the error."""
    if isinstance(network, Network):
        return network
    kind = type(network)
    if not callable(network) or isinstance(network, Target) or _is_module(network):
        came = f"a module, {kind.__name__}" if _is_module(network) else kind.__name__
        raise OptionError(
            f"{what} is {came}; expected apply(params, x) or a px.networks.Network, which px.modules.equinox, linen and nnx make of modules"
        )
    return Network(_no_start, network)


def _is_module(network: Any) -> bool:
    """Whether it is a module of Flax, or one of Equinox that takes inputs alone."""
    if isinstance(network, eqx.Module) and callable(network):
        places = inspect.signature(network.__call__).parameters.values()
        return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name not in ("key", "state") for p in places) == 1  # fmt: skip
    bases = [base for base in type(network).__mro__ if base.__module__.startswith("flax.")]
    return any(base.__name__ == "Module" for base in bases)


def _target(
    network: Any,
    likelihood: Any,
    num_data: int,
    prior: Prior,
    temperature: float,
    *,
    with_params: bool = False,
    pair: bool = False,
    check: Any = None,
) -> Target:
    positive("temperature", temperature, zero=False, schedule=False)
    cold = 1 / number(temperature)
    net = as_network(network)
    seen = likelihood if with_params else (lambda out, b, p: likelihood(out, b))
    plain = functools.partial(outputs.plain, net, pair=pair)
    trained = functools.partial(outputs.trained, net, pair=pair)

    def alone(params: PyTree, batch: Any) -> Array:
        return cold * seen(plain(params, batch), batch, params)

    def carrying(params: PyTree, batch: Any, carried: PyTree, key: Array) -> tuple[Array, PyTree]:
        found, carried = trained(params, batch, carried, key)
        return cold * seen(found, batch, params), carried

    def validate(params: PyTree, carried: PyTree, batch: Any, data: Any) -> None:
        outputs.refuse_unread(batch)
        mask = data.get("mask")  # of all data, or of one batch, in which nothing may count
        if np.ndim(mask) and len(mask) == num_data and not np.any(mask):
            raise DataError("the mask is false everywhere, so no datum counts; expected true where one does")  # fmt: skip
        if not net.stateful:
            found = jax.eval_shape(plain, params, batch)
        else:
            key = jax.eval_shape(jax.random.key, 0)
            found, new = jax.eval_shape(trained, params, batch, carried, key)
            outputs.refuse_other(carried, new)
            # What cannot predict is refused before it is trained.
            predict = lambda p, b, c: outputs.called(net.apply, p, outputs.rows_of(b), c)
            jax.eval_shape(predict, params, batch, carried)
        jax.eval_shape(seen, found, batch, params)
        if check is not None:
            check(found, data)

    return Target(
        log_prior=GaussianPrior(prior).tempered(cold),
        log_likelihood=carrying if net.stateful else alone,
        num_data=num_data,
        stateful=net.stateful,
        validate=validate,
    )


def _no_start(key: Any) -> Any:
    raise OptionError(
        "this network came as apply alone and cannot be initialised; make a px.networks.Network"
    )
