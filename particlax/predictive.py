"""What a cloud of networks predicts: the mixture of the particles' predictions, its scores and its uncertainty.

Networks are evaluated on the device, a batch of rows at a time, by one compiled function; results are gathered on the
host as NumPy arrays and scored in float64. So nothing here is for use inside `jax.jit`.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from particlax import outputs
from particlax.checks import positive
from particlax.errors import DataError, TargetError, expect, known_options
from particlax.history import History
from particlax.mixtures import (
    Categorical,
    CategoricalScores,
    Entropy,
    Labels,
    Normal,
    NormalScores,
    Reliability,
    Values,
    labels_of,
)
from particlax.networks import Network
from particlax.sweep import FLOOR, Sweep, merged

__all__ = ["Categorical", "CategoricalScores", "Entropy", "Normal", "NormalScores", "Reliability"]
__all__ += ["auroc", "categorical", "log_density", "normal", "snapshots", "temperature"]

RANGE = (0.01, 100.0)  # of temperatures

Apply: TypeAlias = Callable[..., Any] | Network


@known_options
def categorical(
    apply: Apply, particles: PyTree, x: PyTree, *, batch_size: int = 1000, keep: bool = True
) -> Categorical:
    """The mixture p(y | x) = 1/M sum_m softmax(apply(particle_m, x))_y.

    `apply(params, rows)` returns the logits [n, C] of one particle, or [n, L, C] for L labels in each row; `particles` is a
    cloud, a run's history (its clouds together) or a run's result, which stateful and partly Bayesian networks need (`apply` may
    then be the `px.networks.Network`); `x` an array or pytree with n rows. The networks take turns, and their logits for
    `batch_size` rows are on the device; the log-probabilities [M, n, C] are gathered on the host. Without `keep` they are
    dropped, and host memory does not grow with M.

    >>> pred = categorical(lambda w, x: x @ w, jnp.array([[[0.0, 9.0]], [[9.0, 0.0]]]), jnp.ones((4, 1)))
    >>> pred.log_probs.shape, pred.probs[0].round(2).tolist(), bool(pred.entropy().model[0] > 0.69)  # log 2 = 0.693
    ((2, 4, 2), [0.5, 0.5], True)
    """
    networks = Sweep(apply, particles, x, batch_size, logits=True)
    mixture, data, model, *each = networks.run(results=4 if keep else 3)
    return Categorical(mixture[0], data[0], model[0], *each)


@known_options
def log_density(
    apply: Apply, particles: PyTree, x: PyTree, y: Labels, *, batch_size: int = 1000
) -> Float[np.ndarray, "*n"]:
    """log 1/M sum_m softmax(apply(particle_m, x))_y of the given labels, where C is too large for `categorical`.

    Of each network's logits only those of the labels are kept. For language models: logits [n, L, C], labels [n, L], a
    `batch_size` of a few sequences. exp(-mean) is the perplexity. Padding has labels too, such as 0, and is left out afterwards:
    log_density(...)[mask].mean().

    >>> logits = jnp.log(jnp.array([[[0.5, 0.25, 0.25]], [[0.25, 0.5, 0.25]]]))  # M = 2, n = 1, C = 3
    >>> np.exp(-log_density(lambda p, x: p, logits, jnp.zeros(1), jnp.array([0]))).round(3).tolist()
    [2.667]
    """
    networks = Sweep(apply, particles, x, batch_size, logits=True)
    return networks.run(labels_of(y, networks.shape))[0][0].astype(np.float64)


def temperature(pred: Categorical, y: Labels) -> float:
    """The T that maximises the log density of held-out labels under `pred.tempered(T)` (Guo et al. 2017).

    The log density is concave in 1/T. T stays in [0.01, 100], and is an end where there is no maximum: 0.01 if all
    predictions are right, 100 if they are worse than guesses.

    >>> pred = categorical(lambda w, x: x @ w, jnp.eye(2)[None], 9 * jnp.eye(2)[jnp.array([0, 0, 0, 1])])
    >>> round(temperature(pred, jnp.array([0, 0, 1, 1])), 3)  # 3 of 4 are right: 1 / (1 + exp(-9/T)) = 3/4
    8.192
    """
    expect("pred", pred, Categorical, "px.predictive.categorical(apply, particles, x)")
    from scipy.optimize import brentq
    from scipy.special import log_softmax

    density = np.maximum(pred.log_density(y), FLOOR)
    log_p = np.maximum(pred.log_mixture.astype(np.float64), FLOOR)

    def slope(log_t: float) -> float:
        """The derivative of the mean log density by 1/T: the mean of log p_y - E_T[log p]."""
        weights = np.exp(log_softmax(log_p * np.exp(-log_t), -1))
        return float(np.mean(density - np.sum(weights * log_p, -1)))

    low, high = np.log(RANGE)
    if (cold := slope(low) > -1e-12) or slope(high) <= 0:  # up to rounding
        return RANGE[0] if cold else RANGE[1]
    return float(np.exp(brentq(slope, low, high, xtol=1e-10)))  # pyright: ignore


def auroc(inside: Values, outside: Values) -> float:
    """P(outside > inside) + P(outside = inside) / 2: how well a score tells inputs of another kind.

    Scores that should be higher outside: usually `pred.entropy().total`; `pred.entropy().model`, which only an ensemble
    has; as a baseline `1 - pred.confidence` (Hendrycks & Gimpel 2017).

    >>> auroc(np.array([0.0, 1.0]), np.array([1.0, 2.0]))
    0.875
    """
    for name, part in (("inside", inside), ("outside", outside)):
        if hasattr(part, "_fields") or isinstance(part, eqx.Module):
            raise DataError(
                f"{name} is {type(part).__name__}; expected a score for each input, for instance pred.entropy().total"
            )
    known, new = (np.sort(np.asarray(part, np.float64), axis=None) for part in (inside, outside))
    for name, part in (("inside", known), ("outside", new)):
        if not part.size or np.isnan(part[-1]):  # NaN sorts last
            raise DataError(f"{name} is empty or has NaN; expected a finite score for each input")
    below = sum(int(np.searchsorted(known, new, side).sum()) for side in ("left", "right"))
    return below / (2 * known.size * new.size)


@known_options
def normal(
    apply: Apply,
    particles: PyTree,
    x: PyTree,
    *,
    noise: float | Callable[..., Any] | Literal["network"],
    batch_size: int = 1000,
) -> Normal:
    """The mixture p(y | x) = 1/M sum_m N(apply(particle_m, x), noise^2).

    `apply(params, rows)` returns the means [n] or [n, ..., K] of one particle. `noise` is the sd: a number; for learned noise
    a function of the params of one particle that returns a number (or K of them); or "network" if `apply` returns the pair (means, sds).

    >>> cloud = {"w": jnp.array([1.0, 3.0]), "log_sd": jnp.zeros(2)}
    >>> pred = normal(lambda p, x: p["w"] * x, cloud, jnp.ones(5), noise=lambda p: jnp.exp(p["log_sd"]))
    >>> pred.score(2 * jnp.ones(5)).rmse
    0.0
    """
    if isinstance(noise, str) and noise == outputs.NETWORK:
        both = Sweep(apply, particles, x, batch_size, logits=False, pair=True).run()[0]
        if not np.all(both[..., 1] > 0):
            raise TargetError(
                f"apply returned sds down to {both[..., 1].min()}; expected sds > 0, for instance jax.nn.softplus(...) + 1e-3"
            )
        return Normal(both[..., 0], both[..., 1])
    if not callable(noise):
        positive("noise", noise, zero=False, also=outputs.NOISE)
    networks = Sweep(apply, particles, x, batch_size, logits=False)
    sd = noise if callable(noise) else lambda _: jnp.asarray(noise, float)
    try:
        sds, tail = np.asarray(jax.vmap(sd)(networks.params), np.float64), networks.shape[1:]
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise TargetError(
            f"noise(params) failed, {error!r}; expected a function of the params of one particle that returns an sd"
        ) from error
    if sds.shape[1:] not in ((), tail):
        raise TargetError(
            f"noise returned shape {sds.shape[1:]} for one particle and {(networks.shape[0], *tail)} means; expected a positive sd, or one for "
            f"each output. Where it differs from row to row, apply returns the pair (means, sds), with noise={outputs.NETWORK!r}"
        )
    if not np.all((sds > 0) & (sds < np.inf)):
        raise TargetError(
            f"noise returned {sds[0]} for the first particle, {sds.min()} to {sds.max()} over all; expected a positive "
            "sd (or one for each output), for instance lambda params: jnp.exp(params['log_sd'])"
        )
    sds = sds.reshape(len(sds), 1, *(sds.shape[1:] or [1] * len(tail)))
    return Normal(networks.run()[0], sds)


def snapshots(history: PyTree, last: int | None = None) -> PyTree[Float[np.ndarray, "N ..."]]:
    """All clouds of a trajectory as one, leaves [T, M, ...] as [T M, ...]; or its `last` snapshots alone.

    >>> snapshots({"w": jnp.zeros((10, 4, 3))}, last=5)["w"].shape
    (20, 3)
    """
    return merged(history.particles if isinstance(history, History) else history, last)
